"""What only real processes can show: four of them over gloo, on a mesh (2, 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import autoshard
from autoshard.errors import BudgetError, InputError
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.rank_agreement import HostGroups, Seeds
from autoshard.runtime.shards import cut, gather_full_tensor, local_of
from autoshard.specs.spec import Spec
from tests import models
from tests.models.routed import sorted_experts
from tests.models.words import words
from tests.patterns.units.unit_models import attention_model, plan_with, worst_error
from tests.training import (
    ONE_LAYER,
    TOLERANCE,
    compare,
    fast_links,
    one_device,
    train,
    train_on_processes,
)
from tests.workers import Workers

RATE = 0.25


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def of_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What every rank holds."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return gathered


def assert_same_everywhere(tensor: torch.Tensor) -> None:
    for other in of_all_ranks(tensor):
        assert torch.equal(other, tensor)


def test_training_equals_one_device(four: Workers) -> None:
    assert max(four.run(worst_difference, ONE_LAYER)) <= TOLERANCE


def worst_difference(model: str) -> float:
    trace = train_on_processes(model, {"dp": 2, "tp": 2}, effort="fast")
    assert any(placement != Replicate() for placements in trace.placements.values() for placement in placements)
    return compare(trace, one_device(model)).worst


def test_keys_that_go_round_processes(four: Workers) -> None:
    """Ranks of a ring that are no neighbours: a stretch comes from its place in the group."""
    plan = plan_with(attention_model, {"cp": 2, "tp": 2}, "attention", "n", axis=0)
    assert max(four.run(worst_difference_of_keys, plan.to_json())) <= TOLERANCE


def worst_difference_of_keys(plan: str) -> float:
    return worst_error(attention_model, {"cp": 2, "tp": 2}, processes=True, plan=ShardingPlan.from_json(plan))


def test_ranks_that_hold_unequally_many_rows(four: Workers) -> None:
    """Tokens sent to the ranks of their experts, on an axis of two; the first rank gets none."""
    assert max(four.run(worst_of_routed, "none to the first")) <= TOLERANCE


def worst_of_routed(routing: str) -> float:
    module, inputs = sorted_experts(dtype=torch.float64, routing=routing)
    expected = train(sorted_experts(dtype=torch.float64, routing=routing)[0], inputs)
    plan = autoshard.plan(
        *(module, mesh(), (), inputs),
        cluster=fast_links(),
        hints=dict.fromkeys(("up", "down"), (Replicate(), Shard(0))),
    )
    assert {choice.strategy for choice in plan.choices if "autoshard" in choice.operator} == {
        "source on dp, group on tp"
    }
    autoshard.parallelize(module, mesh(), (), inputs, plan=plan)
    return compare(train(module, inputs), expected).worst


def test_the_first_rank_decides_parameters_and_buffers(four: Workers) -> None:
    four.run(different_seeds)


def different_seeds() -> None:
    expected, inputs = words(seed=0)
    module, _ = words(seed=dist.get_rank())
    module.register_buffer("scale", torch.full((2,), float(dist.get_rank())))
    autoshard.parallelize(module, mesh(), (), inputs, cluster=fast_links())
    for name, value in expected.named_parameters():
        assert torch.equal(gather_full_tensor(module.get_parameter(name)), value)
    assert torch.equal(module.get_buffer("scale"), torch.zeros(2))
    later, _ = words(seed=dist.get_rank())
    autoshard.parallelize(later, mesh(), cluster=fast_links())
    for parameter in later.parameters():
        assert_same_everywhere(local_of(parameter))
    later(**inputs)
    for name, value in expected.named_parameters():
        assert torch.equal(gather_full_tensor(later.get_parameter(name)), value)


def test_local_inputs_as_a_loader_yields_them(four: Workers) -> None:
    four.run(own_shards)


def own_shards() -> None:
    module, inputs = words()
    expected = train(words()[0], inputs)
    device_mesh = mesh()
    placements = (Shard(0), Replicate())
    autoshard.parallelize(
        module,
        device_mesh,
        (),
        inputs,
        cluster=fast_links(),
        inputs="local",
        input_placements=dict.fromkeys(inputs, placements),
    )
    own = {name: cut(tensor, device_mesh, Spec.of(*placements)) for name, tensor in inputs.items()}
    assert own["input_ids"].shape[0] == models.BATCH // 2
    assert compare(train(module, own), expected).worst <= TOLERANCE


def test_local_inputs_of_different_lengths(four: Workers) -> None:
    """Four samples on two ranks, then numbers of samples that do not divide, one rank's share of them empty."""
    errors = four.run(shards_of_different_lengths)
    assert all("were given 1, 3 elements of dim 0 of input_ids" in error for error in errors)
    assert all("are 2, 2: every rank takes 2" in error for error in errors)


def shards_of_different_lengths() -> str:
    module, inputs = words()
    alone, _ = words()
    device_mesh = mesh()
    placements = (Shard(0), Replicate())
    autoshard.parallelize(
        module,
        device_mesh,
        (),
        {name: tensor[:4] for name, tensor in inputs.items()},
        cluster=fast_links(),
        inputs="local",
    )
    first = device_mesh.get_coordinate()[0] == 0
    for batch, lengths in ((4, (2, 2)), (5, (3, 2)), (1, (1, 0))):
        some = {name: tensor[:batch] for name, tensor in inputs.items()}
        own = {name: cut(tensor, device_mesh, Spec.of(*placements)) for name, tensor in some.items()}
        assert own["input_ids"].shape[0] == lengths[0 if first else 1]
        assert compare(train(module, own, 1), train(alone, some, 1)).worst <= TOLERANCE
    with pytest.raises(InputError) as caught:
        module(**{name: tensor[: 1 if first else 3] for name, tensor in inputs.items()})
    return str(caught.value)


def test_a_wrong_length_on_one_line_of_ranks_is_an_error_on_all(four: Workers) -> None:
    for lengths, replicas in four.run(wrong_lengths):
        assert "along axis 'tp' were given 6, 4 elements of dim 1 of input_ids" in lengths
        assert "along axis 'tp' were given 2, 1 elements of dim 0 of input_ids, which they hold alike" in replicas


def wrong_lengths() -> tuple[str, str]:
    """What is said where the last rank has too few positions, of which the ranks of a line hold some; or too few rows,
    which they hold alike."""
    said = []
    for placements, wrong in (((Shard(0), Shard(1)), (2, 4)), ((Shard(0), Replicate()), (1, models.SEQUENCE))):
        module, inputs = words()
        batch = {name: tensor[:5] for name, tensor in inputs.items()}
        options: dict[str, Any] = {"inputs": "local", "input_placements": dict.fromkeys(inputs, placements)}
        device_mesh = mesh()
        autoshard.parallelize(module, device_mesh, (), batch, cluster=fast_links(), **options)
        own = {name: cut(tensor, device_mesh, Spec.of(*placements)) for name, tensor in batch.items()}
        if dist.get_rank() == dist.get_world_size() - 1:
            own = {name: tensor[: wrong[0], : wrong[1]] for name, tensor in own.items()}
        with pytest.raises(InputError) as caught:
            module(**own)
        said.append(str(caught.value))
    return said[0], said[1]


def whole_of(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def test_a_plan_from_a_file(four: Workers, tmp_path: Path) -> None:
    module, inputs = words()
    path = tmp_path / "plan.json"
    autoshard.plan(module, {"dp": 2, "tp": 2}, (), inputs, cluster=fast_links()).save(path)
    four.run(apply_plan, str(path))


def apply_plan(path: str) -> None:
    module, inputs = words()
    expected = train(words()[0], inputs)
    plan = ShardingPlan.load(path)
    autoshard.parallelize(module, mesh(), (), inputs, plan=plan)
    assert module.sharding_plan == plan
    assert {name: tuple(p.placements) for name, p in module.named_parameters()} == {
        name: plan.placements[name] for name, _ in module.named_parameters()
    }
    assert compare(train(module, inputs), expected).worst <= TOLERANCE


def test_an_error_of_the_first_rank_is_one_of_all(four: Workers) -> None:
    messages = four.run(too_small_a_budget)
    assert "smallest" in messages[0]
    assert len(set(messages)) == 1


def too_small_a_budget() -> str:
    module, inputs = models.mlp()
    with pytest.raises(BudgetError) as caught:
        autoshard.parallelize(module, mesh(), (), inputs, memory_limit=1000)
    assert not isinstance(module.up.weight, DTensor)
    return str(caught.value)


def test_an_error_of_any_rank_is_one_of_all(four: Workers) -> None:
    for fault in ("model", "batch", "example that the plan is not of"):
        messages = four.run(one_rank_differs, fault)
        assert all("rank 2" in message for rank, message in enumerate(messages) if rank != 2), messages


def one_rank_differs(fault: str) -> str:
    module, inputs = models.mlp()
    plan = autoshard.plan(module, {"dp": 2, "tp": 2}, (), inputs) if "plan" in fault else None
    if dist.get_rank() == 2 and fault == "model":
        module = models.Mlp(24, 36)
    elif dist.get_rank() == 2:
        inputs = {name: tensor[:4] for name, tensor in inputs.items()}
    with pytest.raises(InputError) as caught:
        autoshard.parallelize(module, mesh(), (), inputs, plan=plan)
    assert not isinstance(module.up.weight, DTensor)
    return str(caught.value)


class Masked(nn.Module):
    """Dropout of a product, pinned so that the data axis splits it and the other holds replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = autoshard.shard(x * self.weight, Shard(0), Replicate())
        return autoshard.shard(functional.dropout(product, RATE, self.training), Shard(0), Replicate())


def test_dropout_is_one_mask_of_the_whole_tensor(four: Workers) -> None:
    four.run(dropout)


def dropout() -> None:
    module, x = Masked(), torch.ones(200, 300, dtype=torch.float64)
    autoshard.parallelize(module, mesh(), (x,), cluster=fast_links())
    torch.manual_seed(5 + dist.get_rank())  # the first rank's state decides
    first = module(x)
    first.sum().backward()
    torch.testing.assert_close(whole_of(module.weight.grad), first.detach().sum(0))  # one mask in both phases
    assert_same_everywhere(first.detach())
    assert not torch.equal(first[:100] == 0, first[100:] == 0)
    kept = first[first != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - RATE)))
    assert abs(kept.numel() / first.numel() - (1 - RATE)) < 0.01  # 5.6 standard deviations
    second = module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5 if dist.get_rank() == 0 else 77)
    assert torch.equal(module(x), first)
    module.eval()
    assert torch.equal(module(x), x)


def test_replicas_agree_under_dropout_in_a_model(four: Workers) -> None:
    four.run(gpt_with_dropout)


def gpt_with_dropout() -> None:
    module, inputs = models.gpt(dtype=torch.float64, layers=1, dropout=RATE)
    device_mesh = mesh()
    search = autoshard.Search(effort="fast")
    autoshard.parallelize(module, device_mesh, (), inputs, cluster=fast_links(), search=search)
    torch.manual_seed(dist.get_rank())
    trace = train(module, inputs)
    for values in (trace.losses, trace.outputs, trace.gradients, trace.parameters):
        for tensors in values.values():
            assert_same_everywhere(tensors[0])


def test_every_rank_knows_that_one_says_something_else(four: Workers) -> None:
    """Though it has a line of the mesh in common with two others alone."""
    assert four.run(whether_hosts_differ) == [[False, True, True]] * 4


def whether_hosts_differ() -> list[bool]:
    hosts = HostGroups(mesh())
    return hosts.differ("alike", *(str(dist.get_rank() == rank) for rank in (0, 3)))


def test_hosts_agree_on_seeds_where_no_group_sends_what_lies_on_the_cpu(four: Workers) -> None:
    four.run(seeds_of_groups_beside)


def seeds_of_groups_beside() -> None:
    """As after `init_process_group("nccl")`: groups of gloo are made beside those of the mesh."""
    agreed = Seeds(mesh())
    torch.manual_seed(dist.get_rank())
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        first = agreed.draw()
    second = agreed.draw()
    for seed in (first, second):
        assert_same_everywhere(seed)
    assert int(first) != int(second)
    torch.manual_seed(0)
    assert int(torch.randint(0, 2**62, (), dtype=torch.int64)) == int(first)
