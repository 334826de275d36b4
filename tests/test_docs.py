"""What the documentation shows is true: its code runs, and its rules are sound."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.patterns.notation import parse
from autoshard.patterns.soundness import check
from tests.pages import Reader, blocks, extras, project
from tests.programs import ROOT
from tests.releases import skip_unless_torchtitan_runs

DOCS = ROOT / "docs"
RULES = DOCS / "rules.md"
"""A fixture runs it: rules can be registered once."""


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if "\n```python" in _text(page)]
PAGES.remove(RULES)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Pages have files of the same names.
    for title in {block.title for other in PAGES for block in blocks(other) if block.title}:
        monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)
    try:
        Reader(page, tmp_path).follow()
    except ImportError:
        if page.stem == "torchtitan":
            skip_unless_torchtitan_runs()
        raise


UNRUN = "<!-- not run: too long -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint('loss 5.1')\n```\n```text\nloss 4.9\nstep 1\n```\n", "page.md:4: not printed: step 1"),
        ("```console\n$ ls\n```\n", "page.md:1: nobody tries a block of 'console'"),
        ("```bash\nrm -r x\n```\n", "page.md: nobody tries the command rm -r x"),
        ("```bash\npip install 'autoshard[none]'\n```\n", "page.md: the package has no extra none"),
        (f"{UNRUN}```python\nimport torch\ntorch.nn\n```\n```text\nnot printed\n```\n", "page.md:6: not printed"),
        ("```bash\nmake tea\n```\n", "page.md: the Makefile has no tea"),
        (f"{UNRUN}```python\nif x\n```\n", "page.md:2: not Python: if x"),
        (f"{UNRUN}```python\nfrom autoshard import planer\n```\n", "page.md:2: there is no autoshard.planer"),
        (f"{UNRUN}```python\nimport autoshard as a\na.Pipe()\n```\n", "page.md:2: there is no a.Pipe"),
        (f"{UNRUN}```python\nimport autoshard\nautoshard.plan(m, x, limit=1)\n```\n", "plan has no option limit"),
        (f"{UNRUN}```python\nfrom autoshard import Pipeline\nPipeline(stages=2)\n```\n", "argument 'stages'"),
        (f"{UNRUN}```bash\nautoshard plan model:m --mash x=2\n```\n", "page.md:2: not a command: autoshard plan"),
        (f"{UNRUN}```bash\npython examples/hints.py --tea\n```\n", "page.md:2: examples/hints.py has no option --tea"),
        (f"{UNRUN}```bash\nls\n```\n", "page.md:2: nobody knows the command ls"),
    ],
)
def test_a_page_that_is_not_true_is_found(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError, match=message):
        Reader(page, tmp_path).follow()


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(map(_text, (DOCS / "reference").glob("*.md")))
    described = {path.rpartition(".")[2] for path in re.findall(r"^::: (autoshard\.[\w.]+)$", pages, re.MULTILINE)}
    assert set(autoshard.__all__) - {"__version__"} <= described


def test_the_tests_that_a_page_names_exist() -> None:
    """A file that is named alone lies in the folder that was named last."""
    for page in DOCS.rglob("*.md"):
        folder = ""
        for name in re.findall(r"`((?:tests/[\w/]*/)?test_\w+\.py|tests/[\w/]+/)`", _text(page)):
            folder, _, file = name.rpartition("/") if "/" in name else (folder, "", name)
            assert (ROOT / folder / file).exists(), f"{page.name} names {name}"


def test_every_extra_that_a_page_names_exists() -> None:
    named = extras("\n".join(map(_text, [ROOT / "README.md", *DOCS.rglob("*.md")])))
    assert named >= {"lightning", "plot", "torchtitan", "transformers"}
    assert named <= set(project()["optional-dependencies"])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the code of docs/rules.md defines, run from top to bottom."""
    reader = Reader(RULES, tmp_path_factory.mktemp("rules"))
    reader.follow()
    return reader.names


def test_the_rules_of_the_page_are_sound(page: dict[str, Any]) -> None:
    x, y = torch.randn(2, 4, 6, 12, dtype=torch.float64)
    scale = torch.randn(12, dtype=torch.float64)
    assert check("mylib::scaled", (x, scale)) == []
    assert check("mylib::scaled_backward", (x, y, scale)) == []
    assert check("mylib::roll", (x, 1)) == []
    assert check("mylib::sum_of_squares", x) == []
    assert check("mylib::mixed", (x, torch.randn(12, 6, dtype=torch.float64))) == []
    assert check("mylib::span", torch.randn(5, 7, dtype=torch.float64)) == []


def test_the_notation_of_the_tables_parses() -> None:
    text = _text(RULES)
    rules = [code for code in re.findall(r"`([^`\n]*->[^`\n]*)`", text) if code != "->"]
    assert len(rules) > 5
    for rule in rules:
        parse(rule)


def test_a_model_with_the_operator_of_the_page_is_planned_without_a_warning(page: dict[str, Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)
            self.scale = nn.Parameter(torch.ones(2048))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.down(torch.ops.mylib.scaled(self.up(x).relu(), self.scale))
            return nn.functional.layer_norm(x + hidden, (512,)).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sharding rule.*")
        plan = autoshard.plan(Scaled(), {"tp": 4}, (torch.empty(4, 16, 512),), cluster="cpu")
    chosen = {row.operator: row.strategy for row in plan.choices if row.operator.startswith("mylib")}
    assert chosen == {"mylib.scaled": "h on tp", "mylib.scaled_backward": "h on tp"}
    assert not plan.placements["up.weight"][0].is_replicate()
