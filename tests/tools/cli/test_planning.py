from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Frontier, PipelinePlan, ShardingPlan
from autoshard.tools.cli import main
from tests.plans.pages import Page
from tests.tools.cli.test_targets import LLAMA

SOURCE = """
from pathlib import Path

import torch

from tests.tools.cli.test_planning import Mlp, Scored

def make():
    Path("built").touch()
    with torch.device("meta"):
        return Mlp(), (torch.empty(16, 32),)

def branching():
    with torch.device("meta"):
        return Mlp(branching=True), (torch.empty(16, 32),)

def scored():
    with torch.device("meta"):
        return Scored(), (torch.empty(2**16, 512),)
"""


class Mlp(nn.Module):
    def __init__(self, branching: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))
        self.branching = branching

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().mean()
        return -loss if self.branching and loss > 0 else loss


class Scored(nn.Module):
    """Returns scores beside their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.linear(x)
        return {"scores": scores, "loss": scores.square().mean()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of factories."""
    (tmp_path / "planned_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return tmp_path


def test_plan_saves_the_plan_of_the_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mesh", "dp=2,tp=2", "--cluster", "a100", "--memory", "1MiB", "--recompute", "none"]
    outputs = ["-o", "plan.json", "--html", "plan.html"]
    assert main(["plan", "planned_models:make", *arguments, "--time-limit", "20", *outputs]) == 0
    plan = ShardingPlan.load(folder / "plan.json")
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(16, 32)
    expected = autoshard.plan(model, {"dp": 2, "tp": 2}, (x,), cluster="a100", memory_limit="1MiB", recompute="none")
    assert plan.placements == expected.placements
    assert plan.options["memory_limit"] == 2**20
    assert plan.cluster == "a100"
    printed = capsys.readouterr()
    assert printed.out.split() == [*str(plan).split(), "wrote", "plan.json", "wrote", "plan.html"]
    assert (folder / "plan.html").read_text("utf-8").startswith("<!doctype html>")
    # A job applies the file to the same model.
    plan.check(expected.mesh, expected.fingerprint, {name: tuple(p.shape) for name, p in model.named_parameters()})


def test_plan_of_a_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["--mesh", "stage=2", "--pipeline-axis", "stage", "--schedule", "GPipe", "--microbatches", "4"]
    arguments = [*pipeline, "--effort", "fast", "-o", "plan.json", "--html", "plan.html"]
    assert main(["plan", "planned_models:make", *arguments]) == 0
    plan = PipelinePlan.load(folder / "plan.json")
    assert (plan.axis, plan.schedule.name, plan.schedule.microbatches) == ("stage", "GPipe", 4)
    assert capsys.readouterr().out.split()[:-4] == str(plan).split()
    text = (folder / "plan.html").read_text("utf-8")
    assert "PipelinePlan on stage=2" in text


def test_plan_of_a_config(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    sizes = ["--batch", "4", "--seq", "16", "--mesh", "dp=2", "--output-placements", "planned"]
    sizes += ["--unread-outputs", "logits"]
    assert main(["plan", f"hf:{folder}", *sizes, "--effort", "fast", "-o", "plan.json"]) == 0
    plan = ShardingPlan.load(folder / "plan.json")
    assert set(plan.output_placements) == {"loss"}
    assert plan.shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert set(plan.input_placements) == {"input_ids", "labels"}


@pytest.mark.usefixtures("folder")
def test_mixed_precision_and_what_a_plan_was_made_for_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    dtypes = ["--param-dtype", "bfloat16", "--reduce-dtype", "float32"]
    assert main(["plan", "planned_models:scored", "--mesh", "dp=2", "--effort", "fast", *dtypes]) == 0
    lines = {line[:20].strip(): line[20:].strip() for line in capsys.readouterr().out.splitlines() if line[:1] == " "}
    assert lines["model"] == "Scored, 262,656 parameters in float32"
    assert lines["inputs"] == "x 65536x512 float32 (batch 65536)"
    assert lines["precision"] == "parameters cast to bfloat16, gradients reduced in float32"
    assert (lines["optimizer"], lines["device"]) == ("adamw", "H100 SXM5 80GB")
    assert f"autoshard {autoshard.__version__}, torch {torch.__version__}" in lines["made on"]
    # Products of 512 columns: two for the forward half, and one gradient, since the input needs none.
    work = 4 * 65536 * 512 * 512
    rate, _, used = lines["throughput"].partition(" samples per second (")
    seconds = 65536 / float(rate.replace(",", ""))
    assert float(used.split("%")[0]) == pytest.approx(100 * work / 2 / seconds / 989e12, rel=0.02)


@pytest.mark.parametrize(
    "verb",
    [
        ("plan", "--mesh", "dp=2"),
        ("fits", "--mesh", "dp=2", "--memory", "1GiB"),
        ("search", "--devices", "2", "--no-pipelines"),
        ("frontier", "--mesh", "dp=2", "--gaps", "0"),
        ("why", "--mesh", "dp=2", "linear.weight=R"),
        ("simulate", "--mesh", "dp=2"),
    ],
    ids=lambda verb: verb[0],
)
@pytest.mark.usefixtures("folder")
def test_outputs_beside_a_loss_are_left_in_shards_with_one_line(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = verb
    command = [name, "planned_models:scored", *arguments, "--effort", "fast"]
    assert main(command) == 0
    said = "scores: left in shards, as DTensors, beside the loss; --output-placements whole gathers them"
    assert capsys.readouterr().out.count(said) == 1
    for asked in ("whole", "planned"):
        assert main([*command, "--output-placements", asked]) == 0
        assert "left in shards" not in capsys.readouterr().out


def test_search_saves_the_best_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--devices", "4", "--no-pipelines", "--effort", "fast", "--option", "mini-parallelism"]
    assert main(["search", "planned_models:make", *arguments, "-o", "plan.json", "--html", "page.html"]) == 0
    plan = ShardingPlan.load(folder / "plan.json")
    assert plan.mesh.size == 1  # the fewest devices that it fits on
    assert "mesh-candidates" in Page((folder / "page.html").read_text("utf-8")).charts
    assert "best mesh" in capsys.readouterr().out


def test_frontier_saves_its_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--gaps", "0", "--effort", "fast", "--time-limit", "5"]
    files = ["-o", "frontier.json", "--html", "page.html"]
    assert main(["frontier", "planned_models:make", "--mesh", "x=2", *quick, *files]) == 0
    frontier = Frontier.load(folder / "frontier.json")
    assert frontier[0].mesh.names == ("x",)
    assert capsys.readouterr().out.split()[:-4] == str(frontier).split()
    assert "tradeoff" in Page((folder / "page.html").read_text("utf-8")).charts


@pytest.mark.usefixtures("folder")
def test_fits_answers_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fits", "planned_models:make", "--mesh", "dp=2", "--effort", "fast"]
    assert main([*arguments, "--memory", "1MiB"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("fits: peak ")
    assert main([*arguments, "--memory", "1KiB"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no plan fits in 1.0 KiB per device on mesh dp=2: the smallest peak found is" in printed.err


@pytest.mark.usefixtures("folder")
def test_fits_does_not_answer_for_a_model_that_cannot_be_captured(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["planned_models:branching", "--mesh", "dp=2"]
    assert main(["fits", *target, "--memory", "1MiB"]) == 2
    assert "return -loss" in capsys.readouterr().err
    assert main(["plan", *target]) == 1
    assert "return -loss" in capsys.readouterr().err


PLAN = ("plan", "planned_models:make")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PLAN, "--mesh", "dp8"), "--mesh dp8: 'dp8' is not the name and the size of an axis"),
        ((*PLAN, "--mesh", "dp=8,"), "'' is not the name and the size of an axis"),
        ((*PLAN, "--mesh", "dp=2,dp=4"), "axis 'dp' occurs twice"),
        ((*PLAN, "--mesh", "dp=0"), "mesh axis 'dp' has size 0"),
        ((*PLAN, "--mesh", "dp=2", "--cluster", "h9000"), "h9000"),
        ((*PLAN, "--mesh", "dp=4", "--cluster", "2xV100"), "the mesh has 4 devices and cluster"),
        ((*PLAN, "--mesh", "dp=2", "--memory", "70"), "the amount of memory '70' has no unit"),
        ((*PLAN, "--mesh", "dp=2", "--memory", "much"), "'much' is not an amount of memory"),
        ((*PLAN, "--mesh", "dp=2", "--optimizer", "adamm"), "adamm"),
        ((*PLAN, "--mesh", "dp=2", "--param-dtype", "bf61"), "--param-dtype bf61: name a floating dtype of torch"),
        ((*PLAN, "--mesh", "dp=2", "--reduce-dtype", "int8"), "--reduce-dtype int8: name a floating dtype of torch"),
        ((*PLAN, "--mesh", "dp=2", "--time-limit", "-1"), "time_limit=-1.0: it must be above zero"),
        (
            (*PLAN, "--mesh", "dp=2", "-o", "no/folder/plan.json"),
            "-o no/folder/plan.json: there is no folder",
        ),
        ((*PLAN, "--mesh", "dp=2", "--html", "."), "--html . is a folder"),
        (("plan", "planned_models:male", "--mesh", "dp=2"), "has no function male. Close ones are make"),
        ((*PLAN, "--mesh", "dp=2", "--microbatches", "4"), "the mesh dp=2 has none"),
        ((*PLAN, "--mesh", "dp=2", "--pipeline-axis", "tp"), "pipeline axis 'tp': the mesh dp=2 has no such axis"),
        ((*PLAN, "--mesh", "dp=2", "--set", "layers=2"), "--set layers=2 is not an option of a Python function"),
        (("plan", "nowhere:make", "--mesh", "dp=2"), "the Python module nowhere cannot be imported"),
        (("plan", "hf:nowhere", "--batch", "4", "--seq", "16", "--mesh", "dp=2"), "hf:nowhere: there is no file"),
        (("fits", "planned_models:make", "--mesh", "dp=2", "--memory", "1XB"), "has the unit 'XB'"),
        (("search", "planned_models:make", "--devices", "0"), "--devices 0: pass a number of devices"),
        (("search", "planned_models:make", "--devices", "2", "--cluster", "1xV100"), "cluster 1xV100 "),
        (("frontier", "planned_models:make", "--mesh", "pp=2"), "a frontier plans no pipeline"),
        (("frontier", "planned_models:make", "--mesh", "x=2", "--gaps", "-1"), "--gaps -1: pass a number of gaps"),
        (("frontier", "planned_models:make", "--mesh", "x=2", "--plot", "plot.doc"), "name a file that ends in .png"),
    ],
)
def test_an_argument_that_is_not_valid_is_one_line_before_the_model_is_built(
    arguments: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert not (folder / "built").exists()


def test_compare_prints_the_table_and_the_flags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--mesh",
        "dp=2,tp=2",
        "--cluster",
        "a100",
        "--baseline",
        "DDP",
        "--baseline",
        "FSDP2 x TP",
        "--details",
    ]
    assert main(["compare", "planned_models:make", *arguments, "-o", "compared.json", "--html", "compared.html"]) == 0
    printed = capsys.readouterr().out
    assert "FSDP2 x TP" in Page((folder / "compared.html").read_text("utf-8")).words
    data = json.loads((folder / "compared.json").read_text("utf-8"))
    assert [layout["name"] for layout in data["layouts"]] == ["autoshard", "DDP", "FSDP2 x TP"]
    assert "tensor_parallel_degree" in printed
    assert "--tensor-model-parallel-size" in printed
    assert printed.count("Expenses of a step") == 3
    assert main(["compare", "planned_models:make", "--mesh", "pp=2"]) == 2
    assert "a comparison plans no pipeline" in capsys.readouterr().err
