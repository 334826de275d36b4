"""The search over meshes: what is dropped and why, what wins, and how it ends before its end.

What plans of some meshes tell of others.

Estimates of pipelines: shares of what the whole step takes on one stage's devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import Pipeline
from autoshard.capture.joint import JointGraph, capture
from autoshard.cluster.cluster import Cluster, Link
from autoshard.errors import BudgetError, HintError, PipelineError, PlanError
from autoshard.pipeline.plan.shape_planner import Stopping
from autoshard.planner.planner import Planner
from autoshard.planner.planning import planner_for, run_planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search import mesh_search
from autoshard.search.mesh_planner import Request
from autoshard.search.mesh_search import (
    MeshSearch,
    PipelineEstimates,
    longest_stage,
    slow_pipeline_reason,
    slow_within_limit_reason,
)
from autoshard.search.result import BEST, MeshCandidate, Row, UnlimitedResult
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape
from tests.targets import target as target_of

WIDE = 512
BATCH = 1024
FOREVER = float("inf")


def hosts(of: int) -> Cluster:
    """So many devices to a host; the network between hosts is slow, the link inside fast."""
    cluster = Cluster.preset("cpu")
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-7)
    return dataclasses.replace(
        cluster, devices_per_host=of, device=device, inside=Link(1e11, 1e-7), between=Link(1e9, 1e-6)
    )


@functools.cache
def model() -> tuple[nn.Module, tuple[torch.Tensor, ...], JointGraph]:
    """A model with a batch such that no device likes to hold all of either, and its step."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.ReLU(), nn.Linear(2 * WIDE, WIDE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    with torch.device("meta"):
        module, args = Loss(), (torch.empty(BATCH, WIDE),)
    return module, args, capture(module, args, {})


def no_pipeline(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pipeline was planned, and none was asked for")


def request(plan_pipeline: Callable[..., Any] = no_pipeline, **changes: Any) -> Request:
    module, _, graph = model()
    asked: dict[str, Any] = {
        "memory_limit": "1GiB",
        "effort": "fast",
        "hints": None,
        "cluster": hosts(2),
        "pipeline": Pipeline(),
    }
    asked |= {name: changes.pop(name) for name in list(changes) if name in asked}
    options = target_of(time_limit=60.0, recompute="none", **asked)
    return Request(
        module=module,
        graph=graph,
        capture_seconds=0.0,
        target=options,
        pipelines=changes.pop("pipelines", "none"),
        batch=BATCH,
        plan_pipeline=plan_pipeline,
    )


def searched(
    wanted: Request, devices: int = 4, deadline: float = FOREVER
) -> tuple[MeshSearch, dict[str, MeshCandidate]]:
    search = MeshSearch(wanted, devices, deadline)
    search.run()
    return search, {str(one.shape): one for one in search.candidates()}


def smallest_peak() -> int:
    """What the error names where nothing fits but the bounds allow it."""
    held = max(one.least_bytes for one in MeshSearch(request(), 4, FOREVER).candidates())
    with pytest.raises(BudgetError, match=r"the smallest peak found is .* Raise memory_limit to") as error:
        MeshSearch(request(memory_limit=held), 4, FOREVER).run()
    assert error.value.peak is not None
    return error.value.peak


def pipelines(seconds: float, peak: int = 1000) -> Callable[..., Any]:
    """A planner of pipelines all of whose plans are alike."""

    def plan_pipeline(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(step_seconds=seconds, peaks=(peak // 2, peak))

    return plan_pipeline


def unknown(*args: Any) -> float:
    """Estimates that say nothing."""
    return 0.0


def test_the_best_is_the_fastest_of_those_planned_one_by_one() -> None:
    wanted = request()
    search, found = searched(wanted)
    steps = {}
    for axes in ({"x": 4}, {"x": 2, "y": 2}):
        planner = planner_for(wanted.module, wanted.graph, MeshShape.of(axes), wanted.target)
        steps[str(planner.mesh)] = run_planner(planner, 0.0, wanted.target).step_seconds
    assert set(found) == set(steps)
    for name, one in found.items():
        assert one.least_seconds <= (one.seconds or FOREVER)
        assert one.seconds is None or one.seconds == pytest.approx(steps[name])
    best = min(steps, key=lambda name: steps[name])
    assert [name for name, one in found.items() if one.verdict == BEST] == [best]
    assert search.best is not None
    plan = found[best].plan
    assert isinstance(plan, ShardingPlan)
    assert str(plan.mesh) == best
    assert not search.notes


def test_slower_ones_say_by_how_much_or_what_they_take_at_least() -> None:
    _, found = searched(request())
    others = [one for one in found.values() if one.verdict != BEST]
    assert others
    assert all(one.plan is None for one in others)
    assert all("slower" in one.verdict or "cannot win: a step takes at least" in one.verdict for one in others)


def test_what_cannot_fit_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "solve", no_pipeline)
    search = MeshSearch(request(memory_limit="1MiB"), 4, FOREVER)
    with pytest.raises(BudgetError, match=r"no mesh of 4 devices fits in 1\.0 MiB per device: at least") as error:
        search.run()
    assert error.value.peak is not None
    assert all(one.verdict.startswith("cannot fit: a device holds at least") for one in search.candidates())


def test_what_holds_too_much_is_planned_within_the_limit() -> None:
    free, _ = searched(request())
    assert free.best is not None
    assert free.best.peak is not None
    limit = (free.best.peak + smallest_peak()) // 2
    tight, found = searched(request(memory_limit=limit))
    assert tight.best is not None
    assert tight.best.peak is not None
    assert tight.best.peak <= limit
    assert tight.best.seconds is not None
    assert free.best.seconds is not None
    # Both are searches: of two plans that take nearly as long, the one within the limit may be the faster.
    assert tight.best.seconds >= (1 - 1e-3) * free.best.seconds
    assert all(one.peak is None or one.peak <= limit for one in found.values())


def test_of_equally_fast_meshes_the_one_with_fewest_axes_is_fitted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = searched(request())
    fitted: list[int] = []
    rows = [
        row
        for axes, seconds in ((3, 1.0), (2, 1.001), (1, 1.002), (1, 1.2))
        for row in [dataclasses.replace(search._rows[0], shape=_with_axes(axes), seconds=seconds)]
    ]

    def within_limit(row: Any) -> Any:
        fitted.append(row.shape.mesh.ndim)
        raise BudgetError("too much", 2**31)

    monkeypatch.setattr(search, "_too_large", lambda: rows)
    monkeypatch.setattr(search.mesh_planner, "within_limit", within_limit)
    search.best = None
    search._plan_within_limit()
    assert fitted == [1, 2, 3, 1]


def _with_axes(count: int) -> Shape:
    return Shape(MeshShape.of(dict.fromkeys("xyz"[:count], 2)))


def test_where_nothing_fits_the_smallest_peak_is_named_and_enough() -> None:
    peak = smallest_peak()
    enough, _ = searched(request(memory_limit=peak))
    assert enough.best is not None
    assert enough.best.peak == peak


def test_effort_never_makes_the_best_slower() -> None:
    quick, _ = searched(request())
    well, _ = searched(request(effort="full"))
    assert quick.best is not None
    assert well.best is not None
    assert (well.best.seconds or FOREVER) <= (quick.best.seconds or FOREVER)


def test_a_faster_pipeline_wins_and_a_slower_one_does_not() -> None:
    free, _ = searched(request())
    assert free.best is not None
    assert free.best.seconds is not None
    search, found = searched(request(pipelines(free.best.seconds * 0.999), pipelines="outer"))
    assert search.best is not None
    assert search.best.shape.axis == "pp"
    assert found[str(free.best.shape)].verdict == "0.1% slower"
    search, found = searched(request(pipelines(2 * free.best.seconds), pipelines="outer"))
    assert search.best is not None
    assert search.best.shape == free.best.shape
    assert found["pp=2, x=2"].verdict == "100.0% slower"
    assert found["pp=4"].verdict.startswith("not planned: it is estimated to take")


def test_a_pipeline_is_asked_for_as_it_will_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineEstimates, "seconds", unknown)
    asked: list[tuple[MeshShape, Pipeline, Any]] = []

    def plan_pipeline(mesh: MeshShape, pipeline: Pipeline, target: Any, **named: Any) -> Any:
        asked.append((mesh, pipeline, target))
        raise PipelineError("three stages and two operators")

    wanted = request(plan_pipeline, pipelines="outer", pipeline=Pipeline(microbatches=8, virtual=2))
    _, found = searched(wanted)
    assert [found[name].verdict for name in ("pp=2, x=2", "pp=4")] == ["refused: three stages and two operators"] * 2
    assert len(asked) == 2
    for mesh, pipeline, target in asked:
        assert pipeline.axis in mesh.names
        assert (pipeline.schedule, pipeline.microbatches, pipeline.virtual) == ("auto", 8, 2)
        assert target.settings.memory_limit == wanted.memory_limit
        assert target.settings.effort == "fast"


def test_devices_of_a_pipeline_may_hold_what_they_have_where_nobody_set_a_limit() -> None:
    limits: list[int | None] = []

    def plan_pipeline(mesh: MeshShape, pipeline: Pipeline, target: Any, **named: Any) -> Any:
        limits.append(target.settings.memory_limit)
        return SimpleNamespace(step_seconds=1e-9, peaks=(1000, 1000), microbatches=8, virtual=1)

    unlike = Cluster.parse("2xV100-32GB + 2xP100-16GB")
    wanted = request(plan_pipeline, pipelines="outer", cluster=unlike)
    stages = next(one.shape for one in MeshSearch(wanted, 4, FOREVER).candidates() if one.shape.axis is not None)
    assert wanted.device_memory(stages) == wanted.memory_limit
    searched(wanted)
    assert set(limits) == {wanted.memory_limit}
    limits.clear()
    wanted = dataclasses.replace(wanted, own_memory=True)
    assert wanted.device_memory(stages) == 24e9
    searched(wanted)
    assert set(limits) == {None}


def test_unlike_devices_take_shares_in_the_best_pipeline_once_it_is_known() -> None:
    asked: list[tuple[Any, Any, Any]] = []

    def plan_pipeline(mesh: MeshShape, pipeline: Pipeline, target: Any, **named: Any) -> Any:
        asked.append((target.shares, pipeline.microbatches, pipeline.virtual))
        seconds = 1e-9 if asked[-1][0] is None else 0.9e-9
        return SimpleNamespace(step_seconds=seconds, peaks=(1000, 1000), microbatches=8, virtual=1)

    wanted = request(plan_pipeline, pipelines="outer", cluster=Cluster.parse("2xV100-32GB + 2xP100-16GB"))
    wanted = dataclasses.replace(wanted, target=dataclasses.replace(wanted.target, shares="auto"))
    search, _ = searched(wanted)
    assert {shares for shares, *_ in asked[:-1]} == {None}
    assert asked[-1] == ("auto", 8, 1)
    assert search.best is not None
    assert search.best.seconds == 0.9e-9


def test_a_pipeline_is_planned_for_one_size_and_where_it_is_near_the_best_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PipelineEstimates, "seconds", unknown)
    free, _ = searched(request())
    assert free.best is not None
    fast = 0.999 * (free.best.seconds or 0.0)
    asked: list[tuple[int, Any, Any]] = []
    known: dict[int, list[int]] = {2: [], 4: []}

    def plan_pipeline(mesh: MeshShape, pipeline: Pipeline, *args: Any, **named: Any) -> Any:
        ranks = mesh.sizes[0]
        asked.append((ranks, pipeline.microbatches, pipeline.virtual))
        known[ranks].append(len(named["known"]))
        named["known"][pipeline.microbatches] = SimpleNamespace(took=0.0)
        return SimpleNamespace(step_seconds=fast if ranks == 2 else 2 * fast, peaks=(1000,) * ranks)

    search, _ = searched(request(plan_pipeline, pipelines="outer"))
    assert asked == [(2, 8, 1), (4, 16, 1), (2, "auto", "auto")]
    assert known == {2: [0, 1], 4: [0]}
    assert search.best is not None
    assert search.best.shape.ranks == 2


def test_a_pipeline_that_does_not_fit_with_one_size_is_planned_for_all() -> None:
    def plan_pipeline(mesh: MeshShape, pipeline: Pipeline, *args: Any, **named: Any) -> Any:
        if pipeline.microbatches != "auto":
            raise BudgetError("too much", 2**31)
        return SimpleNamespace(step_seconds=1e-9, peaks=(1000, 1000))

    search, _ = searched(request(plan_pipeline, pipelines="outer"))
    assert search.best is not None
    assert search.best.shape.axis == "pp"


def test_a_pipeline_that_does_not_fit_names_what_it_needs() -> None:
    def plan_pipeline(*args: Any, **kwargs: Any) -> Any:
        raise BudgetError("too much", 2**31)

    _, found = searched(request(plan_pipeline, pipelines="outer"))
    said = [one.verdict for one in found.values() if one.shape.axis]
    assert "does not fit: the smallest peak found is 2.0 GiB" in said


def test_the_time_limit_ends_it_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    search = MeshSearch(request(), 4, FOREVER)
    without_limit = search.mesh_planner.without_limit

    def and_time_is_up(row: Any) -> ShardingPlan:
        search.mesh_planner.deadline = 0.0
        return without_limit(row)

    monkeypatch.setattr(search.mesh_planner, "without_limit", and_time_is_up)
    with pytest.warns(UserWarning, match="the time limit ended the search"):
        search.run()
    verdicts = [one.verdict for one in search.candidates()]
    assert verdicts[0] == BEST
    assert verdicts[1:] == ["not planned: the time limit was reached"]
    assert len(search.notes) == 1


@pytest.mark.parametrize("left", [5.0, 15.0])
def test_no_plan_is_begun_that_took_longer_before_than_there_is_time_left(
    monkeypatch: pytest.MonkeyPatch, left: float
) -> None:
    monkeypatch.setattr(PipelineEstimates, "seconds", unknown)
    asked: list[tuple[int, Any]] = []
    start = time.monotonic()

    def plan_pipeline(mesh: MeshShape, pipeline: Pipeline, *args: Any, **named: Any) -> Any:
        asked.append((mesh.sizes[0], pipeline.microbatches))
        return SimpleNamespace(step_seconds=1e-9 * mesh.sizes[0], peaks=(1000,) * mesh.sizes[0])

    def ten_seconds_per_pipeline() -> float:
        return start + 10.0 * len(asked)

    monkeypatch.setattr(mesh_search, "time", SimpleNamespace(monotonic=ten_seconds_per_pipeline))
    search = MeshSearch(request(plan_pipeline, pipelines="outer", cluster=hosts(4)), 4, start + 10.0 + left)
    enough = left > 10
    with contextlib.nullcontext() if enough else pytest.warns(UserWarning, match="the time limit ended the search"):
        search.run()
    assert asked == [(2, 8), (2, "auto")][: 1 + enough]


def test_there_is_a_plan_within_the_limit_before_other_meshes_take_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    free, _ = searched(request())
    assert free.best is not None
    limit = ((free.best.peak or 0) + smallest_peak()) // 2
    search = MeshSearch(request(memory_limit=limit), 4, FOREVER)
    within_limit = search.mesh_planner.within_limit

    def and_time_is_up(row: Any) -> ShardingPlan:
        plan = within_limit(row)
        search.mesh_planner.deadline = 0.0
        return plan

    monkeypatch.setattr(search.mesh_planner, "within_limit", and_time_is_up)
    with pytest.warns(UserWarning, match="the time limit ended the search"):
        search.run()
    assert search.best is not None
    assert (search.best.peak or FOREVER) <= limit


def test_what_holds_too_much_waits_for_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning within the limit takes long, and they often make it needless."""
    limit = smallest_peak() + 1
    for fits in (True, False):
        search = MeshSearch(request(pipelines(1e-9, limit), pipelines="outer", memory_limit=limit), 4, FOREVER)
        asked: list[str] = []

        def without(row: Any, search: MeshSearch = search, asked: list[str] = asked) -> Any:
            asked.append(str(row.shape))
            raise BudgetError("too much", 2**31)

        monkeypatch.setattr(search.mesh_planner, "within_limit", without)
        if not fits:
            monkeypatch.setattr(search.mesh_planner, "pipeline_of_one_shape", without)
            with pytest.raises(BudgetError):
                search.run()
            assert asked[:2] == ["pp=2, x=2", "x=2, y=2"]
            continue
        search.run()
        assert not asked


def test_no_time_at_all_is_an_error() -> None:
    with (
        pytest.warns(UserWarning, match="the time limit ended the search"),
        pytest.raises(PlanError, match="no mesh of 4 devices was planned within the time limit"),
    ):
        MeshSearch(request(), 4, 0.0).run()


def test_an_interruption_hands_back_the_best_so_far() -> None:
    def plan_pipeline(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    search = MeshSearch(request(plan_pipeline, pipelines="outer"), 4, FOREVER)
    with pytest.warns(UserWarning, match="interrupted"):
        search.run()
    assert search.best is not None
    assert search.interrupted


def test_an_interruption_while_a_mesh_is_planned_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner hands back the best plan that it met, with a warning; nothing is planned after it."""
    fastest = Planner.fastest
    met: list[str] = []

    def interrupted(self: Planner, cheapest: Any) -> Any:
        met.append(str(self.mesh))
        if self.settings.effort == "full":
            raise KeyboardInterrupt
        return fastest(self, cheapest)

    monkeypatch.setattr(Planner, "fastest", interrupted)
    search = MeshSearch(request(effort="full"), 4, FOREVER)
    with pytest.warns(UserWarning, match="interrupted"):
        search.run()
    assert search.interrupted
    assert search.best is not None
    assert len(met) == len(set(met)) + 1


def test_an_interruption_while_a_pipeline_is_planned_ends_the_search() -> None:
    def plan_pipeline(*args: Any, stopping: Stopping, **kwargs: Any) -> Any:
        assert stopping.deadline == FOREVER
        stopping.interrupted = True
        return SimpleNamespace(step_seconds=1e-9, peaks=(1000, 1000))

    search = MeshSearch(request(plan_pipeline, pipelines="outer"), 4, FOREVER)
    with pytest.warns(UserWarning, match="interrupted"):
        search.run()
    assert search.interrupted
    assert search.best is not None
    assert search.best.shape.axis == "pp"


def test_an_interruption_before_any_plan_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "solve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        MeshSearch(request(), 4, FOREVER).run()


def test_a_hint_that_fits_no_mesh_is_the_error() -> None:
    search = MeshSearch(request(hints={"no.such.parameter": Shard(0)}), 4, FOREVER)
    with pytest.raises(HintError, match=r"no\.such\.parameter"):
        search.run()


def test_a_mesh_that_a_hint_does_not_fit_is_left_out() -> None:
    _, found = searched(request(hints={"layers.0.weight": {"y": Shard(0)}}))
    assert found["x=4"].verdict.startswith("refused: ")
    assert found["x=2, y=2"].verdict == BEST


def test_splitting_an_axis_of_a_slow_mesh_is_not_tried() -> None:
    asked: list[str] = []

    def plan_pipeline(mesh: MeshShape, *args: Any, **kwargs: Any) -> Any:
        asked.append(str(mesh))
        return SimpleNamespace(step_seconds=1e3, peaks=(1000, 1000))

    _, found = searched(request(plan_pipeline, pipelines="outer", cluster=hosts(4)), devices=8)
    assert "pp=2, x=4" in asked
    assert "pp=2, x=2, y=2" not in asked
    said = "not planned: pp=2, x=4, which has two of its axes joined, is"
    assert found["pp=2, x=2, y=2"].verdict.startswith(said)


def test_ever_longer_pipelines_are_not_tried_where_they_are_ever_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineEstimates, "seconds", unknown)
    asked: list[int] = []

    def plan_pipeline(mesh: MeshShape, *args: Any, **kwargs: Any) -> Any:
        asked.append(mesh.sizes[0])
        return SimpleNamespace(step_seconds=1e3 * mesh.sizes[0], peaks=(1000, 1000))

    _, found = searched(request(plan_pipeline, pipelines="outer", cluster=hosts(4)), devices=8)
    assert set(asked) == {2, 4}
    assert found["pp=8"].verdict.startswith("not planned: the shorter pipeline pp=4, x=2 is")


def row(seconds: float | None = None, free: tuple[float, int] | None = None, estimate: float | None = None) -> Row:
    """A mesh with a plan of so many seconds that fits, and one that does not, of seconds and bytes."""
    one = Row(shape=Shape(MeshShape.of({"x": 4})), least_seconds=0.0, least_bytes=0)
    if seconds is not None:
        plan: Any = SimpleNamespace(step_seconds=seconds, peaks=(1,))
        one.add_plan(plan)
    one.unlimited = None if free is None else UnlimitedResult(*free)
    one.estimate = estimate
    return one


def test_a_pipeline_is_judged_by_the_estimate_that_fell_short_least() -> None:
    best, other = row(10.0, estimate=8.0), row(20.0, estimate=10.0)
    rows = [best, other]
    assert slow_pipeline_reason(row(estimate=8.2), rows, best) is None
    assert slow_pipeline_reason(row(estimate=8.4), rows, best) == "not planned: it is estimated to take 10.5 s"
    assert slow_pipeline_reason(row(estimate=10.2), [best], best) is not None


def test_what_the_limit_took_of_some_meshes_it_takes_of_those_that_hold_as_much() -> None:
    best = row(10.0)
    fitted = row(12.0, free=(9.0, 100))
    said = "not planned: within the memory limit it is estimated to take 12.7 s"
    assert slow_within_limit_reason(row(free=(9.5, 100)), [best, fitted], best) == said
    assert slow_within_limit_reason(row(free=(9.5, 99)), [best, fitted], best) is None, (
        "it holds less: it may lose less"
    )
    lost_less = row(9.5, free=(9.4, 90))
    assert slow_within_limit_reason(row(free=(9.5, 100)), [best, fitted, lost_less], best) is None


def test_what_is_no_faster_without_a_limit_is_not_planned_within_it() -> None:
    best = row(10.0)
    assert slow_within_limit_reason(row(free=(10.0, 5)), [best], best) == "without a memory limit it takes 10 s already"
    assert slow_within_limit_reason(row(free=(9.9, 5)), [best], best) is None


WHOLE = 12.0
FINE = [1 / 4096] * 4096
"""Shares of operators so small that stages may be as unequal as their devices, to a thousandth."""


class Plans:
    """Plans of the whole step that take so many seconds, whatever the devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.request = SimpleNamespace(target=target_of(cluster=cluster))
        self.asked: list[MeshShape] = []

    def target(self, effort: str, *, limited: bool) -> Any:
        assert (effort, limited) == ("fast", False)
        return self.request.target

    def plan_on(self, mesh: MeshShape, target: Any) -> Any:
        assert target.cluster.is_uniform
        self.asked.append(mesh)
        if mesh.size == 1:
            raise PlanError("one device is too few")
        return SimpleNamespace(step_seconds=WHOLE)


def shape(**axes: int) -> Shape:
    return Shape(MeshShape.of(axes), "pp")


def test_stages_share_the_step_and_wait_for_one_microbatch() -> None:
    plans: Any = Plans(Cluster.of("v100"))
    estimates = PipelineEstimates(plans, FINE)
    assert estimates.seconds(shape(pp=2, x=4), [1, 4]) == pytest.approx(WHOLE / 2 * (1 + 1 / 12), rel=1e-3)
    assert estimates.seconds(shape(pp=2, x=4), [10]) == pytest.approx(WHOLE / 2 * (1 + 1 / 30), rel=1e-3)
    assert plans.asked == [MeshShape.of({"x": 4})]
    assert estimates.seconds(shape(pp=4), [4]) == 0.0


def test_no_stage_is_shorter_than_the_longest_operator() -> None:
    plans: Any = Plans(Cluster.of("v100"))
    estimates = PipelineEstimates(plans, [0.2, 0.5, 0.3])
    assert estimates.seconds(shape(pp=4, x=4), [4]) == pytest.approx(WHOLE / 2 * (1 + 3 / 12), rel=1e-3)


def test_faster_stages_have_more_of_it() -> None:
    plans: Any = Plans(Cluster.parse("4xV100-32GB + 4xP100-16GB"))
    speed = 15.7 / 10.6
    found = PipelineEstimates(plans, FINE).seconds(shape(pp=2, x=4), [10])
    assert found == pytest.approx(WHOLE / (1 + speed) * (1 + 1 / 30), rel=1e-2)


def test_the_longest_stage_is_that_of_the_best_cuts() -> None:
    """Against all ways to cut a few operators into stretches, on devices of any speed."""
    generator = random.Random(0)
    for _ in range(50):
        shares = [generator.random() for _ in range(generator.randint(1, 7))]
        speeds = [generator.choice((1.0, 1.5, 3.0)) for _ in range(generator.randint(1, 4))]
        cuts = itertools.combinations_with_replacement(range(len(shares) + 1), len(speeds) - 1)
        best = min(
            max(
                sum(shares[start:end]) / speed
                for start, end, speed in zip((0, *cut), (*cut, None), speeds, strict=True)
            )
            for cut in cuts
        )
        whole = sum(shares)
        found = longest_stage([one / whole for one in shares], speeds)
        assert found == pytest.approx(best / whole, rel=1e-5)
