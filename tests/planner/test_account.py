"""The account of a plan: what it says is sent is what the programs send, what it says is held is what is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.planner.account import Account
from autoshard.planner.problem import Wishes
from tests import models
from tests.numerics import fast_links
from tests.partition.meshes import per_rank, simulated
from tests.planner.steps import (
    account_of,
    captured,
    collectives_of,
    every_parameter,
    halves_of,
    plan_of,
    planned_collectives,
    planner_of,
    program_of,
)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", {"x": 2, "y": 2}), ("gpt", {"x": 2}), ("gpt", {"x": 4}), ("hf_bert", {"x": 4}), ("mlp", {"x": 1, "y": 3})],
)
@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
def test_the_programs_run_the_collectives_of_the_plan(name: str, mesh: Mapping[str, int], forced: bool) -> None:
    graph = captured(name)
    planner = planner_of(graph, mesh, Wishes(forced=every_parameter(graph) if forced else frozenset()))
    plan = planner.plan()
    assert plan.collectives
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_the_programs_run_the_collectives_of_a_plan_that_leaves_outputs_sharded() -> None:
    planner = planner_of(captured("mlp"), {"x": 3}, Wishes(planned_outputs=True))
    plan = planner.plan()
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_the_programs_run_the_collectives_of_a_forward_pass() -> None:
    planner = planner_of(captured("gpt", grad=False), {"x": 2})
    plan = planner.plan()
    assert plan.collectives
    assert {record.phase for record in plan.collectives} == {"forward"}
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_collectives_of_uneven_parameters_are_counted() -> None:
    """The bytes of a reduce-scatter that pads are those before padding."""
    graph = captured("mlp")
    planner = planner_of(graph, {"x": 5}, Wishes(forced=every_parameter(graph)))
    plan = planner.plan()
    ran, said = collectives_of(*halves_of(program_of(planner, plan))), planned_collectives(plan)
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        assert sum(n for key, n in ran.items() if key[0] == kind) == sum(n for key, n in said.items() if key[0] == kind)


def test_every_collective_has_a_module_a_phase_and_a_price() -> None:
    plan = plan_of(captured("gpt"), {"x": 4})
    assert {record.phase for record in plan.collectives} == {"forward", "backward"}
    assert any(record.module.startswith("layers.0") for record in plan.collectives)
    assert all(record.seconds > 0 and record.bytes > 0 and record.count > 0 for record in plan.collectives)


def _allocated(module: nn.Module, inputs: Mapping[str, Any], mesh: Any) -> list[tuple[int, int, int]]:
    """Bytes of parameters, gradients and Adam's moments after a step, on every rank."""
    optimizer = torch.optim.AdamW(module.parameters())
    outputs = module(**inputs)
    (outputs if isinstance(outputs, torch.Tensor) else outputs[-1]).backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    totals = [_bytes_per_rank(tensors, mesh) for tensors in (list(module.parameters()), gradients, moments)]
    return list(zip(*totals, strict=True))


def _bytes_per_rank(tensors: list[Any], mesh: Any) -> list[int]:
    totals = [0] * mesh.size()
    for tensor in tensors:
        assert isinstance(tensor, DTensor)
        for rank, local in enumerate(per_rank(tensor.detach(), mesh).values()):
            totals[rank] += local.numel() * local.element_size()
    return totals


_SHARDED = {"*.weight": {"x": Shard(0)}}
_WHOLE = {"*": Replicate()}


@pytest.mark.parametrize("options", [{}, {"hints": _WHOLE}, {"hints": _SHARDED}, {"memory_limit": 440_000}])
@pytest.mark.parametrize("sizes", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_what_ranks_allocate_is_what_the_plan_says(sizes: dict[str, int], options: dict[str, Any]) -> None:
    if "memory_limit" in options and len(sizes) > 1:
        pytest.skip("one mesh is enough for the search under a limit")
    module, inputs = models.gpt(layers=1)
    with simulated(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), **options)
        said = module.sharding_plan.memory
        assert said.peak >= said.parameters + said.optimizer
        assert set(_allocated(module, inputs, mesh)) == {(said.parameters, said.gradients, said.optimizer)}


def test_the_plan_says_what_the_rank_with_the_largest_uneven_shard_allocates() -> None:
    module, inputs = models.mlp()
    hints = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    with simulated(x=5) as mesh:
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
    memory = plan_of(captured("mlp", grad=False), {"x": 2}).memory
    assert memory.gradients == memory.optimizer == 0
    assert memory.peak >= memory.parameters > 0


def test_memory_can_not_be_below_what_is_at_rest_nor_above_the_sum() -> None:
    memory = plan_of(captured("gpt"), {"x": 2}).memory
    rest = memory.parameters + memory.optimizer + memory.buffers
    assert rest + memory.activations <= memory.peak <= rest + memory.activations + memory.gradients


def _account(name: str, mesh: Mapping[str, int], **options: Any) -> tuple[Account, Any]:
    planner = planner_of(captured(name), mesh, cluster=options.pop("cluster", None), **options)
    plan = planner.plan()
    return account_of(planner, plan), plan


def test_a_step_takes_no_longer_than_all_its_parts_one_after_the_other() -> None:
    account, plan = _account("gpt", {"x": 4})
    timeline = account.timeline()
    assert timeline.seconds == plan.step_seconds
    assert 0 < timeline.seconds <= plan.cost * (1 + 1e-9)
    compute = sum(decision.seconds for decision in plan.choices)
    assert timeline.seconds >= compute * (1 - 1e-9)


def test_gradients_are_reduced_behind_the_backward_compute() -> None:
    account, _ = _account("gpt", {"x": 2}, cluster=Cluster.preset("cpu"))
    operators = len(account.rules.operators)
    reductions = [leg for leg in account.legs if leg.phase == "backward" and leg.position < operators]
    assert reductions


def test_activations_die_after_their_last_use() -> None:
    account, _ = _account("mlp", {"x": 2})
    end = len(account.rules.operators) + 1
    activations = [one for one in account.allocations() if one.kind == "activation"]
    assert activations
    assert all(0 <= one.start < one.end <= end for one in activations)
    assert any(one.end < end - 1 for one in activations)
