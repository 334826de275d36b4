"""The account of a plan: its collectives are those of its programs, its memory is what ranks allocate.

The step that it predicts is the replay of its program, which torch's partitioner splits in halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils.parametrizations import weight_norm

import autoshard
from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.measurements import Curve
from autoshard.patterns.graph_rules import Value
from autoshard.planner.account import SharePrices, timeline
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.program_memory import allocations
from autoshard.planner.target_constraints import batch_of
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import COLLECTIVE_KINDS, KernelPrices, operations
from autoshard.program.split import split
from autoshard.simulate.events import Operation, Timeline, replay
from autoshard.specs.axes import SharedAxis
from tests import models
from tests.planner.steps import (
    account_of,
    collectives_of,
    every_parameter,
    flow_of,
    halves_of,
    joint_graph,
    links,
    plan_of,
    plan_of_decisions,
    planned_collectives,
    planner_of,
    program_of,
    regather_all,
)
from tests.random_plans import random_assignment
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", {"x": 2, "y": 2}), ("gpt", {"x": 2}), ("gpt", {"x": 4}), ("hf_bert", {"x": 4}), ("mlp", {"x": 1, "y": 3})],
)
@pytest.mark.parametrize("kind", ["free", "forced", "gathered again"])
def test_the_programs_run_the_collectives_of_the_plan(name: str, mesh: Mapping[str, int], kind: str) -> None:
    graph = joint_graph(name)
    planner = planner_of(graph, mesh, Constraints(forced=frozenset() if kind == "free" else every_parameter(graph)))
    plan = planner.plan()
    if kind == "gathered again":
        plan = regather_all(planner, plan)
        assert any("@backward" in key for key in plan.decisions["hubs"])
    assert plan.collectives
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_the_programs_run_the_collectives_of_a_plan_that_leaves_outputs_sharded() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 3}, Constraints(planned_outputs=True))
    plan = planner.plan()
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_the_programs_run_the_collectives_of_a_forward_pass() -> None:
    planner = planner_of(joint_graph("gpt", grad=False), {"x": 2})
    plan = planner.plan()
    assert plan.collectives
    assert {record.phase for record in plan.collectives} == {"forward"}
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_collectives_of_uneven_parameters_are_counted() -> None:
    """The bytes of a reduce-scatter that pads are those before padding."""
    graph = joint_graph("mlp")
    planner = planner_of(graph, {"x": 5}, Constraints(forced=every_parameter(graph)))
    plan = planner.plan()
    ran, said = collectives_of(*halves_of(program_of(planner, plan))), planned_collectives(plan)
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        assert sum(n for key, n in ran.items() if key[0] == kind) == sum(n for key, n in said.items() if key[0] == kind)


def test_every_collective_has_a_module_a_phase_and_a_price() -> None:
    plan = plan_of(joint_graph("gpt"), {"x": 4})
    assert {record.phase for record in plan.collectives} == {"forward", "backward"}
    assert any(record.module.startswith("layers.0") for record in plan.collectives)
    assert all(record.seconds > 0 and record.bytes > 0 and record.count > 0 for record in plan.collectives)


def test_gradients_are_reduced_behind_the_backward_compute() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2})
    account = account_of(planner, planner.plan())
    operators = len(account.rules.operators)
    reductions = [leg for leg in account.reshards if leg.phase == "backward" and leg.position < operators]
    assert reductions


H100 = Cluster.preset("h100")
aten = torch.ops.aten


def program_operations(planner: Planner, plan: ShardingPlan) -> list[Operation]:
    """Return the operations of the partitioned program of a plan, on the same cluster."""
    halves = split(program_of(planner, plan), compile=False)
    return operations(halves.graphs, planner.mesh.names, KernelPrices(planner.cost))


def timeline_of(planner: Planner, plan: ShardingPlan) -> Timeline:
    """Return the timeline of the calls of the predicted program, each priced as a kernel."""
    return timeline(planner.program(flow_of(planner, plan)), KernelPrices(planner.cost))


def drawn(planner: Planner, seed: int, forced: bool) -> ShardingPlan:
    """Return a random plan."""
    constraints = Constraints(forced=every_parameter(planner.graph) if forced else frozenset())
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, constraints)
    axes = frozenset(range(planner.mesh.ndim))
    built = builder.build(axes, reuse="all" if forced else "none")
    return plan_of_decisions(planner, built.decode(random_assignment(built.problem, np.random.default_rng(seed))))


CASES = [
    ("gpt", {"x": 2, "y": 2}, "found"),
    ("mlp", {"x": 3, "y": 2}, "random"),
    ("gpt", {"x": 4}, "random, forced"),
    ("resnet18", {"x": 4}, "found"),
]


@pytest.mark.parametrize(("name", "mesh", "kind"), CASES)
def test_the_predicted_step_is_the_replay_of_the_program(name: str, mesh: Mapping[str, int], kind: str) -> None:
    planner = planner_of(joint_graph(name), mesh, cluster=H100)
    plan = planner.plan() if kind == "found" else drawn(planner, 0, forced="forced" in kind)
    replayed = replay(program_operations(planner, plan))
    ours = timeline_of(planner, plan)
    assert ours.seconds_with_contention(H100.contention) == pytest.approx(
        replayed.seconds_with_contention(H100.contention), rel=1e-9
    )
    assert plan.step_seconds <= ours.seconds_with_contention(H100.contention) * (1 + 1e-9), (
        "local programs run as many kernels"
    )
    assert ours.exposed == pytest.approx(replayed.exposed, rel=1e-9, abs=1e-12)


def test_also_where_parameters_are_gathered_again() -> None:
    graph = joint_graph("hf_llama")
    planner = planner_of(graph, {"x": 4}, Constraints(forced=every_parameter(graph)), cluster=H100)
    plan = regather_all(planner, planner.plan())
    replayed = replay(program_operations(planner, plan))
    ours = timeline_of(planner, plan)
    assert ours.seconds_with_contention(H100.contention) == pytest.approx(
        replayed.seconds_with_contention(H100.contention), rel=1e-9
    )


def test_a_forward_pass_has_no_backward_half() -> None:
    planner = planner_of(joint_graph("gpt", grad=False), {"x": 2}, cluster=H100)
    plan = planner.plan()
    replayed = replay(program_operations(planner, plan))
    ours = timeline_of(planner, plan)
    assert ours.seconds_with_contention(H100.contention) == pytest.approx(
        replayed.seconds_with_contention(H100.contention), rel=1e-9
    )


def test_a_step_takes_no_longer_than_its_operations_one_after_the_other() -> None:
    cluster, graph = links(4e9, 1e-6), joint_graph("gpt")
    planner = planner_of(graph, {"x": 4}, Constraints(forced=every_parameter(graph)), cluster=cluster)
    plan = planner.plan()
    issued, replayed = (
        program_operations(planner, plan),
        timeline(planner.program(flow_of(planner, plan)), planner.prices),
    )
    assert replayed.hidden > 0
    assert replayed.seconds < plan.step_seconds
    assert plan.step_seconds == replayed.seconds + cluster.contention * replayed.hidden
    assert plan.step_seconds <= sum(one.seconds for one in issued)


def test_the_optimizer_updates_what_a_device_holds() -> None:
    graph = joint_graph("mlp")
    parameters = [Value(source.node).meta for source in graph.inputs if source.kind == "parameter"]
    whole, parts = planner_of(graph, {"x": 1}), planner_of(graph, {"x": 4}, Constraints(forced=every_parameter(graph)))
    # Adam reads the gradient, and reads and writes the parameter, two tensors of its size, and a count.
    moved = sum(7 * meta.bytes + 2 * 4 for meta in parameters)
    update = whole.cost.compute(0.0, moved, torch.float32)
    plan = whole.plan()
    assert plan.update_seconds == pytest.approx(update)
    assert plan.step_seconds == pytest.approx(plan.cost)
    assert parts.plan().update_seconds < update
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_a_pass_without_gradients_updates_nothing() -> None:
    planner = planner_of(joint_graph("gpt", grad=False), {"x": 2}, cluster=H100)
    assert planner.plan().update_seconds == 0.0


def test_sums_of_activations_in_tensor_parallelism_are_exposed() -> None:
    """Layers split over their hidden units wait for the sum of their results: there is nothing to compute behind it."""
    module = nn.Sequential(nn.Linear(1024, 8192, bias=False), nn.ReLU(), nn.Linear(8192, 1024, bias=False))
    hints = {"0.weight": [Shard(0)], "2.weight": [Shard(1)]}
    late = 1e-3
    slow = {
        kind: replace(known, curve=Curve(known.curve.amounts, tuple(one + late for one in known.curve.seconds)))
        for kind, known in H100.inside.collectives.items()
    }
    inside = replace(H100.inside, collectives=slow)
    steps = [
        autoshard.plan(module, {"tp": 4}, (torch.randn(16, 1024),), hints=hints, cluster=cluster)
        for cluster in (H100, replace(H100, inside=inside))
    ]
    assert any(one.kind == "all_reduce" and one.phase == "forward" for one in steps[0].collectives)
    assert steps[1].step_seconds - steps[0].step_seconds >= 0.99 * late


class Normalized(nn.Module):
    """A layer whose weight is normalised by operators that do not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).tanh().square().mean()


@pytest.fixture(scope="module")
def normalized() -> Planner:
    graph = capture(Normalized(), (), {"x": torch.randn(4096, 64)}, dynamic={"x": {0: "batch"}})
    batch = batch_of(graph)
    assert batch is not None
    return planner_of(graph, {"dp": 2}, Constraints(shared=SharedAxis(0, 2, batch)), links(1e12, 1e-9))


def _kernels(program: PredictedProgram) -> list[fx.Node]:
    calls = [node for half in (program.forward, program.backward) for node in half.graph.nodes]
    return [node for node in calls if node.op == "call_function" and node.target not in COLLECTIVE_KINDS]


def test_what_computes_with_a_share_takes_as_many_times_as_long(normalized: Planner) -> None:
    flow = flow_of(normalized, normalized.plan())
    program, shared = normalized.program(flow), normalized.constraints.shared
    equal, larger = (SharePrices(flow, normalized.cluster, shared, share) for share in (1.0, 1.5))
    overhead = normalized.cluster.device.kernel_overhead
    grown, kept = set(), set()
    for node in _kernels(program):
        before, after = equal.seconds(node), larger.seconds(node)
        assert before == pytest.approx(normalized.prices.seconds(node))
        if before > overhead:
            assert after == pytest.approx(before) or after - overhead == pytest.approx(1.5 * (before - overhead))
            (grown if after > before else kept).add(node.target)
    assert {aten.tanh.default, aten.tanh_backward.default} <= grown
    assert any("weight_norm" in str(target) or target is aten.linalg_vector_norm.default for target in kept), kept


def test_the_step_is_that_of_the_share(normalized: Planner) -> None:
    flow = flow_of(normalized, normalized.plan())
    program, shared = normalized.program(flow), normalized.constraints.shared

    def seconds(share: float) -> float:
        return normalized.replay(program, SharePrices(flow, normalized.cluster, shared, share)).seconds

    assert seconds(1.0) == pytest.approx(normalized.replay(program, normalized.prices).seconds)
    assert seconds(0.5) < seconds(1.0) < seconds(1.5) < 1.5 * seconds(1.0)


def _allocated(module: nn.Module, inputs: Mapping[str, Any], mesh: Any) -> list[tuple[int, int, int]]:
    """Bytes of parameters, gradients and Adam's state after a step, on every rank."""
    optimizer = torch.optim.AdamW(module.parameters())
    outputs = module(**inputs)
    (outputs if isinstance(outputs, torch.Tensor) else outputs[-1]).backward()
    optimizer.step()
    state = [tensor for of in optimizer.state.values() for tensor in of.values()]
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    totals = [_bytes_per_rank(tensors, mesh) for tensors in (list(module.parameters()), gradients, state)]
    return list(zip(*totals, strict=True))


def _bytes_per_rank(tensors: list[torch.Tensor], mesh: Any) -> list[int]:
    totals = [0] * mesh.size()
    for tensor in tensors:
        for rank, local in enumerate(per_rank(tensor.detach(), mesh).values()):
            totals[rank] += local.numel() * local.element_size()
    return totals


_SHARDED = {"*.weight": {"x": Shard(0)}}
_WHOLE = {"*": Replicate()}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"x": 4}, {}),
        ({"x": 4}, {"hints": _WHOLE}),
        ({"x": 4}, {"memory_limit": 440_000}),
        ({"x": 2, "y": 2}, {}),
        ({"x": 2, "y": 2}, {"hints": _SHARDED}),
    ],
    ids=str,
)
def test_what_ranks_allocate_is_what_the_plan_says(sizes: dict[str, int], options: dict[str, Any]) -> None:
    module, inputs = models.gpt(layers=1)
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), **options)
        said = module.sharding_plan.memory
        assert said.peak >= said.parameters + said.optimizer
        assert set(_allocated(module, inputs, mesh)) == {(said.parameters, said.gradients, said.optimizer)}


def test_the_plan_says_what_the_rank_with_the_largest_uneven_shard_allocates() -> None:
    module, inputs = models.mlp()
    hints = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    with simulated_mesh(x=5) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, hints=hints)
        said = module.sharding_plan.memory
        ranks = _allocated(module, inputs, mesh)
    # 48 rows in shards of 10, 10, 10, 10 and 8.
    assert max(ranks) == ranks[0] == (said.parameters, said.gradients, said.optimizer)
    assert ranks[4] < ranks[0]


def test_optimizer_state_is_of_trained_parameters_alone() -> None:
    module, inputs = models.mlp()
    module.up.requires_grad_(False)
    plan = autoshard.plan(module, {"x": 2}, (), inputs, hints={"*": Replicate()}, optimizer_bytes_per_element=4)
    trained = 48 * 24 + 24
    assert plan.memory.optimizer == 4 * trained
    assert plan.memory.gradients == 4 * trained
    assert plan.memory.parameters == 4 * (trained + 48 * 24 + 48)


def test_a_forward_pass_holds_no_gradients_and_no_optimizer_state() -> None:
    memory = plan_of(joint_graph("mlp", grad=False), {"x": 2}).memory
    assert memory.gradients == memory.optimizer == 0
    assert memory.peak >= memory.parameters > 0


def test_memory_can_not_be_below_what_is_at_rest_nor_above_the_sum() -> None:
    memory = plan_of(joint_graph("gpt"), {"x": 2}).memory
    rest = memory.parameters + memory.optimizer + memory.buffers
    assert rest + memory.activations <= memory.peak <= rest + memory.activations + memory.gradients


def test_activations_die_after_their_last_use() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 2})
    end = len(planner.rules.operators) + 1
    flow = flow_of(planner, planner.plan())
    held = list(allocations(flow, planner.program(flow), planner.settings.optimizer))
    activations = [one for one in held if one.kind in ("saved", "temporary") and one.end < end]
    assert activations
    assert all(0 <= one.start < one.end <= end for one in activations)
    assert any(one.end < end - 1 for one in activations)


def test_collectives_inside_operators_count_once() -> None:
    planner = planner_of(joint_graph("gpt"), {"dp": 2, "tp": 2}, None, links(1e10, 1e-7))
    plan = planner.plan()
    account = account_of(planner, plan)
    inside = sum(map(account.seconds, account.rules.operators)) - sum(choice.seconds for choice in plan.choices)
    reshards = 0.0
    for reshard in account.reshards:
        price = planner.cost.gradient_collective if reshard.gradient else planner.cost.collective
        sent = (step for step in reshard.path.steps if step.kind not in ("slice", "make_partial"))
        reshards += sum(price(step.kind, step.bytes, step.axis) for step in sent)
    # The loss of a vocabulary in shards sums up inside its operators.
    assert inside > 0
    assert sum(sent.count * sent.seconds for sent in plan.collectives) == pytest.approx(reshards + inside, rel=1e-9)
