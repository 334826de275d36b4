"""Predicted memory of optimizers against measured memory, for sharded and replicated parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import _foreach_supported_types

from autoshard.errors import PlanError
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.runtime._torch import has_dtensor_rule
from autoshard.runtime.shards import distribute
from autoshard.specs.spec import Spec
from tests.memory_tracker import Tracker, first_rank
from tests.releases import skip

SHAPES = (((64, 48), 0), ((48, 96), 1), ((64, 64), None), ((96,), 0), ((7,), None))
NAMES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@pytest.fixture
def parameters() -> Iterator[list[torch.nn.Parameter]]:
    with first_rank({"x": 2}) as mesh:
        made = []
        for shape, dim in SHAPES:
            placement = Replicate() if dim is None else Shard(dim)
            made.append(torch.nn.Parameter(distribute_tensor(torch.rand(shape), mesh, [placement])))
            made[-1].grad = distribute_tensor(torch.rand(shape), mesh, [placement])
        yield made


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_state_and_temporaries(name: str, foreach: bool, parameters: list[torch.nn.Parameter]) -> None:
    said = optimizer_memory(name, None, foreach=foreach)
    if name == "adafactor" and foreach and not has_dtensor_rule(torch.ops.aten._foreach_lerp_.ScalarList):
        skip("aten._foreach_lerp_.ScalarList for DTensors: memory is not measured")
    if name == "adafactor":  # torch's takes no sharded parameters
        parameters = [one for one in parameters if one.placements == (Replicate(),)]
    optimizer = NAMES[name](parameters, foreach=foreach)
    optimizer.step()
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)]
    locals_ = [parameter.to_local().detach() for parameter in parameters]
    predicted = [said.state_bytes(one.shape, local.shape, 4) for one, local in zip(parameters, locals_, strict=True)]
    assert sum(predicted) == sum(map(_bytes, state))
    tracker = Tracker()
    tracker.track([*parameters, *(one.grad for one in parameters), *state], "at rest")
    before = tracker.held
    with tracker:
        optimizer.step()
    largest = max(map(_bytes, parameters))
    assert tracker.peak.bytes - before == pytest.approx(
        said.step_bytes(list(map(_bytes, parameters))), abs=0.05 * largest
    )


def test_torch_chooses_foreach_for_dtensors_where_it_has_it() -> None:
    """`docs/memory.md` relies on it: DTensors are among the tensors for which torch chooses `foreach`."""
    assert DTensor in _foreach_supported_types


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_take_dtensors_and_make_no_temporaries(kind: type[torch.optim.Optimizer]) -> None:
    """Strided and uneven shards among them. (Of SGD and Adagrad torch 2.13 has no fused form for `DTensor`s.)"""
    specs = {(48, 8): "S(0,f=3)", (7, 3): "S(0)", (5, 6): "S(1)", (4,): "R"}
    with first_rank({"x": 2}) as mesh:
        starts = {shape: (torch.rand(shape), torch.rand(shape)) for shape in specs}
        results = []
        for fused in (False, True):
            made = []
            for shape, spec in specs.items():
                value, gradient = (distribute(one, mesh, Spec.parse(spec)) for one in starts[shape])
                made.append(torch.nn.Parameter(value))
                made[-1].grad = gradient
            optimizer = kind(made, fused=fused)
            optimizer.step()
            tracker = Tracker()
            state = [value for of in optimizer.state.values() for value in of.values()]
            tracker.track([*made, *(one.grad for one in made), *state], "at rest")
            before = tracker.held
            with tracker:
                optimizer.step()
            results.append([one.to_local().detach() for one in made])
    assert tracker.peak.bytes == before
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


def test_what_an_optimizer_is_called() -> None:
    assert optimizer_memory(torch.optim.AdamW, None, foreach=True) == optimizer_memory("AdamW", None, foreach=True)
    assert optimizer_memory(None, None, foreach=True).name == "adamw"
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    assert optimizer_memory(made, None, foreach=True).name == "sgd"
    made.param_groups[0]["momentum"] = 0.9
    assert optimizer_memory(made, None, foreach=True).name == "momentum"
    own = optimizer_memory(None, 6.0, foreach=True)
    assert own.state_bytes((8, 4), (4, 4), 4) == 96
    assert own.step_bytes([64, 32]) == 96
    assert optimizer_memory(None, 6.0, foreach=False).step_bytes([64, 32]) == 128  # two at once
    assert optimizer_memory(None, 6.0, foreach=False).step_bytes([32, 64]) == 160  # and one of the parameter before
    assert OptimizerMemory().step_bytes([]) == 0


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(PlanError, match=r"optimizer='lamb' is not known: choose one of adam, .*bytes_per_element"):
        optimizer_memory("lamb", None, foreach=True)
    with pytest.raises(PlanError, match="optimizer=3 is not known"):
        optimizer_memory(3, None, foreach=True)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="give one of them"):
        optimizer_memory("sgd", 4.0, foreach=True)
    with pytest.raises(PlanError, match="=-1: it is what"):
        optimizer_memory(None, -1, foreach=True)
