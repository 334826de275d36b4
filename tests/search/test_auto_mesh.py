"""Every rank of a job on the mesh that the first rank found: real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autoshard
from autoshard.errors import BudgetError, InputError, MeshError
from autoshard.options.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.auto_mesh import auto_mesh
from tests.targets import target as target_of
from tests.training import TOLERANCE, fast_links
from tests.workers import Workers


class Scores(nn.Module):
    """Two layers and a loss, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48, dtype=torch.float64)
        self.down = nn.Linear(48, 24, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.down(functional.gelu(self.up(x)))).square().mean()


def scores() -> tuple[Scores, torch.Tensor]:
    torch.manual_seed(0)
    return Scores(), torch.randn(12, 24, dtype=torch.float64)


def target(memory_limit: str | None = None) -> Target:
    """The target of a quick search."""
    return target_of("cpu", time_limit=60.0, effort="fast", memory_limit=memory_limit)


def test_all_ranks_train_on_the_mesh_that_was_found(four: Workers) -> None:
    module, x = scores()
    loss = module(x)
    loss.backward()
    told = four.run(trained)
    for axes, plan, losses in told:
        assert (axes, plan) == told[0][:2]
        torch.testing.assert_close(losses, [loss.detach(), module.up.weight.grad], rtol=TOLERANCE, atol=1e-14)


def trained() -> tuple[dict[str, int], str, list[torch.Tensor]]:
    """The mesh, the plan as text, and the loss and a whole gradient of a step under it."""
    module, x = scores()
    agreed = auto_mesh(module, (x,), {}, target(), pipelines=False)
    assert agreed.pipeline is None
    assert isinstance(agreed.device_mesh, DeviceMesh)
    assert isinstance(agreed.plan, ShardingPlan)
    assert agreed.device_mesh.size() == dist.get_world_size()
    autoshard.parallelize(module, agreed.device_mesh, (x,), cluster=fast_links(), plan=agreed.plan)
    loss = module(x)
    loss.backward()
    gradient: Any = module.up.weight.grad
    names = agreed.device_mesh.mesh_dim_names
    assert names is not None
    axes = dict(zip(names, agreed.device_mesh.shape, strict=True))
    return axes, agreed.plan.to_json(), [loss.detach(), gradient.full_tensor()]


def test_what_fails_on_the_first_rank_fails_on_all(four: Workers) -> None:
    assert four.run(refused) == ["BudgetError"] * 4


def refused() -> str:
    module, x = scores()
    with pytest.raises(BudgetError, match=r"no mesh of 4 devices fits in 1\.0 KiB") as error:
        auto_mesh(module, (x,), {}, target("1KiB"), pipelines=False)
    return type(error.value).__name__


def test_without_an_example_call_there_is_nothing_to_plan_for(four: Workers) -> None:
    assert four.run(without_example) == [True] * 4


def without_example() -> bool:
    with pytest.raises(InputError, match="needs an example call"):
        auto_mesh(scores()[0], (), {}, target())
    return True


def test_without_a_process_group_there_are_no_ranks() -> None:
    module, x = scores()
    with pytest.raises(MeshError, match="torchrun"):
        auto_mesh(module, (x,), {}, target())
