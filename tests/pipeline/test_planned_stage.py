"""What one rank sends of what goes from stage to stage, and plans that do not agree on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.cluster.cluster import Cluster, Link
from autoshard.errors import PlanError
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import StageModule, cut
from autoshard.pipeline.plan.pipeline_devices import stage_target
from autoshard.pipeline.plan.planned_stage import Boundaries, Links, PlannedStage, input_names, stage_costs
from autoshard.pipeline.plan.stage_plans import StageBudget, StagePlanner, StageTarget
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.pipeline.chain import balance_stages
from tests.pipeline.pipelines import model
from tests.pipeline.small_pipelines import gpt, quick_target, tower
from tests.targets import target
from tests.training import fast_links

FREE = StageBudget(None, "none")


def planned(
    stages: int,
    room: StageBudget = FREE,
    everywhere: Placement | None = None,
    batch: int = 16,
    **mesh: int,
) -> list[PlannedStage]:
    """The stages of a tower, the last of two layers; all parameters lie so `everywhere`, if that is given."""
    module, inputs = tower(batch)
    graph = capture_microbatch(module, (), inputs)
    stage_of = {each.name: place * stages // 16 for place, each in enumerate(graph.operators)}
    parts = cut(graph, stage_of, stages)
    asked = stage_target(quick_target(), fast_links())
    pins = {} if everywhere is None else {name: (everywhere,) for name, _ in module.named_parameters()}
    return StagePlanner([StageTarget(asked, MeshShape.of(mesh))], [pins], None).plan(parts, [room] * stages)


def links(**mesh: int) -> Links:
    return Links.of(fast_links(), MeshShape.of(mesh), "pp")


def test_on_one_device_the_halves_take_what_the_step_takes() -> None:
    first, last = planned(2, x=1)
    for one in (first, last):
        cost = stage_costs(one, links(pp=2), 1)
        assert cost.forward_seconds > 0
        assert cost.weight_backward_seconds > 0
        assert cost.forward_seconds + cost.backward_seconds == pytest.approx(one.plan.step_seconds, rel=1e-9)


def test_the_half_of_backward_for_weights_is_what_no_gradient_of_an_input_needs() -> None:
    first, last = (stage_costs(one, links(pp=2), 4) for one in planned(2, x=1))
    assert first.input_backward_seconds == 0  # nobody waits for gradients of the batch
    assert 0 < last.weight_backward_seconds < last.input_backward_seconds
    # Of both layers its input and the gradient of what it returned; the input of the first was received.
    assert last.weight_saved_bytes == (1 + 2) * 16 * 32 * 4


def test_bytes_are_those_of_the_account() -> None:
    for one in planned(2, x=2):
        alone, several = (stage_costs(one, links(pp=2, x=2), number) for number in (1, 4))
        memory = one.plan.memory
        inputs = sum(like.numel() * like.element_size() for _, like in one.stage.inputs.values())
        lasting = memory.parameters + memory.optimizer + memory.buffers
        gradients = alone.rest_bytes - lasting - inputs
        assert gradients == memory.parameters
        assert several.rest_bytes - alone.rest_bytes == 3 * inputs
        assert several.saved_bytes == alone.saved_bytes > 0
        # New gradients lie beside the sums of those before.
        assert alone.working_bytes <= several.working_bytes <= alone.working_bytes + gradients
        held = alone.rest_bytes + max(alone.saved_bytes + alone.working_bytes, alone.application_bytes)
        received = sum(like.numel() * like.element_size() for _, like in one.received)
        # The stage alone holds what it received, and the gradient of that, to the end of its step.
        assert memory.peak - 2 * received <= held <= memory.peak + gradients


def test_replicated_parameters_have_gradients_that_are_reduced_once() -> None:
    for one in planned(2, room=StageBudget(None, "none", microbatches=4), everywhere=Replicate(), x=2):
        alone, several = (stage_costs(one, links(pp=2, x=2), number) for number in (1, 4))
        assert alone.reduction_seconds == 0
        assert several.reduction_seconds > 0
        assert several.backward_seconds < alone.backward_seconds
        assert several.backward_seconds + several.reduction_seconds >= alone.backward_seconds * (1 - 1e-9)
        # The plan is that of one microbatch, and has its share of the reduction.
        step = several.forward_seconds + several.backward_seconds
        assert step < one.plan.step_seconds < step + several.reduction_seconds
        assert several.saved_bytes == alone.saved_bytes


def test_sharded_parameters_have_gradients_that_are_kept_whole_or_reduced_every_time() -> None:
    kept, leaner = (
        [stage_costs(one, links(pp=2, x=2), 4) for one in planned(2, room=room, everywhere=Shard(0), batch=512, x=2)]
        for room in (
            StageBudget(None, "none", microbatches=4),
            StageBudget(None, "none", microbatches=4, reduced="microbatch"),
        )
    )
    for one, other in zip(kept, leaner, strict=True):
        assert one.rest_bytes > other.rest_bytes
        assert one.reduction_seconds > 0
        assert other.reduction_seconds < one.reduction_seconds


def test_what_is_sent_lies_as_it_comes_out() -> None:
    first, last = planned(2, x=2)
    forth, back = (stage_costs(one, links(pp=2, x=2), 4) for one in (first, last))
    assert forth.forward_bytes == back.backward_bytes
    assert forth.forward_send_seconds == links(pp=2, x=2).send(forth.forward_bytes) > 0
    assert (forth.backward_bytes, back.forward_bytes) == (0, 0)
    (name, like), (into, _) = first.passed[0], last.received[0]
    assert not first.plan.output_placements[name][0].is_replicate()
    assert forth.forward_bytes == like.numel() * like.element_size() // 2
    assert first.plan.output_placements[name] == last.plan.input_placements[into]


def test_recomputed_layers_are_run_again_and_save_less() -> None:
    free = [stage_costs(one, links(pp=2), 4) for one in planned(2, x=1)]
    again = [stage_costs(one, links(pp=2), 4) for one in planned(2, room=StageBudget(None, "full"), x=1)]
    for one, other in zip(free, again, strict=True):
        assert other.forward_seconds == one.forward_seconds
        assert other.backward_seconds > one.backward_seconds
        assert other.saved_bytes < one.saved_bytes


def test_stages_that_are_alike_are_planned_once_and_cost_the_same() -> None:
    module, inputs = tower(512)
    graph = capture_microbatch(module, (), inputs)
    stage_of = {node.name: min(place // 2, 5) for place, node in enumerate(graph.operators)}
    replicated = {name: (Replicate(),) for name, _ in module.named_parameters()}
    asked = StageTarget(stage_target(quick_target(), fast_links()), MeshShape.of({"x": 2}))
    stages = StagePlanner([asked], [replicated], None).plan(cut(graph, stage_of, 6), [FREE] * 6)
    costs = [stage_costs(one, links(pp=6, x=2), 4) for one in stages]
    # The first two stages choose how the batch is split; those behind them receive and leave it alike.
    assert costs[2] == costs[3] == costs[4]
    assert stages[2].plan.placements.keys() != stages[3].plan.placements.keys()
    for one in stages[2:4]:
        one.plan.check(one.plan.mesh, one.graph.fingerprint, one.plan.shapes)
        assert one.plan.decisions["choices"].keys() == {node.name for node in one.planner.rules.operators}


def test_the_place_of_the_axis_decides_what_a_message_costs() -> None:
    cluster = Cluster.of("h100")
    between = Links.of(cluster, MeshShape.of({"pp": 2, "dp": 8}), "pp")
    inside = Links.of(cluster, MeshShape.of({"dp": 8, "pp": 2}), "pp")
    size = 2**24
    for links, link in ((between, cluster.between), (inside, cluster.inside)):
        assert links.send(size) == pytest.approx(link.collectives["shift"].curve.at(size))
    assert between.send(size) > inside.send(size)
    assert between.send(0) == between.sum(0, 2) == between.sum(size, 1) == 0.0
    for ranks in (2, 4):
        around = 2 * (ranks - 1) / ranks * size / cluster.between.bandwidth
        assert between.sum(size, ranks) == pytest.approx(around + 2 * (ranks - 1) * cluster.between.latency)


def test_modules_are_the_first_and_the_last_with_parameters() -> None:
    first, last = planned(2, x=1)
    assert first.modules[0] == "layers.0.0"
    assert last.modules[1] == "layers.5.0"
    names = [name for one in (first, last) for name, _ in one.stage.module.named_parameters()]
    assert len(names) == 12


def test_tied_parameters_are_sharded_where_it_is_dear_to_add_up_their_gradients() -> None:
    module, inputs = gpt()
    graph = capture_microbatch(module, (), inputs)
    parts = cut(graph, balance_stages(graph, 2), 2)
    cluster, mesh = Cluster.of("cpu"), MeshShape.of({"pp": 2, "x": 2})
    slow = dataclasses.replace(cluster, inside=Link(bandwidth=1e3, latency=1e-4))
    placed = []
    for one in (cluster, slow):
        way = Links.of(one, mesh, "pp")
        asked = stage_target(quick_target(), cluster)
        planner = StagePlanner([StageTarget(asked, MeshShape.of({"x": 2}))], [{}], None, links=way)
        stages = planner.plan(parts, [StageBudget(None, "none", microbatches=4)] * 2)
        placed.append({stage.plan.placements["tokens.weight"] for stage in stages})
    assert placed[0] == {(Replicate(),)}
    assert len(placed[1]) == 1
    assert placed[1] != placed[0]


def test_a_plan_counts_what_all_microbatches_under_way_hold() -> None:
    one, three = (
        planned(2, room=StageBudget(None, "none", microbatches=4, under_way=count), x=2)[0] for count in (1, 3)
    )
    assert three.plan.decisions == one.plan.decisions
    saved = stage_costs(one, links(pp=2, x=2), 4).saved_bytes
    assert three.plan.memory.peak - one.plan.memory.peak == 2 * saved > 0


MESH = MeshShape.of({"dp": 2})
WHOLE = (Replicate(),)


def stages(batch: int = 4) -> list[StageModule]:
    module, inputs = model("mlp")
    graph = capture_microbatch(module, (), {name: tensor[:batch] for name, tensor in inputs.items()})
    return cut(graph, balance_stages(graph, 2), 2)


def plans(given: Placement, taken: Placement | None, parts: list[StageModule]) -> list[ShardingPlan]:
    """Of two stages: how the first leaves what it hands on, and how the second takes it, None where that is whole."""
    second: dict[str, Any] = {"mesh": MESH, "placements": {}}
    if taken is not None:
        second["input_placements"] = {parts[1].received[0].name: (taken,), "target": WHOLE, "other": WHOLE}
        second["options"] = {"inputs": "local"}
    return [ShardingPlan(mesh=MESH, placements={}, output_placements={"output[0]": (given,)}), ShardingPlan(**second)]


@pytest.mark.parametrize(("placement", "rows"), [(Shard(0), 2), (Replicate(), 4)])
def test_what_crosses(placement: Placement, rows: int) -> None:
    parts = stages()
    boundaries = Boundaries(plans(placement, None if placement.is_replicate() else placement, parts), MESH)
    whole = parts[0].returned[0]
    assert boundaries.messages(parts[0])[0] == ()
    (sent,), (received,) = boundaries.messages(parts[0])[1], boundaries.messages(parts[1])[0]
    for tensor in (sent, received):
        assert tensor.shape == (rows, *whole.shape[1:])
        assert (tensor.dtype, tensor.requires_grad) == (whole.dtype, True)
    assert [tensor.shape for tensor in boundaries.messages(parts[1])[1]] == [torch.Size([])]


def test_options_of_a_stage() -> None:
    parts = stages()
    said = dataclasses.replace(target(), hints={"of.another.stage": Shard(0)})
    first, second = (
        stage_target(said, said.cluster, plan, input_names(part))
        for part, plan in zip(parts, plans(Shard(0), Shard(0), parts), strict=True)
    )
    assert first.hints is second.hints is None
    assert (first.inputs, first.output_placements) == ("global", {"output[0]": (Shard(0),)})
    assert (second.inputs, second.output_placements) == ("local", None)
    assert set(second.input_placements) == {parts[1].received[0].name, "target"}


def test_stages_that_disagree() -> None:
    parts = stages()
    boundaries = Boundaries(plans(Shard(0), Shard(1), parts), MESH)
    with pytest.raises(PlanError, match=r"stage 0 leaves \w+ as S\(0\), and stage 1 takes it as S\(1\)"):
        boundaries.messages(parts[1])


def test_shards_of_different_sizes() -> None:
    parts = stages(batch=3)
    boundaries = Boundaries(plans(Shard(0), Shard(0), parts), MESH)
    with pytest.raises(PlanError, match=r"does not part .* evenly: messages have one size"):
        boundaries.messages(parts[0])


def test_a_stage_may_read_nothing() -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.zeros(3, 4) + self.linear(x)).sum()

    graph = capture_microbatch(Zeros(), (torch.randn(3, 4),), {})
    parts = cut(graph, {each.name: int(each.name != "zeros") for each in graph.operators}, 2)
    asked = stage_target(quick_target(), fast_links())
    planner = StagePlanner([StageTarget(asked, MeshShape.of({"x": 2}))], [{}], None)
    first, _ = planner.plan(parts, [FREE] * 2)
    assert not first.plan.placements
