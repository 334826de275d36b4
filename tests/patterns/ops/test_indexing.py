"""Rules of gathering and scattering against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.check import check
from autoshard.patterns.registry import call_of, rule_for

aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _index(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape)


UNIQUE = torch.stack([torch.randperm(6)[:4] for _ in range(4)])

CALLS = {
    "index_select": (aten.index_select.default, (_x(4, 6, 2), 1, _index(6, 12))),
    "index_select by one": (aten.index_select.default, (_x(4, 6), 0, torch.tensor(2))),
    "index_add": (aten.index_add.default, (_x(4, 6), 1, _index(6, 12), _x(4, 12))),
    "gather": (aten.gather.default, (_x(4, 6), 1, _index(6, 4, 12))),
    "gather of a part": (aten.gather.default, (_x(6, 6), 1, _index(6, 4, 12))),
    "scatter_add": (aten.scatter_add.default, (_x(4, 6), 1, _index(6, 4, 12), _x(4, 12))),
    "scatter_add of a part": (aten.scatter_add.default, (_x(4, 6), 1, _index(6, 4, 8), _x(4, 12))),
    "scatter": (aten.scatter.src, (_x(4, 6), 1, UNIQUE, _x(4, 4))),
    "scatter of a number": (aten.scatter.value, (_x(4, 6), 1, UNIQUE, 2.0)),
    "scatter of zero": (aten.scatter.value, (_x(4, 6), 1, UNIQUE, 0)),
    "index": (aten.index.Tensor, (_x(6, 4), [_index(6, 12)])),
    "index in the middle": (aten.index.Tensor, (_x(4, 6, 2), [None, _index(6, 12, 2)])),
    "index by two": (aten.index.Tensor, (_x(4, 6, 2), [_index(4, 12, 1), _index(6, 2)])),
    "index by two apart": (aten.index.Tensor, (_x(4, 6, 2), [_index(4, 12), None, _index(2, 12)])),
    "index_put": (aten.index_put.default, (_x(6, 4), [torch.tensor([1, 3, 0, 2])], _x(4, 4))),
    "index_put adding": (aten.index_put.default, (_x(6, 4), [_index(6, 12)], _x(12, 4), True)),
    "index_put adding rows": (aten.index_put.default, (_x(6, 4), [_index(6, 12)], _x(4), True)),
    "index_put adding by two": (
        aten.index_put.default,
        (_x(4, 6, 2), [_index(4, 12, 1), _index(6, 2)], _x(12, 2, 2), True),
    ),
    "one_hot": (aten.one_hot.default, (_index(6, 4, 12), 6)),
    "bucketize": (aten.bucketize.Tensor, (_x(4, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    assert check(op, args) == []


def test_indexing_by_a_mask_has_no_rule() -> None:
    x = _x(4, 6)
    assert rule_for(call_of(aten.index.Tensor, (x, [x > 0]), {}, x[x > 0])) is None


def test_elements_that_are_added_may_be_sharded() -> None:
    args = (_x(6, 4), [_index(6, 12)], _x(12, 4), True)
    rule = rule_for(call_of(aten.index_put.default, args, {}, torch.ops.aten.index_put(*args)))
    assert rule is not None
    assert rule.factors[rule.indices("index0")[0]].shardable
