"""What torch's registry of sharding strategies answers, about one axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from autoshard.patterns.registry import call_of
from autoshard.patterns.torch_registry import TorchStrategy, is_registered, torch_strategies

aten = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(6, 8)


def _strategies(op: Any, *args: Any) -> tuple[TorchStrategy, ...]:
    return torch_strategies(call_of(op, args, {}, op(*args)))


def test_a_product_of_matrices() -> None:
    found = {(each.operands, each.results) for each in _strategies(aten.mm.default, X, Y)}
    assert ((Shard(0), Replicate()), (Shard(0),)) in found
    assert ((Shard(1), Shard(0)), (Partial(),)) in found
    assert ((Shard(0), Shard(0)), (Partial(),)) not in found


def test_a_function_that_is_asked_about_every_placement_of_its_operand() -> None:
    found = {(each.operands, each.results) for each in _strategies(aten.linalg__powsum.default, X, 2.0, [1])}
    assert {((Shard(0),), (Shard(0),)), ((Shard(1),), (Partial(),))} <= found


def test_operands_in_lists_stand_in_order() -> None:
    found = {(each.operands, each.results) for each in _strategies(aten.cat.default, [X, X + 1], 0)}
    assert ((Shard(1), Shard(1)), (Shard(1),)) in found


def test_nothing_is_known_of_most_custom_operators() -> None:
    with torch.library._scoped_library("autoshard_test_torch_registry", "DEF") as library:
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: (x / 2, x / 2), "CPU")
        op = torch.ops.autoshard_test_torch_registry.halves.default
        assert not is_registered(op)
        assert _strategies(op, X) == ()
        register_sharding(op)(lambda x: [([Shard(0), Partial()], [Shard(0)])])
        assert is_registered(op)
        assert _strategies(op, X) == (TorchStrategy((Shard(0),), (Shard(0), Partial())),)
        register_sharding(op)(lambda x: [([Shard(0), Partial()], [Shard(0), Shard(0)])])
        with pytest.raises(AssertionError):  # whatever torch says of it
            _strategies(op, X)


def test_it_is_asked_from_within_modes() -> None:
    call = call_of(aten.linalg__powsum.default, (X, 2.0, [1]), {}, X[0])
    expected = torch_strategies(call)
    with torch._subclasses.FakeTensorMode():
        assert torch_strategies(call) == expected
