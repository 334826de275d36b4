"""The predicted memory of a device is what ranks allocate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.planner.allocations import allocations
from tests import models
from tests.planner.steps import flow_of, joint_graph, plan_of, planner_of
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links


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
