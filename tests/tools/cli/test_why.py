from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate, Shard

from autoshard import PipelinePlan, ShardingPlan
from autoshard.tools.cli import main
from tests.sample_plan import sample_plan
from tests.tools.cli.test_planning import folder

__all__ = ["folder"]

WHY = ("why", "planned_models:make", "--effort", "fast")
MESH = ("--mesh", "dp=2,tp=2")
UP = "layers.0.weight"


def test_why_prints_the_alternative_and_saves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WHY, f"{UP}=tp:S(0)", *MESH, "--hint", "layers.4=R", "-o", "other.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("It is possible")
    assert "all-gather on tp" in printed
    other = ShardingPlan.load(folder / "other.json")
    assert other.placements[UP][1] == Shard(0)
    assert other.hints == {"layers.4": "R", UP: "tp: S(0)"}
    # A saved plan is asked with the hints, the cluster and the mesh that it records.
    assert main([*WHY, f"{UP}=tp:S(0)", "--plan", "other.json"]) == 0
    assert capsys.readouterr().out == "The plan has it already.\n"
    assert main([*WHY, f"{UP}=replicate(3)", "--plan", "other.json"]) == 2
    assert "matches no module" in capsys.readouterr().err
    assert main([*WHY, "layers.4.weight=tp:S(0)", "--plan", "other.json"]) == 1
    assert "contradict each other on layers.4.weight" in capsys.readouterr().out


def test_why_asks_pipelines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--mesh", "pp=2,tp=2", "--virtual", "1", "--microbatches", "2")
    assert main([*WHY, f"{UP}=tp:R", "schedule=GPipe", *options, "-o", "other.json"]) == 0
    assert capsys.readouterr().out.startswith("It is possible")
    other = PipelinePlan.load(folder / "other.json")
    assert (other.schedule.name, other.stages[0].placements[UP]) == ("GPipe", (Replicate(),))
    # A saved plan is asked with the axis, the hints and the cluster that it records.
    assert main([*WHY, "microbatches=2", f"{UP}=tp:R", "--plan", "other.json"]) == 0
    assert capsys.readouterr().out == "The plan has it already.\n"
    assert main([*WHY, "microbatches=3", "--plan", "other.json"]) == 1
    assert "a batch of 16 can't be divided into 3 microbatches" in capsys.readouterr().out
    assert main(["simulate", "other.json"]) == 0
    assert "bubble" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{UP}", *MESH), "has no glob or no placements"),
        (("=S(0)", *MESH), "has no glob or no placements"),
        ((f"{UP}=tp:S(x)", *MESH), "'tp:S(x)' is no placement: write S(0) or R"),
        ((f"{UP}=tp:tp:S(0)", *MESH), "is no placement"),
        ((f"{UP}=pp:S(0)", *MESH), "names the axis 'pp'; the axes of the mesh are dp=2, tp=2"),
        ((f"{UP}=R", f"{UP}=S(0)", *MESH), "occurs twice"),
        ((f"{UP}=R", *MESH, "--hint", "R"), "the hint 'R' has no glob"),
        (("schedule=1F1B", *MESH), "'1F1B' is no placement"),
        (("schedule=1F1", "--mesh", "pp=2"), "there is no schedule '1F1'. Close ones are 1F1B"),
        (("microbatches=two", "--mesh", "pp=2"), "microbatches='two': choose"),
        (("virtual=1", "virtual=2", "--mesh", "pp=2"), "virtual occurs twice"),
        ((f"{UP}=R", "--mesh", "dp=2", "--microbatches", "2"), "microbatches=2 is an option of a pipeline"),
        ((f"{UP}=R", "--mesh", "dp"), "'dp' is not the name and the size of an axis"),
        ((f"{UP}=R", *MESH, "--memory", "70"), "has no unit"),
        ((f"{UP}=R", *MESH, "--cluster", "h9000"), "h9000"),
        ((f"{UP}=R", *MESH, "-o", "no/plan.json"), "there is no folder"),
    ],
)
def test_a_question_that_is_not_valid_is_one_line_before_the_model_is_built(
    arguments: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WHY, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert not (folder / "built").exists()


def test_a_glob_that_matches_nothing_and_a_plan_of_another_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WHY, "layer.0=R", *MESH]) == 2
    assert "matches no parameter and no module. Close ones are layers.0" in capsys.readouterr().err
    sample_plan().save(folder / "sample.json")
    assert main([*WHY, f"{UP}=R", "--plan", "sample.json"]) == 1
    assert "this plan does not fit" in capsys.readouterr().err
    assert main([*WHY, f"{UP}=R", "--plan", "nowhere.json"]) == 1
    assert "cannot be read" in capsys.readouterr().err
