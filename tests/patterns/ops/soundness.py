"""What tests of rules share: the rule of a call on real tensors, and the check of it against the operator."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.soundness import check

aten = torch.ops.aten
SIZES = (3, 4)
"""Of meshes of one axis. The mesh of two axes, which is checked besides, has all strategies of an axis of two."""


def normal(*shape: int) -> torch.Tensor:
    """Normally distributed numbers in float64; the same each time for one shape."""
    generator = torch.Generator().manual_seed(len(shape) + 7 * sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def bound(op: Any, *args: Any, **kwargs: Any) -> tuple[OpCall, Rule]:
    """The call and its rule."""
    call = call_of(op, args, kwargs, op(*args, **kwargs))
    rule = rule_for(call)
    assert rule is not None, call
    return call, rule


def assert_sound(op: Any, *args: Any, shards: str | None = None, **kwargs: Any) -> None:
    """Every strategy of the rule computes what the operator does; it may shard exactly the factors in `shards`."""
    if shards is not None:
        _, rule = bound(op, *args, **kwargs)
        assert sorted(factor.name for factor in rule.factors if factor.shardable) == sorted(shards.split())
    findings = check(op, args, kwargs, sizes=SIZES)
    assert not findings, "\n".join(map(str, findings[:5]))
