"""Plans of pipelines: what is chosen, what it promises, and that its stages do what the model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import Pipeline
from autoshard.capture.bound_call import BoundCall
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError, HintError, InputError, MeshError, PipelineError, PlanError
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.plan.pipeline_devices import (
    PipelineMesh,
    forward_fingerprint,
    slowest_cluster,
    stage_cluster,
    stage_devices,
    stage_target,
)
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.plan.planned_stage import Links, input_names, stage_costs
from autoshard.pipeline.plan.shape_planner import PipelineShape, PlannedShape, ShapePlanner, Stopping
from autoshard.pipeline.plan.stage_plans import StageBudget, StagePlanner, StageTarget
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from autoshard.pipeline.run.stage_planner import StageStepPlanner
from autoshard.pipeline.schedule.actions import schedule
from autoshard.pipeline.schedule.costs import simulate
from autoshard.planner.planner import Planner
from autoshard.runtime.module_runtime import Runtime
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.pipeline import small_pipelines
from tests.pipeline.chain import ModuleChain
from tests.pipeline.small_pipelines import gpt, gpt_plan, quick_target, tower
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def plan_of(
    module: nn.Module,
    mesh: dict[str, int],
    inputs: dict[str, Any],
    *,
    target: Target | None = None,
    captures: PipelineCaptures | None = None,
    begin: int | None = None,
    known: dict[PipelineShape, PlannedShape] | None = None,
    stopping: Stopping | None = None,
    **asked: Any,
) -> PipelinePlan:
    """The plan for four microbatches and one stage per rank, if nothing else is asked of `Pipeline`."""
    pipeline = Pipeline(**({"axis": "pp", "microbatches": 4, "virtual": 1} | asked))
    target = target or small_pipelines.quick_target()
    captures = captures or PipelineCaptures(BatchCall(module, (), inputs), target)
    return plan_pipeline(captures, mesh, pipeline, target, begin=begin, known=known, stopping=stopping)


def planned(mesh: dict[str, int], batch: int = 16, **asked: Any) -> PipelinePlan:
    module, inputs = tower(batch)
    return plan_of(module, mesh, inputs, **asked)


def test_the_stages_of_a_plan_do_what_the_model_does() -> None:
    plan = gpt_plan()
    assert any(not one.is_replicate() for row in plan.stages[0].output_placements.values() for one in row)
    with simulated_mesh(x=2) as mesh:
        with Float64Mode():
            module, inputs = gpt()
            part = BatchCall(module, (), inputs).split(plan.microbatches)[0].kwargs
            alone = copy.deepcopy(module)
            loss = alone(**part)[1]
            loss.backward()
            graph = capture_microbatch(module, (), part)
            plan.check(MeshShape.of({"pp": 2, "x": 2}), forward_fingerprint(graph))
            stages = cut(graph, plan.stage_of, plan.schedule.stages, plan.recomputed)
            for stage, decided in zip(stages, plan.stages, strict=True):
                cluster = stage_cluster(fast_links(), plan.mesh, plan.axis)
                own = stage_target(quick_target(), cluster, decided, input_names(stage))
                planner = StageStepPlanner(stage, MeshShape.of(mesh), own)
                Runtime(ProgramMaker(stage.module, mesh, planner, decided)).start(
                    BoundCall.of(stage.module, *stage.example)
                )
        chain = ModuleChain(graph, stages, (), part)
        with default_float64():
            ours = chain.forward()[1]
            chain.backward()
        for held in per_rank(ours.detach(), mesh).values():
            torch.testing.assert_close(held, loss.detach(), **TOLERANCE)
        gradients: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, parameter in stage.module.named_parameters():
                gradients[name] = gradients.get(name, 0) + gather_full_tensor(parameter.grad)
        for name, parameter in alone.named_parameters():
            for held in per_rank(gradients[name], mesh).values():
                torch.testing.assert_close(held, parameter.grad, **TOLERANCE)


def test_a_plan_says_what_it_promises() -> None:
    plan = gpt_plan()
    assert plan.step_seconds == plan.simulation.seconds
    assert plan.peaks == plan.simulation.peaks
    assert plan.bubble == plan.simulation.bubble
    assert plan.fits
    assert plan.table[0].seconds is not None
    assert [line.verdict for line in plan.table].count("chosen") == 1
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert "tokens to " in str(plan)
    assert "stage 1" in plan.explain("layers.*")


def test_what_does_not_fit_is_planned_for_less_memory() -> None:
    free = gpt_plan()
    tight = max(free.peaks) * 21 // 40
    plan = gpt_plan(memory_limit=tight)
    assert plan.fits
    assert plan.capacities == (tight, tight)
    assert plan.step_seconds >= free.step_seconds
    assert any(stage.recomputed for stage in plan.stages)
    # Single operators that run again take less time than gradients that are reduced with every microbatch.
    assert (free.reduced, plan.reduced) == (("step",) * 2,) * 2
    assert plan.step_seconds <= 1.2 * free.step_seconds
    assert PipelinePlan.from_json(plan.to_json()) == plan
    # What a stage keeps of a microbatch is listed, whatever number of them the search counted with.
    assert "What the backward half reads, for one microbatch" in str(plan)
    for stage, cost in zip(plan.stages, plan.costs, strict=True):
        kept = [sizes.get(source, 0) for sizes in stage.memory.sources.values() for source in ("saved", "gathered")]
        assert cost.saved_bytes / 2 < sum(kept) <= cost.saved_bytes  # which has the stage's outputs, too


def test_tied_parameters_lie_alike_on_all_stages() -> None:
    plan = gpt_plan()
    first, last = (stage.placements["tokens.weight"] for stage in plan.stages)
    assert first == last
    assert all(cost.reduction_seconds > 0 for cost in plan.costs)


def test_equal_calls_give_equal_plans() -> None:
    def told(plan: PipelinePlan) -> object:
        return plan.stage_of, plan.schedule, [stage.decisions for stage in plan.stages], plan.costs, plan.table

    assert told(planned({"pp": 2, "x": 2})) == told(planned({"pp": 2, "x": 2}))


def test_what_fits_nowhere_is_refused() -> None:
    free = planned({"pp": 2, "x": 2})
    with pytest.raises(BudgetError, match=r"2 pipeline stages do not fit in .* even if the 2 devices of each rank"):
        planned({"pp": 2, "x": 2}, target=quick_target(memory_limit=max(free.peaks) // 50))
    least = sum(cost.rest_bytes for cost in free.costs) // 2
    with pytest.raises(BudgetError, match="the leanest is") as refusal:
        planned({"pp": 2, "x": 2}, target=quick_target(memory_limit=least, recompute="none"))
    assert refusal.value.peak > least


def test_larger_and_faster_devices_have_more_work() -> None:
    unlike = Cluster.parse("2xV100-32GB + 2xP100-16GB")
    plan = planned({"pp": 2, "x": 2}, 4096, target=quick_target(cluster=unlike), virtual="auto")
    equal = planned({"pp": 2, "x": 2}, 4096)
    assert plan.virtual == 1
    assert plan.capacities == tuple(int(unlike.device_of(rank).memory) for rank in (0, 2))
    assert sum(stage == 0 for stage in plan.stage_of.values()) > sum(stage == 0 for stage in equal.stage_of.values())


def test_hints_pin_parameters_of_the_stages_that_hold_them() -> None:
    plan = planned({"pp": 2, "x": 2}, target=quick_target(hints={"layers.5.*.weight": Shard(0)}))
    first, last = (stage.placements for stage in plan.stages)
    assert "layers.5.0.weight" not in first
    assert last["layers.5.0.weight"] == (Shard(0),)
    with pytest.raises(HintError, match="matches no parameter"):
        planned({"pp": 2, "x": 2}, target=quick_target(hints={"nowhere": Shard(0)}))


def test_a_pipeline_alone_and_one_that_is_not_the_first_axis() -> None:
    alone = planned({"pp": 2})
    assert alone.stages[0].mesh.size == 1
    assert not any(stage.collectives for stage in alone.stages)
    last = planned({"x": 2, "pp": 2})
    assert last.stages[0].mesh == MeshShape.of({"x": 2})


def test_what_a_pipeline_can_not_have_is_refused() -> None:
    module, inputs = tower()

    def refused(**asked: Any) -> None:
        plan_of(module, asked.pop("mesh", {"pp": 2, "x": 2}), asked.pop("inputs", inputs), **asked)

    with pytest.raises(MeshError, match="no axis 'stages' for a pipeline; its axes are pp=2, x=2"):
        refused(axis="stages")
    with pytest.raises(MeshError, match="has one rank, which is no pipeline"):
        refused(mesh={"pp": 1, "x": 2})
    with pytest.raises(PipelineError, match="a batch of 16 can't be divided into 3 microbatches"):
        refused(microbatches=3)
    with pytest.raises(PipelineError, match="at least 2 microbatches"):
        refused(microbatches=1, schedule="1F1B")
    with pytest.raises(PipelineError, match="no schedule '1F2B'"):
        refused(schedule="1F2B")
    with pytest.raises(InputError, match="samples"):
        refused(inputs={**inputs, "target": inputs["target"][:4]})
    with pytest.raises(PlanError, match="can not have the option dynamic"):
        refused(target=quick_target(dynamic={"x": {0: "batch"}}))


def test_a_stage_may_have_no_parameters() -> None:
    module, inputs = models.ZOO["mlp"](batch=8)
    plan = plan_of(module, {"pp": 4}, inputs)
    assert any(not stage.placements for stage in plan.stages)


def test_a_model_with_fewer_operators_than_stages_is_refused() -> None:
    module, inputs = models.ZOO["mlp"](batch=8)
    with pytest.raises(PlanError, match="16 pipeline stages were asked for, and the model has"):
        plan_of(module, {"pp": 16}, inputs, microbatches=8)


def test_numbers_that_are_left_open_are_chosen() -> None:
    plan = planned({"pp": 2, "x": 2}, microbatches="auto", virtual="auto")
    sizes = {(line.microbatches, line.virtual) for line in plan.table}
    said = {(one.microbatches, one.virtual) for one in plan.table if one.verdict.startswith("estimated")}
    assert (plan.microbatches, plan.virtual) in sizes - said
    assert plan.table[0].seconds == pytest.approx(plan.step_seconds, rel=0.011)
    assert len(sizes - said) <= 3


def test_the_time_limit_ends_the_search_with_what_is_planned() -> None:
    plan = planned({"pp": 2, "x": 2}, microbatches="auto", virtual="auto", target=quick_target(time_limit=1e-9))
    sizes = {(line.microbatches, line.virtual) for line in plan.table if not line.verdict.startswith("estimated")}
    assert sizes == {(plan.microbatches, plan.virtual)}
    assert any(line.verdict.startswith("estimated, not planned in the time limit: ") for line in plan.table)
    with pytest.raises(BudgetError, match="do not fit"):
        planned(
            {"pp": 2, "x": 2}, target=quick_target(memory_limit=max(plan.peaks) // 2), stopping=Stopping(deadline=0.0)
        )


def test_what_is_planned_next_has_smaller_microbatches_where_the_first_hold_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_size = ShapePlanner.plan
    met: list[PipelineShape] = []

    def watched(self: ShapePlanner, size: PipelineShape, *args: Any) -> Any:
        met.append(size)
        return plan_size(self, size, *args)

    monkeypatch.setattr(ShapePlanner, "plan", watched)
    planned({"pp": 2}, 512, microbatches="auto", begin=4)
    assert met[:2] == [PipelineShape(4, 1), PipelineShape(2, 1)]
    held = max(planned({"pp": 2}, 512, microbatches=4).peaks)
    met.clear()
    planned({"pp": 2}, 512, microbatches="auto", begin=4, target=quick_target(memory_limit=held // 2))
    assert met[:2] == [PipelineShape(4, 1), PipelineShape(8, 1)]


def test_a_size_that_was_planned_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[PipelineShape, PlannedShape] = {}
    first = planned({"pp": 2, "x": 2}, known=known)
    assert set(known) == {PipelineShape(4, 1)}
    plan_size = ShapePlanner.plan

    def another(self: ShapePlanner, size: PipelineShape, *args: Any) -> Any:
        assert size != PipelineShape(4, 1)
        return plan_size(self, size, *args)

    monkeypatch.setattr(ShapePlanner, "plan", another)
    assert planned({"pp": 2, "x": 2}, known=known).stages == first.stages
    plan = planned({"pp": 2, "x": 2}, microbatches="auto", begin=4, known=known)
    assert plan.step_seconds <= first.step_seconds
    assert len(known) > 1


def test_an_interruption_hands_back_the_best_plan_met(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_size = ShapePlanner.plan
    met: list[PipelineShape] = []

    def second_is_interrupted(self: ShapePlanner, size: PipelineShape, *args: Any) -> Any:
        met.append(size)
        if len(met) == 2:
            raise KeyboardInterrupt
        return plan_size(self, size, *args)

    monkeypatch.setattr(ShapePlanner, "plan", second_is_interrupted)
    stopping = Stopping()
    with pytest.warns(UserWarning, match="the search for a pipeline was interrupted"):
        plan = planned({"pp": 2, "x": 2}, microbatches="auto", stopping=stopping)
    assert stopping.interrupted
    assert (plan.microbatches, plan.virtual) == met[0]
    del met[1:]
    with pytest.raises(KeyboardInterrupt):
        planned({"pp": 2, "x": 2})


def test_a_stage_whose_search_is_interrupted_ends_that_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = Planner.fastest

    def interrupted(self: Planner, cheapest: Any) -> Any:
        if any(name.startswith("layers.5") for name in self.graph.aliases):
            raise KeyboardInterrupt
        return fastest(self, cheapest)

    monkeypatch.setattr(Planner, "fastest", interrupted)
    with pytest.warns(UserWarning, match="the search was interrupted"), pytest.raises(KeyboardInterrupt):
        planned({"pp": 2, "x": 2})


def test_what_was_captured_for_one_mesh_serves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = tower()
    captures = PipelineCaptures(BatchCall(module, (), inputs), quick_target())
    first = planned({"pp": 2, "x": 2}, captures=captures)

    def capture(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the same stages are captured again")

    monkeypatch.setattr("autoshard.pipeline.plan.stage_reuse.capture_microbatch", capture)
    again = planned({"pp": 2, "x": 2}, captures=captures)
    assert (again.stage_of, again.costs, again.stages[0].decisions) == (
        first.stage_of,
        first.costs,
        first.stages[0].decisions,
    )
    assert planned({"pp": 2, "y": 4}, captures=captures).stage_of == first.stage_of


def test_no_hand_made_cut_in_layers_is_faster_with_one_forward_one_backward() -> None:
    module, inputs = tower()
    plan = planned({"pp": 2, "x": 2})
    part = BatchCall(module, (), inputs).split(4)[0].kwargs
    graph = capture_microbatch(module, (), part)
    kind = StageTarget(stage_target(quick_target(), fast_links()), MeshShape.of({"x": 2}))
    planner = StagePlanner([kind], [{}], None)
    links = Links.of(fast_links(), plan.mesh, "pp")
    for layers in (2, 3, 4):
        stage_of = {node.name: int(place >= 2 * layers) for place, node in enumerate(graph.operators)}
        stages = planner.plan(cut(graph, stage_of, 2), [StageBudget(None, "none")] * 2)
        costs = [stage_costs(one, links, 4) for one in stages]
        by_hand = simulate(schedule("1F1B", 2, 4), costs, plan.contention)
        assert plan.step_seconds <= by_hand.seconds * (1 + 1e-9)


def test_a_cluster_as_a_stage_sees_it() -> None:
    cluster = Cluster.of("h100")  # eight devices per host

    def per_host(axis: str, **mesh: int) -> int:
        return stage_cluster(cluster, MeshShape.of(mesh), axis).devices_per_host

    assert per_host("pp", pp=4, dp=8) >= 8
    assert per_host("pp", pp=2, dp=16) == 8
    assert per_host("pp", dp=4, pp=2, tp=2) == 4
    assert per_host("pp", dp=8, pp=4) == 2
    assert per_host("pp", pp=4, dp=6) == 2  # ranks 6 to 11 are two of one host and four of the next


def test_stages_of_unlike_devices_are_priced_at_speed_one() -> None:
    cluster, mesh = Cluster.parse("2xV100-32GB + 2xP100-16GB"), MeshShape.of({"pp": 2, "x": 2})
    slowest = cluster.slowest(range(4)).peak(torch.float32)
    seen = CostModel(stage_cluster(slowest_cluster(cluster, 4), mesh, "pp"), MeshShape.of({"x": 2})).cluster
    assert seen.device.peak(torch.float32) == slowest == cluster.device_of(3).peak(torch.float32)
    speeds = [device.speed for device in stage_devices(cluster, PipelineMesh.of(mesh, "pp"))]
    assert [speed * slowest for speed in speeds] == [cluster.device_of(rank).peak(torch.float32) for rank in (0, 2)]
