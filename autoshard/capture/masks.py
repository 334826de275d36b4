"""Masks of attention that come from positions alone are evaluated while capturing, and said by a flag if they can be.

Models write a causal mask, or one of a window, as comparisons of positions, which take the memory of all scores and
keep attention from its fast kernels. What no input decides has its numbers here. A mask that hides nothing is left
out; one that hides later keys alone, all of them or all but a window, becomes `is_causal` and `window`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from autoshard.capture._torch import OpOverload, pytree
from autoshard.capture.attention_operator import attention, attention_with_dropout
from autoshard.capture.position_forms import Meaning, meaning_at_all_sizes
from autoshard.capture.simplify import is_random

aten = torch.ops.aten

_SMALL = 1 << 22
"""Elements up to which a tensor is held as it is; larger ones are computed rows at a time."""

_MOST = 1 << 30
"""Elements up to which a mask is looked at: a second or two of comparisons for a sequence of 32,768."""

_ELEMENTWISE = frozenset(
    {
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten._to_copy.default,
        aten.__and__.Tensor,
        aten.__or__.Tensor,
        aten.__xor__.Tensor,
    }
)
"""Element-wise operators that torch does not mark so."""

_VIEWS = frozenset({aten.unsqueeze.default, aten.slice.Tensor})

_FILLED = frozenset(
    {
        aten.ones.default,
        aten.zeros.default,
        aten.full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.new_full.default,
    }
)
"""Operators that make a tensor of one number."""

_TRIANGLES = frozenset({aten.tril.default, aten.triu.default})
_BROADCASTS = frozenset({aten.expand.default, aten.clone.default, aten.contiguous.default, aten.alias.default})


def replace_position_masks(graph: fx.Graph, constants: Mapping[fx.Node, Tensor]) -> None:
    """Say by flags what the masks of attention say that no input decides.

    Args:
        graph: an exported graph; where sizes are symbols, flags have to say it at all of them.
        constants: placeholders that stand for tensors with known numbers.
    """
    changed = _changed_in_place(graph)
    evaluation = _MaskEvaluation({node: value for node, value in constants.items() if node not in changed}, changed)
    meanings: dict[fx.Node, Meaning | None] = {}
    calls = [graph.find_nodes(op="call_function", target=target) for target in (attention, attention_with_dropout)]
    for node in itertools.chain(*calls):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in meanings:
            meanings[mask] = _meaning(mask, node, evaluation)
        meaning = meanings[mask]
        if meaning is not None:
            kept = {name: value for name, value in node.kwargs.items() if name not in ("attn_mask", "is_causal")}
            if len(node.args) > 4:
                kept["dropout_p"] = node.args[4]
            node.args = node.args[:3]
            node.kwargs = kept | {"is_causal": meaning.causal, "window": meaning.window}
            _erase_unused(mask)


def _changed_in_place(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes whose memory some operator writes to: they do not keep the numbers that they were made with."""
    base: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        base[node] = node
        if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
            continue
        schema = node.target._schema
        if any(result.alias_info is not None for result in schema.returns):
            base[node] = base[node.all_input_nodes[0]]
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
                written.add(base[value])
    return frozenset(node for node, own in base.items() if own in written)


def _erase_unused(node: fx.Node) -> None:
    """Erase a node that nothing reads any more, and what was computed for it alone."""
    stack = {node: None}
    while stack:
        latest, _ = stack.popitem()
        if latest.op == "call_function" and not latest.users:
            stack |= dict.fromkeys(latest.all_input_nodes)
            latest.graph.erase_node(latest)


def _meaning(mask: fx.Node, call: fx.Node, evaluation: _MaskEvaluation) -> Meaning | None:
    operands: Any = call.args
    query, key = (operand.meta["val"].shape[-2] for operand in operands[:2])
    shape = mask.meta["val"].shape
    if len(shape) < 2 or list(map(str, shape[-2:])) != [str(query), str(key)]:
        return None
    if not all(isinstance(size, int) for size in (*shape, query, key)):
        square = str(query) == str(key)  # of symbols, == would ask for their values
        return meaning_at_all_sizes(mask, evaluation.constants, evaluation.changed) if square else None
    if query * key > _MOST:
        return None
    try:
        value = evaluation.of(mask)
        window = int(_kept_scores(value.rows(query - 1, query), 1, key)[0].sum())
        none, causal = Meaning(False), Meaning(True, 0 if window == key else window)
        candidates = [none] if query != key else [none, causal]
        for first in range(0, query, step := max(1, _SMALL // key)):
            end = min(first + step, query)
            found = _kept_scores(value.rows(first, end), end - first, key)
            candidates = [one for one in candidates if _equals(found, one, first, end, key)]
            if not candidates:
                return None
    except _UnknownValueError:
        return None
    return candidates[0]


def _kept_scores(rows: Tensor, queries: int, keys: int) -> Tensor:
    """Which scores rows of a mask keep, `[samples and heads, queries, keys]`."""
    if rows.dtype != torch.bool:
        lowest = torch.finfo(rows.dtype).min
        if not ((rows == 0) | (rows <= lowest)).all():
            raise _UnknownValueError
        rows = rows == 0
    return rows.expand(*rows.shape[:-2], queries, keys).reshape(-1, queries, keys)


def _equals(found: Tensor, meaning: Meaning, first: int, end: int, keys: int) -> bool:
    if not meaning.causal:
        return bool(found.all())
    position, others = torch.arange(first, end).unsqueeze(1), torch.arange(keys)
    expected = others <= position
    if meaning.window:
        expected &= others > position - meaning.window
    return bool((found == expected).all())


class _UnknownValueError(Exception):
    """A value hangs on an input, or on an operator that is not computed here."""


@dataclass(frozen=True, slots=True)
class _KnownTensor:
    """A tensor with its numbers; dims along which it repeats itself have size one."""

    value: Tensor

    def rows(self, first: int, end: int) -> Tensor:
        """Stretch of the last but one dim, which may be of size one for all."""
        value = self.value
        return value[..., first:end, :] if value.dim() > 1 and value.shape[-2] > 1 else value


@dataclass(frozen=True, slots=True)
class _Computed:
    """An element-wise operator on other values, computed where it is asked for."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def rows(self, first: int, end: int) -> Tensor:
        """Stretch of the last but one dim."""
        args = [each.rows(first, end) if isinstance(each, _Value) else each for each in self.args]
        result: Tensor = self.op(*args, **self.kwargs)
        return result


@dataclass(frozen=True, slots=True)
class _Triangle:
    """What a triangle leaves of another value of `columns` columns, computed where it is asked for."""

    op: OpOverload
    value: Any
    diagonal: int
    columns: int

    def rows(self, first: int, end: int) -> Tensor:
        """Stretch of the last but one dim."""
        rows = self.value.rows(first, end)
        whole = rows.expand(*rows.shape[:-2], end - first, self.columns)
        result: Tensor = self.op(whole, self.diagonal + first)
        return result


_Value = _KnownTensor | _Computed | _Triangle


class _MaskEvaluation:
    """The numbers of nodes that no input decides."""

    def __init__(self, constants: Mapping[fx.Node, Tensor], changed: frozenset[fx.Node]) -> None:
        self.constants, self.changed = constants, changed
        self._values: dict[fx.Node, _Value] = {node: _KnownTensor(value) for node, value in constants.items()}

    def of(self, node: fx.Node) -> _Value:
        """The value of a node, or `_UnknownError`."""
        for each in _unevaluated_nodes(node, self._values):
            self._values[each] = self._value(each)
        return self._values[node]

    def _value(self, node: fx.Node) -> _Value:
        if node in self.changed:
            raise _UnknownValueError
        op: Any = node.target
        val, known = node.meta.get("val"), cast(Any, self._values.__getitem__)
        if not isinstance(op, OpOverload) or not isinstance(val, Tensor) or is_random(node) or op._schema.is_mutable:
            raise _UnknownValueError
        args: Any = fx.node.map_arg(node.args, known)
        kwargs: Any = fx.node.map_arg(node.kwargs, known)
        if math.prod(val.shape) <= _SMALL:
            return _KnownTensor(op(*_numbers(args), **_numbers(kwargs)))
        if op in _BROADCASTS or (op in _VIEWS and _adds_no_rows(node)):
            return _Computed(aten.alias.default, (_collapse_repeats(args[0]),), {})
        if op in _FILLED:
            shape = next(place for place, argument in enumerate(op._schema.arguments) if argument.name == "size")
            one = op(*_numbers(args[:shape]), [1] * len(val.shape), *args[shape + 1 :], **_numbers(kwargs))
            return _Computed(aten.alias.default, (_KnownTensor(one),), {})
        if op in _TRIANGLES:
            return _Triangle(op, _collapse_repeats(args[0]), args[1] if len(args) > 1 else 0, val.shape[-1])
        elementwise = torch.Tag.pointwise in op.tags or op in _ELEMENTWISE
        if not elementwise or len(val.shape) < 2:
            raise _UnknownValueError
        return _Computed(op, tuple(map(_collapse_repeats, args)), dict(kwargs))


def _adds_no_rows(node: fx.Node) -> bool:
    """Whether a view leaves the last two dims of its operand, and has at most others of size one."""
    source, shape = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    return source[-2:] == shape[-2:] and math.prod(source) == math.prod(shape)


def _unevaluated_nodes(node: fx.Node, known: Mapping[fx.Node, Any]) -> Iterator[fx.Node]:
    """What the node is made of and is not known yet, operands first; `_UnknownError` where that is an input."""
    order: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        latest = stack[-1]
        missing = [each for each in latest.all_input_nodes if each not in known and each not in order]
        if latest in known or latest in order or not missing:
            stack.pop()
            if latest not in known:
                order[latest] = None
            continue
        if any(each.op != "call_function" for each in missing):
            raise _UnknownValueError
        stack += missing
    return iter(order)


def _numbers(arguments: Any) -> Any:
    def number(value: Any) -> Any:
        if isinstance(value, (_Computed, _Triangle)):
            raise _UnknownValueError
        return value.value if isinstance(value, _KnownTensor) else value

    return pytree.tree_map(number, arguments)


def _collapse_repeats(value: Any) -> Any:
    """The value with size one in every dim along which it repeats itself."""
    if not isinstance(value, _KnownTensor):
        return value
    tensor = value.value
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1)
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return _KnownTensor(tensor)
