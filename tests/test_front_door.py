"""The front door on a mesh (2, 2), whose ranks are in this process: what a user's optimizers, calls and outputs get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoshard
from autoshard.errors import PlanError
from tests import models
from tests.models.words import words
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, held_by_ranks, relative_difference, train

RATE = 0.25
QUICKLY: dict[str, Any] = {"cluster": fast_links(), "search": autoshard.Search(effort="fast")}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(dp=2, tp=2) as found:
        yield found


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Every rank has what one device has."""
    held = [{name: held_by_ranks(tensor.detach()) for name, tensor in each.items()} for each in (ours, theirs)]
    assert relative_difference(*held) <= TOLERANCE


def test_hidden_units_that_ranks_share(mesh: DeviceMesh) -> None:
    """A layer on one sample, whose only way to be sharded on both axes is by its units."""
    reference = train(*single_sample(), steps=2)
    module, inputs = single_sample()
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
    trace = train(module, inputs, steps=2)
    loops = {decision.strategy for decision in module.sharding_plan.choices if "_steps" in decision.operator}
    assert loops == {"h on dp, h on tp"}, loops
    assert compare(trace, reference).worst <= TOLERANCE


def single_sample() -> models.Model:
    return models.ZOO["lstm"](dtype=torch.float64, batch=1)


def test_an_optimizer_made_before_the_first_call(mesh: DeviceMesh) -> None:
    module, inputs = words()
    expected = train(words()[0], inputs)
    autoshard.parallelize(module, mesh, cluster=fast_links())
    trace = train(module, inputs)  # makes its optimizer first
    assert compare(trace, expected).worst <= TOLERANCE
    assert any(placement != Replicate() for placements in trace.placements.values() for placement in placements)


def test_an_optimizer_made_before_parallelize(mesh: DeviceMesh) -> None:
    lbfgs = partial(torch.optim.LBFGS, max_iter=4)
    for make, planned in ((torch.optim.AdamW, True), (torch.optim.SGD, False), (lbfgs, True)):
        (module, inputs), (alone, _) = words(), words()
        optimizers = [make(one.parameters(), lr=RATE) for one in (module, alone)]
        autoshard.parallelize(module, mesh, (), inputs if planned else {}, **QUICKLY)
        for _ in range(3):
            for one, optimizer in zip((module, alone), optimizers, strict=True):
                loss = partial(backward, one, inputs, optimizer)
                loss()
                optimizer.step(loss if make is lbfgs else None)  # type: ignore[arg-type]
        assert_equal(dict(module.named_parameters()), dict(alone.named_parameters()))


def backward(module: nn.Module, inputs: dict[str, Any], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = module(**inputs)[1]
    loss.backward()
    return loss


def test_an_optimizer_that_has_trained_before_parallelize_is_refused_at_its_step(mesh: DeviceMesh) -> None:
    module, inputs = words()
    optimizer = torch.optim.AdamW(module.parameters())
    module(**inputs)[1].backward()
    optimizer.step()
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
    with pytest.raises(PlanError, match=r"AdamW holds state for a parameter of shape .* Make the optimizer after"):
        optimizer.step()


def test_other_signatures_and_a_loss_of_the_logits(mesh: DeviceMesh) -> None:
    module, inputs = words()
    alone, _ = words()
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
    results = {}
    for kind, one in (("ours", module), ("theirs", alone)):
        smaller = {name: tensor[:5] for name, tensor in inputs.items()}
        one(**inputs)[1].backward()
        one(**smaller)[1].backward()
        one(**inputs)[0].square().mean().backward()  # of the logits, though the model returned a loss
        one.eval()
        with torch.no_grad():
            logits = one(inputs["input_ids"][:3])
        results[kind] = {**{name: one.grad for name, one in one.named_parameters()}, "logits": logits}
    assert_equal(results["ours"], results["theirs"])


def test_planned_outputs_hold_their_shards(mesh: DeviceMesh) -> None:
    module, inputs = words()
    logits, loss = words()[0](**inputs)
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), output_placements="planned")
    ours, our_loss = module(**inputs)
    assert isinstance(ours, DTensor)
    assert ours.to_local().numel() < logits.numel()
    assert_equal({"logits": ours, "loss": our_loss}, {"logits": logits, "loss": loss})


def test_planned_outputs_of_a_batch_that_does_not_divide(mesh: DeviceMesh) -> None:
    """Ranks hold the rows that are theirs, and no padding; gradients may come back through them."""
    module, inputs = words()
    alone, _ = words()
    some = {name: tensor[:5] for name, tensor in inputs.items()}
    logits, _ = alone(**some)
    logits.square().mean().backward()
    asked = {"output[0]": (Shard(0), Replicate())}
    autoshard.parallelize(module, mesh, (), some, cluster=fast_links(), output_placements=asked)
    ours, _ = module(**some)
    assert isinstance(ours, DTensor)
    assert {place: len(held) for place, held in per_rank(ours, mesh).items()} == {
        (row, column): (3, 2)[row] for row in range(2) for column in range(2)
    }
    assert_equal({"logits": ours}, {"logits": logits})
    ours.square().mean().backward()
    assert_equal(*({name: one.grad for name, one in each.named_parameters()} for each in (module, alone)))


def test_an_uneven_hint_trains_right(mesh: DeviceMesh) -> None:
    """25 rows over 2 ranks."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 5)).double(), torch.randn(8, 12).double()
    alone = nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 5)).double()
    alone.load_state_dict(module.state_dict())
    expected = train(alone, {"input": x})
    hints = {"0.weight": {"tp": Shard(0)}, "2.weight": {"dp": Shard(0), "tp": Shard(1)}}
    autoshard.parallelize(module, mesh, (), {"input": x}, hints=hints)
    assert {place: len(held) for place, held in per_rank(module[0].weight, mesh).items()} == {
        (row, column): (13, 12)[column] for row in range(2) for column in range(2)
    }
    assert compare(train(module, {"input": x}), expected).worst <= TOLERANCE
