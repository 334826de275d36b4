from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.tools.cli import main
from tests.sample_plan import sample_plan
from tests.tools.cli.test_planning import folder

__all__ = ["folder"]

TARGET = "planned_models:make"


def test_simulate_writes_the_step_of_a_model_and_of_its_saved_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = ["--mesh", "dp=2,tp=2", "--effort", "fast"]
    assert main(["simulate", TARGET, *mesh, "--trace", "step.json"]) == 0
    printed = capsys.readouterr().out
    assert "Expenses of a step on one device" in printed
    assert "wrote step.json" in printed
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    assert main(["plan", TARGET, *mesh, "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["simulate", "plan.json", "--trace", "saved.json"]) == 0
    assert (folder / "saved.json").read_text() == (folder / "step.json").read_text()


def test_simulate_writes_the_step_of_a_pipeline(folder: Path) -> None:
    assert main(["simulate", TARGET, "--mesh", "pp=2", "--effort", "fast", "--trace", "step.json"]) == 0
    assert json.loads((folder / "step.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((TARGET,), 2, "is planned on a mesh: pass --mesh"),
        ((TARGET, "--mesh", "dp"), 2, "'dp' is not the name and the size of an axis"),
        ((TARGET, "--mesh", "dp=2", "--trace", "no/step.json"), 2, "there is no folder"),
        ((TARGET, "--mesh", "dp=2", "--trace", "."), 2, ". is a folder"),
        ((TARGET, "--mesh", "dp=2", "--hint", "x"), 2, "has no glob"),
        (("sample.json", "--mesh", "dp=2"), 2, "sample.json is a saved plan, which has a mesh"),
        (("nowhere.json",), 1, "cannot be read"),
        (("nowhere",), 2, "is planned on a mesh"),
    ],
)
def test_arguments_that_are_not_valid_are_one_line(
    arguments: tuple[str, ...], status: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample_plan().save(folder / "sample.json")
    assert main(["simulate", *arguments]) == status
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
    assert not (folder / "built").exists()
