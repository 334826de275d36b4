from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.cli import load_example, main
from autoshard.errors import InputError
from tests.sample_plan import sample_plan


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    return str(path)


def test_show_prints_the_plan(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", file]) == 0
    assert capsys.readouterr().out.split() == str(sample_plan()).split()


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
        (["doctor", "nowhere:make"], "nowhere cannot be imported"),
        (["html", "FILE", "/no/such/folder/plan.html"], "No such file"),
        (["calibrate", "profile.json"], "Start it by torchrun: torchrun --nproc-per-node 8"),
    ],
)
def test_a_fault_of_the_user_is_one_line_and_status_1(
    arguments: list[str], said: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([file if word == "FILE" else word for word in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "usage: autoshard" in capsys.readouterr().err


SOURCE = """
import torch
from torch import nn

def triple(): return nn.Linear(2, 2), (torch.ones(1, 2),), {}
def keywords(): return nn.Linear(2, 2), {"input": torch.ones(1, 2)}
def positional(): return nn.Linear(2, 2), (torch.ones(1, 2),)
def alone(): return nn.Linear(2, 2)
number = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "example_factories.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("name", ["triple", "keywords", "positional"])
def test_a_factory_of_every_form(name: str) -> None:
    module, args, kwargs = load_example(f"example_factories:{name}")
    assert isinstance(module, nn.Linear)
    assert module(*args, **kwargs).shape == torch.Size([1, 2])


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("example_factories", "names no factory"),
        ("no_such_module:make", "no_such_module cannot be imported"),
        ("example_factories:nothing", "has no function nothing"),
        ("example_factories:number", "has no function number"),
        ("example_factories:alone", "returned a Linear: return (model, args, kwargs)"),
    ],
)
def test_what_is_no_factory(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_example(text)
