"""`Frontier`: selecting, printing, drawing and saving plans; `autoshard.frontier` from the user's side."""

from __future__ import annotations

import builtins
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import autoshard
from autoshard.errors import BudgetError, PlanError
from autoshard.memory.footprint import Memory
from autoshard.plans.frontier import Frontier
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.units import format_bytes
from tests import models
from tests.notebooks import check_repr, shown
from tests.plans.pages import Page
from tests.runtime.meshes import simulated_mesh
from tests.sample_plan import sample_plan
from tests.training import TOLERANCE, fast_links, relative_difference

GB = 10**9


def plan_at(gigabytes: float, seconds: float) -> ShardingPlan:
    peak = int(gigabytes * GB)
    return sample_plan(
        memory=Memory(parameters=peak // 2, activations=peak - peak // 2, peak=peak), step_seconds=seconds
    )


def bent() -> Frontier:
    """Steep up to 20 GB, flat beyond; two of the plans are beaten."""
    points = [(60, 1.0), (10, 4.0), (20, 1.5), (15, 3.0), (40, 1.2), (30, 1.6), (40, 1.3)]
    return Frontier([plan_at(*point) for point in points])


def test_plans_that_hardly_differ_are_one_line() -> None:
    frontier = Frontier([plan_at(10, 1.0), plan_at(10.05, 0.999), plan_at(20, 0.5)])
    assert len(frontier) == 3
    assert len(shown(frontier).rows) == 4 + 1 + 2
    assert "Plan 1:" not in frontier.to_html()
    # A plan that was asked for is listed.
    assert "Plan 1:" in frontier.to_html(chosen=frontier[1])


def points_of(plans: Sequence[ShardingPlan]) -> list[tuple[float, float]]:
    return [(plan.memory.peak / GB, plan.step_seconds) for plan in plans]


def test_beaten_plans_are_left_out_and_the_others_sorted() -> None:
    frontier = bent()
    assert points_of(frontier) == [(10, 4.0), (15, 3.0), (20, 1.5), (40, 1.2), (60, 1.0)]
    assert len(frontier) == 5
    assert points_of(frontier[1:3]) == [(15, 3.0), (20, 1.5)]
    assert points_of([frontier[-1]]) == [(60, 1.0)]
    assert repr(frontier).startswith("Frontier(5 plans on dp=2, tp=4, 9.3 GiB at 4 s to ")
    check_repr(frontier)


def test_the_page_has_every_plan_and_the_chosen_one(tmp_path: Path) -> None:
    frontier = bent()
    page = Page(frontier.to_html())
    points, turning = page.series("tradeoff")
    assert points["x"] == [plan.memory.peak for plan in frontier]
    assert points["y"] == [plan.step_seconds for plan in frontier]
    assert (turning["x"], turning["y"]) == ([20 * GB], [1.5])
    parts = page.series("parts")
    assert [sum(heights) for heights in zip(*(one["y"] for one in parts), strict=True)] == points["x"]
    assert {"turning point", "plan 2"} <= set(page.words)
    assert "Plan 4: 55.9 GiB, 1 s" in page.words
    frontier.to_html(tmp_path / "page.html", chosen=frontier.at(memory=16 * GB))
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    _, turning, chosen = page.series("tradeoff")
    assert (chosen["y"], turning["y"]) == ([3.0], [1.5])
    with pytest.raises(PlanError, match="not a plan of this frontier"):
        frontier.to_html(chosen=sample_plan())


def test_a_notebook_shows_the_table() -> None:
    page = shown(bent())
    assert page.tags["table"] == 2
    assert len(page.rows) == 4 + 1 + 5


def test_no_plans_and_plans_of_different_models_are_refused() -> None:
    with pytest.raises(PlanError, match="a frontier of no plans"):
        Frontier([])
    with pytest.raises(PlanError, match="different models or meshes"):
        Frontier([sample_plan(), sample_plan(fingerprint="cd" * 32)])


def test_the_plan_for_a_budget() -> None:
    frontier = bent()
    assert frontier.at(memory="24GB") is frontier[2]
    assert frontier.at(memory=15 * GB) is frontier[1]
    assert frontier.at(memory="1TB") is frontier[-1]
    assert frontier.at(step_seconds=1.3) is frontier[3]
    assert frontier.at(step_seconds=100) is frontier[0]


def test_a_budget_that_no_plan_keeps_names_the_smallest_that_one_does() -> None:
    with pytest.raises(
        BudgetError, match=r"the smallest peak is 9\.3 GiB \(parameters 4\.7 GiB.*Allow 10000000000 bytes"
    ):
        bent().at(memory="9GB")
    with pytest.raises(BudgetError, match=r"a step of 500 ms or less.*shortest is predicted to take 1 s"):
        bent().at(step_seconds=0.5)


@pytest.mark.parametrize("budget", [{}, {"memory": "1GB", "step_seconds": 1.0}])
def test_one_budget_is_given(budget: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="takes one budget"):
        bent().at(**budget)


def test_budgets_that_are_none() -> None:
    with pytest.raises(BudgetError, match="not an amount"):
        bent().at(memory="much")
    with pytest.raises(PlanError, match="more than zero seconds"):
        bent().at(step_seconds=0.0)


def test_the_turning_point_is_where_the_curve_bends() -> None:
    assert points_of([bent().turning_point]) == [(20, 1.5)]
    line = Frontier([plan_at(10 * number, 5.0 - number) for number in (1, 2)])
    assert line.turning_point is line[-1]
    hollow = Frontier([plan_at(10, 4.0), plan_at(50, 3.9), plan_at(60, 1.0)])
    assert hollow.turning_point is hollow[-1]


def test_the_table_lists_every_plan_and_marks_the_turning_point() -> None:
    lines = str(bent()).splitlines()
    assert lines[0].strip() == "Frontier on dp=2, tp=4"
    [fact, marked] = [line for line in lines if "turning point" in line]
    assert fact.split()[2:4] == ["plan", "2"]
    assert marked.split()[:3] == ["2", "18.626", "GiB"]
    assert "50.0%" in marked


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_the_picture_is_labelled_and_marks_devices_within_its_range(tmp_path: Path, scale: Any) -> None:
    path = tmp_path / "frontier.svg"
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        bent().plot(path, scale=scale)
    text = path.read_text("utf-8")
    for label in ("peak memory per device [GiB]", "predicted step [s]", "turning point", "24 GB", "48 GB"):
        assert f">{label}</text>" in text, label
    assert ">80 GB</text>" not in text


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PlanError, match=r"pip install 'autoshard\[plot\]'"):
        bent().plot(tmp_path / "frontier.png")


def test_an_unknown_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="scale='square'"):
        bent().plot(tmp_path / "frontier.png", scale="square")  # type: ignore[arg-type]


def test_a_saved_frontier_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    frontier = bent()
    frontier.save(path)
    assert list(Frontier.load(path)) == list(frontier)


def test_files_that_are_no_frontier_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    with pytest.raises(PlanError, match="cannot be read"):
        Frontier.load(path)
    sample_plan().save(path)
    with pytest.raises(PlanError, match="format 'autoshard plan'"):
        Frontier.load(path)
    bent().save(path)
    path.write_text(path.read_text("utf-8")[:-40], "utf-8")
    with pytest.raises(PlanError, match="cut short"):
        Frontier.load(path)
    bent().save(path)
    data = json.loads(path.read_text("utf-8"))
    data["plans"][1] = data["plans"][1].replace("h100", "a100")
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(PlanError, match="plan 1 of frontier file"):
        Frontier.load(path)


# From a model


def test_plans_of_the_frontier_train_as_one_device_does() -> None:
    module, inputs = models.mlp(dtype=torch.float64)
    module(**inputs).backward()
    expected = {name: [parameter.grad] for name, parameter in module.named_parameters()}
    frontier = autoshard.frontier(module, {"x": 4}, (), inputs, cluster=fast_links(), gaps=1)
    assert len(frontier) > 1
    for chosen in (frontier[0], frontier[len(frontier) // 2]):
        module, _ = models.mlp(dtype=torch.float64)
        with simulated_mesh(x=4) as mesh:
            autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), plan=chosen)
            module(**inputs).backward()
            gradients = {name: [parameter.grad.full_tensor()] for name, parameter in module.named_parameters()}  # type: ignore[union-attr]
            gradients = {name: list(_of_ranks(tensor)) for name, [tensor] in gradients.items()}
        assert relative_difference(gradients, expected) <= TOLERANCE


def test_plans_of_the_frontier_are_asked_within_their_memory() -> None:
    module, inputs = models.mlp()
    frontier = autoshard.frontier(module, {"x": 4}, (), inputs, cluster=fast_links(), gaps=0)
    assert len(frontier) > 1
    lean, fast = frontier[0], frontier[-1]
    assert lean.why_not({"*": Replicate()}).verdict == "too large"
    assert fast.why_not({"*": Replicate()}).verdict in ("same", "possible")
    # A plan may take the memory below that of the next one, or what it was selected for.
    limit = frontier[1].memory.peak - 1
    assert f"fits in {format_bytes(limit)}" in lean.why_not({"*": Replicate()}).sentence
    selected = frontier.at(memory=lean.memory.peak)
    assert selected == lean
    assert f"fits in {format_bytes(lean.memory.peak)}" in selected.why_not({"*": Replicate()}).sentence
    with pytest.raises(PlanError, match="does not remember"):
        Frontier([ShardingPlan.from_json(lean.to_json())])[0].why_not({"*": Replicate()})


def test_a_plan_that_was_selected_by_its_memory_is_marked(tmp_path: Path) -> None:
    frontier = bent()
    remembering = Frontier([dataclasses.replace(plan, replanner=Forgetful()) for plan in frontier])
    remembering.to_html(tmp_path / "page.html", chosen=remembering.at(memory="16GB"))
    assert "chosen" in Page((tmp_path / "page.html").read_text("utf-8")).words
    with pytest.raises(PlanError, match="not a plan of this frontier"):
        remembering.to_html(chosen=dataclasses.replace(frontier[0], decisions={}))


class Forgetful:
    """A replanner without an answer."""

    def __call__(self, plan: Any, asked: Any) -> Any:
        raise AssertionError("it is not asked")

    def within(self, memory_limit: int | None) -> Forgetful:
        return Forgetful()


def _of_ranks(tensor: Any) -> Sequence[torch.Tensor]:
    return [tensor.reconcile()]


class Blocks(torch.nn.Module):
    """`forward(x)` returns a loss; what its layers make takes far more memory than what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh().exp().sin()
        return x.sum()


def test_plans_with_recomputation_are_on_the_frontier_where_they_are_worth_it() -> None:
    example = (torch.ones(4096, 16),)
    frontier = autoshard.frontier(Blocks(), {"x": 2}, example, cluster=fast_links(), gaps=0, recompute="auto")
    lean, fast = frontier[0], frontier[-1]
    assert lean.recomputed
    assert not fast.recomputed
    assert lean.memory.activations < fast.memory.activations
    alone = autoshard.plan(Blocks(), {"x": 2}, example, cluster=fast_links(), recompute="full")
    assert frontier.at(memory=alone.memory.peak).step_seconds <= alone.step_seconds


@pytest.mark.parametrize("gaps", [-1, 1.5, True])
def test_gaps_are_counted(gaps: Any) -> None:
    module, inputs = models.mlp()
    with pytest.raises(PlanError, match="gaps="):
        autoshard.frontier(module, {"x": 2}, (), inputs, gaps=gaps)


def test_what_a_plan_is_told_by_the_door_is_told_of_every_plan() -> None:
    module, inputs = models.mlp()
    hints = {"up.weight": {"x": torch.distributed.tensor.Shard(0)}}
    frontier = autoshard.frontier(module, {"x": 4}, (), inputs, cluster=fast_links(), hints=hints, gaps=0)
    alone = autoshard.plan(module, {"x": 4}, (), inputs, cluster=fast_links(), hints=hints)
    for plan in frontier:
        assert plan.hints == alone.hints
        assert plan.options == alone.options
        assert plan.timings["capture"] > 0
        assert plan.placements["up.weight"] == alone.placements["up.weight"]
    assert dataclasses.replace(frontier[-1], timings={}).step_seconds <= alone.step_seconds
