"""Rules of views against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import Rule
from autoshard.patterns.soundness import check

aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _rule(op: Any, *args: Any) -> Rule:
    rule = rule_for(call_of(op, args, {}, op(*args)))
    assert rule is not None
    return rule


CALLS = {
    "view": (aten.view.default, (_x(4, 72), [4, 3, 4, 6])),
    "view of fused dims": (aten.view.default, (_x(4, 3, 4, 6), [12, -1])),
    "view that does not align": (aten.view.default, (_x(6, 4), [4, 6])),
    "view without elements": (aten.view.default, (_x(4, 0), [4, 0, 6])),
    "_unsafe_view": (aten._unsafe_view.default, (_x(24, 6), [4, 6, 6])),
    "reshape of a transpose": (aten.reshape.default, (_x(4, 6, 12).transpose(1, 2), [4, 12, 2, 3])),
    "squeeze": (aten.squeeze.dim, (_x(4, 1, 6), 1)),
    "squeeze of several": (aten.squeeze.dims, (_x(1, 12, 1, 2), [0, 1])),
    "squeeze of all": (aten.squeeze.default, (_x(1, 4, 1, 2),)),
    "unsqueeze": (aten.unsqueeze.default, (_x(4, 6), -1)),
    "expand": (aten.expand.default, (_x(4, 1, 6), [4, 12, -1])),
    "expand to more dims": (aten.expand.default, (_x(4, 1), [6, 4, 12])),
    "repeat": (aten.repeat.default, (_x(4, 6), [2, 1, 6])),
    "permute": (aten.permute.default, (_x(4, 6, 12), [2, 0, -2])),
    "transpose": (aten.transpose.int, (_x(4, 6, 12), 1, -1)),
    "t": (aten.t.default, (_x(4, 6),)),
    "t of a vector": (aten.t.default, (_x(4),)),
    "clone": (aten.clone.default, (_x(4, 6),)),
    "detach": (aten.detach.default, (_x(4, 6),)),
    "cast": (aten._to_copy.default, (_x(4, 6), torch.float32)),
    "view as other numbers": (aten.view.dtype, (_x(4, 6), torch.int64)),
    "view as more numbers": (aten.view.dtype, (_x(4, 6), torch.int32)),
    "roll": (aten.roll.default, (_x(4, 6), [1], [1])),
    "roll of all": (aten.roll.default, (_x(4, 6), [5])),
    "flip": (aten.flip.default, (_x(4, 6), [0])),
    "rot90": (aten.rot90.default, (_x(12, 4, 6), 1, [0, 2])),
    "rot90 upside down": (aten.rot90.default, (_x(12, 4, 6), 2, [0, -1])),
    "view_as_complex": (aten.view_as_complex.default, (_x(12, 2),)),
    "view_as_real": (aten.view_as_real.default, (torch.view_as_complex(_x(12, 2)),)),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    kwargs = {"dtype": args[-1]} if op == aten._to_copy.default else {}
    assert check(op, args[:1] if kwargs else args, kwargs) == []


def test_view_of_a_fused_projection_makes_heads_a_factor() -> None:
    rule = _rule(aten.view.default, _x(4, 72), [4, 3, 4, 6])
    assert [factor.size for factor in rule.factors] == [4, 3, 4, 6]
    assert rule.operands == (((0,), (1, 2, 3)),)
    assert rule.free


def test_expand_makes_a_factor_that_only_the_result_has() -> None:
    rule = _rule(aten.expand.default, _x(4, 1, 6), [4, 12, 6])
    new = rule.indices("new1")
    assert rule.results == (((rule.indices("d0")[0],), new, (rule.indices("d2")[0],)),)
    assert rule.operands[0][1] == ()


def test_cast_to_integers_is_not_linear() -> None:
    x = _x(4)
    call = call_of(aten._to_copy.default, (x,), {"dtype": torch.int64}, x.long())
    rule = rule_for(call)
    assert rule is not None
    assert rule.linear == ()
