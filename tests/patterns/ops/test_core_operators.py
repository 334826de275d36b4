"""Which operators have a rule: all that torch calls pointwise, checked one by one, and the core set but for a few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from autoshard.patterns.registry import call_of, has_rule, rule_for
from autoshard.patterns.soundness import check
from tests.patterns.ops.soundness import normal

FLOATS = (normal(4, 6).abs() + 0.1, normal(6).abs() + 0.2, normal(4, 1).abs() + 0.3)
INTEGERS = tuple((tensor * 4).to(torch.int64) + 1 for tensor in FLOATS)
TRUTHS = tuple(tensor > 0.8 for tensor in FLOATS)
COMPLEX = tuple(torch.complex(tensor, tensor + 1) for tensor in FLOATS)


def operators(tag: torch.Tag) -> list[OpOverload]:
    """Return the functional ATen operators with a tag, sorted by name."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        writes = op._schema.is_mutable or overload.endswith("out")
        if tag in op.tags and not writes and "Dimname" not in str(op._schema):
            found.append(op)
    return found


NOT_POINTWISE = {
    "aten.equal.default": "its result is a truth value of the program, not a tensor",
    "aten.rrelu.default": "it draws at random, and is replaced by others before a graph is captured",
}
POINTWISE = [op for op in operators(torch.Tag.pointwise) if str(op) not in NOT_POINTWISE]


def _values(argument: Any, tensors: Iterator[torch.Tensor], number: Any) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return next(tensors)
    if kind in ("number", "float", "int", "Optional[number]", "Optional[float]", "Optional[int]"):
        return number
    return {"bool": False, "str": "none", "Optional[bool]": None, "Optional[str]": None}[kind]


def _calls(op: OpOverload) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments that the operator may take: of several dtypes, first the shapes that broadcast, then equal ones."""
    for tensors, number in itertools.product((FLOATS, INTEGERS, TRUTHS, COMPLEX), (2, 0.5, 1, True)):
        for source in (tensors, (tensors[0],) * 4):
            operands = itertools.cycle(source)
            args, kwargs = [], {}
            for argument in op._schema.arguments:
                if argument.has_default_value() and argument.name != "min":  # a clamp needs a bound
                    continue
                value = _values(argument, operands, number)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            yield args, kwargs


def _sample(op: OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """The first arguments that the operator takes, and of which it makes numbers."""
    for args, kwargs in _calls(op):
        try:
            results = op(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            continue
        results = results if isinstance(results, (tuple, list)) else (results,)
        if all(isinstance(result, torch.Tensor) for result in results):
            return args, kwargs
    raise AssertionError(f"{op} takes none of the arguments tried: {op._schema}")


@pytest.mark.parametrize("op", POINTWISE, ids=str)
def test_every_pointwise_operator_has_a_sound_rule_that_shards_every_dim(op: OpOverload) -> None:
    args, kwargs = _sample(op)
    call = call_of(op, args, kwargs, op(*args, **kwargs))
    rule = rule_for(call)
    assert rule is not None
    assert sorted(factor.size for factor in rule.factors if factor.shardable) == [4, 6]
    assert check(op, args, kwargs, sizes=(2,)) == []


WITHOUT_RULE = {
    "aten._local_scalar_dense.default": "its result is a number",
    "aten._pdist_forward.default": "every pair of points is needed, and their places in the result follow no dims",
    "aten.adaptive_avg_pool1d.default": "it is replaced by its twin in two dims before a graph is captured",
    "aten.avg_pool1d.default": "it is replaced by its twin in two dims before a graph is captured",
    "aten.nonzero.default": "the size of its result depends on values",
    "aten.sym_is_contiguous.default": "its result is no tensor",
    "aten.sym_numel.default": "its result is no tensor",
    "aten.sym_size.int": "its result is no tensor",
    "aten.sym_storage_offset.default": "its result is no tensor",
    "aten.sym_stride.int": "its result is no tensor",
}


def test_core_operators_have_rules() -> None:
    unknown = {str(op) for op in operators(torch.Tag.core) if not has_rule(op)}
    assert unknown - set(WITHOUT_RULE) == set()
