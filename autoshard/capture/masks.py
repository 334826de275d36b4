"""Attention masks that depend on positions alone: evaluated during capture and replaced by flags of the operator.

Models write a causal mask, or a sliding window, as comparisons of positions. Such a mask takes the memory of all
scores and keeps attention from its fast kernels. A mask that hides nothing is dropped; a mask that hides later keys,
or all keys outside of a window as well, becomes `is_causal` and `window`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from autoshard.capture._torch import OpOverload, pytree
from autoshard.capture.attention_operator import attention, attention_with_dropout
from autoshard.capture.nodes import base_of, changed_memory, is_random
from autoshard.capture.position_forms import FACTORIES, Meaning, meaning_at_all_sizes

aten = torch.ops.aten

_SMALL = 1 << 22  # elements up to which a tensor is held whole; larger ones are computed some rows at a time
_MOST = 1 << 30  # elements up to which a mask is evaluated: 32,768 positions take a second or two

_ELEMENTWISE = frozenset(
    {
        *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.__and__.Tensor),
        *(aten.__or__.Tensor, aten.__xor__.Tensor),
    }
)
"""Element-wise operators without `torch.Tag.pointwise`."""

_VIEWS = frozenset({aten.unsqueeze.default, aten.slice.Tensor})
_TRIANGLES = frozenset({aten.tril.default, aten.triu.default})
_BROADCASTS = frozenset({aten.expand.default, aten.clone.default, aten.contiguous.default, aten.alias.default})


def replace_position_masks(graph: fx.Graph, constants: Mapping[fx.Node, Tensor]) -> None:
    """Replace attention masks that depend on no input by flags of the operator, where flags can express them.

    Args:
        graph: an exported graph; if sizes are symbols, a flag has to hold at all sizes.
        constants: placeholders of tensors with known numbers.
    """
    changed = _changed_in_place(graph)
    evaluation = _MaskEvaluation({node: value for node, value in constants.items() if node not in changed}, changed)
    meanings: dict[fx.Node, Meaning | None] = {}
    calls = [graph.find_nodes(op="call_function", target=target) for target in (attention, attention_with_dropout)]
    for node in itertools.chain(*calls):
        # The targets are functions: their arguments are those of the ATen operator.
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in meanings:
            meanings[mask] = _meaning(mask, node, evaluation)
        meaning = meanings[mask]
        if meaning is not None:
            options = {name: value for name, value in node.kwargs.items() if name not in ("attn_mask", "is_causal")}
            if len(node.args) > 4:
                options["dropout_p"] = node.args[4]
            node.args = node.args[:3]
            node.kwargs = options | {"is_causal": meaning.causal, "window": meaning.window}
            _erase_unused(mask)


def _changed_in_place(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose memory some operator writes to, views included."""
    written = {base for node in graph.nodes for base in changed_memory(node)}
    return frozenset(node for node in graph.nodes if base_of(node) in written)


def _erase_unused(node: fx.Node) -> None:
    """Erase a node without users, and its operands that have no other users."""
    stack = {node: None}
    while stack:
        latest, _ = stack.popitem()
        if latest.op == "call_function" and not latest.users:
            stack |= dict.fromkeys(latest.all_input_nodes)
            latest.graph.erase_node(latest)


def _meaning(mask: fx.Node, call: fx.Node, evaluation: _MaskEvaluation) -> Meaning | None:
    """Return the meaning of the mask of an attention call; None if flags cannot express it."""
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
        # The last query sees all keys of a causal mask, and exactly its window otherwise: there are two candidates.
        window = int(_kept_scores(_rows(value, query - 1, query), 1, key)[0].sum())
        unmasked, causal = Meaning(False), Meaning(True, 0 if window == key else window)
        candidates = [unmasked] if query != key else [unmasked, causal]
        for first in range(0, query, step := max(1, _SMALL // key)):
            end = min(first + step, query)
            kept = _kept_scores(_rows(value, first, end), end - first, key)
            candidates = [candidate for candidate in candidates if _equals(kept, candidate, first, end, key)]
            if not candidates:
                return None
    except _UnknownValueError:
        return None
    return candidates[0]


def _kept_scores(rows: Tensor, queries: int, keys: int) -> Tensor:
    """Return which scores the rows of a mask keep, `[samples and heads, queries, keys]`."""
    if rows.dtype != torch.bool:  # a mask that is added to the scores
        lowest = torch.finfo(rows.dtype).min
        if not ((rows == 0) | (rows <= lowest)).all():
            raise _UnknownValueError
        rows = rows == 0
    return rows.expand(*rows.shape[:-2], queries, keys).reshape(-1, queries, keys)


def _equals(kept: Tensor, meaning: Meaning, first: int, end: int, keys: int) -> bool:
    if not meaning.causal:
        return bool(kept.all())
    position, keys_row = torch.arange(first, end).unsqueeze(1), torch.arange(keys)
    expected = keys_row <= position
    if meaning.window:
        expected &= keys_row > position - meaning.window
    return bool((kept == expected).all())


class _UnknownValueError(Exception):
    """A value depends on an input, or on an operator that is not evaluated here."""


_Rows = Callable[[int, int], Tensor]
"""A value that is computed for a range of its last but one dim; dims of size one stand for repeats."""


def _rows(value: Any, first: int, end: int) -> Any:
    """Return a range of the last but one dim, which may be of size one for all rows; a plain argument as it is."""
    if not isinstance(value, Tensor):
        return value(first, end) if callable(value) else value
    return value[..., first:end, :] if value.dim() > 1 and value.shape[-2] > 1 else value


def _elementwise_rows(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Rows:
    return lambda first, end: op(*(_rows(value, first, end) for value in args), **kwargs)


def _triangle_rows(op: OpOverload, value: Any, diagonal: int, columns: int) -> _Rows:
    """Return the rows of `tril` or `triu` of a value with `columns` columns."""

    def compute(first: int, end: int) -> Tensor:
        rows = _rows(value, first, end)
        whole = rows.expand(*rows.shape[:-2], end - first, columns)
        triangle: Tensor = op(whole, diagonal + first)  # rows that begin later shift the diagonal
        return triangle

    return compute


class _MaskEvaluation:
    """The numbers of nodes that depend on no input: tensors that are held whole, or functions of a range of rows."""

    def __init__(self, constants: Mapping[fx.Node, Tensor], changed: frozenset[fx.Node]) -> None:
        self.constants, self.changed = constants, changed
        self._values: dict[fx.Node, Tensor | _Rows] = dict(constants)

    def of(self, node: fx.Node) -> Tensor | _Rows:
        """Return the value of a node, or raise `_UnknownValueError`."""
        for operand in _unevaluated_nodes(node, self._values):
            self._values[operand] = self._value(operand)
        return self._values[node]

    def _value(self, node: fx.Node) -> Tensor | _Rows:
        if node in self.changed:
            raise _UnknownValueError
        op: Any = node.target
        val, known = node.meta.get("val"), cast(Any, self._values.__getitem__)
        if not isinstance(op, OpOverload) or not isinstance(val, Tensor) or is_random(node) or op._schema.is_mutable:
            raise _UnknownValueError
        args: Any = fx.node.map_arg(node.args, known)
        kwargs: Any = fx.node.map_arg(node.kwargs, known)
        if math.prod(val.shape) <= _SMALL:
            return op(*_numbers(args), **_numbers(kwargs))
        if op in _BROADCASTS or (op in _VIEWS and _adds_no_rows(node)):
            # Broadcasting later has the same result.
            return partial(_rows, _collapse_repeats(args[0]))
        if op in FACTORIES:
            shape = [argument.name for argument in op._schema.arguments].index("size")
            element = op(*_numbers(args[:shape]), [1] * len(val.shape), *args[shape + 1 :], **_numbers(kwargs))
            return partial(_rows, element)
        if op in _TRIANGLES:
            return _triangle_rows(op, _collapse_repeats(args[0]), args[1] if len(args) > 1 else 0, val.shape[-1])
        elementwise = torch.Tag.pointwise in op.tags or op in _ELEMENTWISE
        if not elementwise or len(val.shape) < 2:
            raise _UnknownValueError
        return _elementwise_rows(op, tuple(map(_collapse_repeats, args)), kwargs)


def _adds_no_rows(node: fx.Node) -> bool:
    """Return True if a view keeps the last two dims of its operand, and adds or drops only dims of size one."""
    source, shape = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    return source[-2:] == shape[-2:] and math.prod(source) == math.prod(shape)


def _unevaluated_nodes(node: fx.Node, known: Mapping[fx.Node, Any]) -> Iterator[fx.Node]:
    """Yield the node and its operands without a value, operands first; raise `_UnknownValueError` at an input."""
    order: dict[fx.Node, None] = {}  # an explicit stack: chains of nodes may be longer than Python's recursion limit
    stack = [node]
    while stack:
        latest = stack[-1]
        missing = [operand for operand in latest.all_input_nodes if operand not in known and operand not in order]
        if latest in known or latest in order or not missing:
            stack.pop()
            if latest not in known:
                order[latest] = None
            continue
        if any(operand.op != "call_function" for operand in missing):
            raise _UnknownValueError
        stack += missing
    return iter(order)


def _numbers(arguments: Any) -> Any:
    """Return arguments whose tensors are all held whole, or raise `_UnknownValueError`."""

    def number(value: Any) -> Any:
        if callable(value):
            raise _UnknownValueError
        return value

    return pytree.tree_map(number, arguments)


def _collapse_repeats(value: Any) -> Any:
    """Return the value with size one in every dim along which it repeats itself."""
    if not isinstance(value, Tensor):
        return value
    tensor = value
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1)
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor
