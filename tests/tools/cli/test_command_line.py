from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import Frontier
from autoshard.tools.cli import main
from tests.pipeline.test_pipeline_plan import plan_of
from tests.sample_plan import sample_plan

VERBS = (
    "plan",
    "fits",
    "compare",
    "search",
    "frontier",
    "why",
    "simulate",
    "show",
    "explain",
    "html",
    "verify",
    "doctor",
    "calibrate",
    "selfcheck",
)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0
    *_, example = capsys.readouterr().out.partition("example:\n")
    assert f"autoshard {verb} " in example


def test_the_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert set(VERBS) <= set(listed)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["autoshard", "--version"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("autoshard", run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("autoshard 0.2.0 (torch ")


def test_help_and_version_load_no_torch() -> None:
    for option in ("--version", "--help"):
        code = f"""
import sys
from autoshard.tools.cli import main
try:
    main([{option!r}])
except SystemExit:
    assert "torch" not in sys.modules
else:
    raise AssertionError
"""
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_selfcheck_passes_its_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--only", "nothing"]) == 2
    assert "no check is named nothing" in capsys.readouterr().err


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    return str(path)


def test_show_prints_the_plan(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", file]) == 0
    assert capsys.readouterr().out.split() == str(sample_plan()).split()


@pytest.fixture
def pipeline_file(tmp_path: Path) -> str:
    path = tmp_path / "pipeline.json"
    plan_of().save(path)
    return str(path)


def test_show_prints_the_plan_of_a_pipeline(pipeline_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", pipeline_file]) == 0
    assert capsys.readouterr().out.split() == str(plan_of()).split()


def test_explain_prints_every_stage(pipeline_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", pipeline_file, "h.*.mlp"]) == 0
    assert capsys.readouterr().out.split() == plan_of().explain("h.*.mlp").split()


def test_html_writes_the_page_of_a_pipeline(pipeline_file: str, tmp_path: Path) -> None:
    output = tmp_path / "pipeline.html"
    assert main(["html", pipeline_file, str(output)]) == 0
    text = output.read_text("utf-8")
    assert "1F1B, 4 microbatches" in text


def test_html_writes_the_page_of_a_frontier(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = str(tmp_path / "frontier.json"), str(tmp_path / "frontier.html")
    Frontier([sample_plan()]).save(path)
    assert main(["html", path, output]) == 0
    assert main(["html", path, output, "--memory", "24GiB"]) == 0
    assert "turning point" in Path(output).read_text("utf-8")
    assert main(["html", path, output, "--memory", "1GiB"]) == 1
    assert "no plan of this frontier fits" in capsys.readouterr().err
    assert main(["html", file, output, "--memory", "24GiB"]) == 2
    assert "is one plan" in capsys.readouterr().err


def test_show_prints_a_frontier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frontier = Frontier([sample_plan()])
    path = tmp_path / "frontier.json"
    frontier.save(path)
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.split() == str(frontier).split()
    assert main(["explain", str(path), "h.*"]) == 2
    assert "is a frontier of 1 plans" in capsys.readouterr().err


def test_a_damaged_file_of_a_pipeline_is_refused(pipeline_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(pipeline_file).read_text("utf-8")
    Path(pipeline_file).write_text(text[: len(text) // 2], "utf-8")
    assert main(["show", pipeline_file]) == 1
    assert "is cut short or damaged" in capsys.readouterr().err


def test_explain_prints_one_part(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", file, "h.*.mlp"]) == 0
    assert capsys.readouterr().out.split() == sample_plan().explain("h.*.mlp").split()


def test_html_writes_a_page(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.html"
    assert main(["html", file, str(output)]) == 0
    assert output.read_text("utf-8").startswith("<!doctype html>")
    assert "plan.html" in capsys.readouterr().out


def test_doctor_prints_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "patients.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def well(): return nn.Linear(2, 2), (torch.ones(1, 2),)\n"
        "class Ill(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return x if super().forward(x).sum() > 0 else -x\n"
        "def ill(): return Ill(2, 2), (torch.ones(1, 2),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert main(["doctor", "patients:well", "--cluster", "cpu"]) == 0
    assert "captured as one graph" in capsys.readouterr().out
    assert main(["doctor", "patients:ill"]) == 1
    assert "patients.py:6 (return x if super().forward(x).sum() > 0 else -x)" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "no_such_plan.json"], "cannot be read"),
        (["explain", "FILE", "nowhere"], "nothing in the plan is at 'nowhere'"),
        (["calibrate", "profile.json"], "Start it by torchrun: torchrun --nproc-per-node 8"),
    ],
)
def test_a_fault_of_the_user_is_one_line_and_status_1(
    arguments: list[str], said: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _check_fault(arguments, said, file, capsys, status=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor", "nowhere:make"], "nowhere cannot be imported"),
        (["doctor", "nowhere:make", "--cluster", "h9000"], "h9000"),
        (["html", "FILE", "/no/such/folder/plan.html"], "there is no folder /no/such/folder"),
        (["calibrate", "/no/such/folder/profile.json"], "there is no folder /no/such/folder"),
        (["calibrate", "profile.json", "--largest", "64"], "the amount of memory '64' has no unit"),
        (["calibrate", "profile"], "name a .json file"),
        (["selfcheck", "--json", "/no/such/folder/found.json"], "there is no folder /no/such/folder"),
        (["selfcheck", "--json", "."], "--json . is a folder"),
        (["selfcheck", "--cluster", "h9000"], "there is no cluster preset 'h9000'"),
    ],
)
def test_an_argument_that_is_not_valid_is_one_line_and_status_2(
    arguments: list[str], said: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _check_fault(arguments, said, file, capsys, status=2)


def _check_fault(
    arguments: list[str], said: str, file: str, capsys: pytest.CaptureFixture[str], *, status: int
) -> None:
    assert main([file if word == "FILE" else word for word in arguments]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_ctrl_c_is_one_line(file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.load_plan", interrupt)
    assert main(["show", file]) == 130
    assert capsys.readouterr().err == "autoshard: interrupted\n"


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "usage: autoshard" in capsys.readouterr().err
