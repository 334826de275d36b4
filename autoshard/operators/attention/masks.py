"""Attention masks that depend only on positions: evaluated during capture and replaced by flags of the operator.

Models write a causal mask, or a sliding window, as comparisons of positions. Such a mask takes the memory of all
scores and prevents fast attention kernels. A mask that hides nothing is dropped; a mask that hides later keys, or all
keys outside of a window, too, becomes `is_causal` and `window`.

A mask of fixed sizes is evaluated. With dynamic sizes, it is interpreted as linear inequalities of positions, which
hold at all sizes: an integer tensor is represented by a linear expression of its own indices, such as `arange`; a
boolean tensor by expressions that all have to be at most zero. The rule of each operator is exact for tensors of every
size; without a rule, the mask is not changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch import Tensor, fx

from autoshard.capture.nodes import argument_of, base_of, changed_memory, is_random, operands_first
from autoshard.operators._torch import OpOverload, pytree
from autoshard.operators.attention.attention_operator import attention, attention_with_dropout

aten = torch.ops.aten

FACTORIES = frozenset(
    {
        *(aten.ones.default, aten.zeros.default, aten.full.default, aten.new_ones.default, aten.new_zeros.default),
        aten.new_full.default,
    }
)
"""Operators that make a constant tensor."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a mask: True if later keys are hidden, and the size of the window of visible keys (0: none)."""

    causal: bool
    window: int = 0


class _NotLinearError(Exception):
    """A value is not known to be a linear form of positions."""


@dataclass(frozen=True, slots=True)
class _Truth:
    """Booleans: True where all `forms` are at most zero; nowhere if `never`."""

    forms: frozenset[sympy.Expr] = frozenset()
    never: bool = False


_Form: TypeAlias = sympy.Expr | _Truth


def _index(place: int) -> sympy.Symbol:
    """Return the symbol of an index; dims count from the end, from 1 on, so that broadcasting does not change them."""
    return sympy.Symbol(f"index_{place}", integer=True)


_KEY, _QUERY = _index(1), _index(2)


def meaning_at_all_sizes(
    mask: fx.Node, constants: Mapping[fx.Node, Tensor], changed: Collection[fx.Node]
) -> Meaning | None:
    """Return the meaning of a square mask `[..., queries, keys]` at every size; None if unknown.

    Args:
        mask: a node of an exported graph, whose sizes may be symbols.
        constants: placeholders of tensors with known values.
        changed: nodes that are changed in place, whose values are unknown.
    """
    try:
        truth = _Forms(constants, changed).of(mask)
    except _NotLinearError:
        return None
    if not isinstance(truth, _Truth) or truth.never:
        return None
    # Indices are non-negative: a form without positive terms holds everywhere.
    restrictions = {form for form in truth.forms if max(form.as_coefficients_dict().values()) > 0}
    if not restrictions:
        return Meaning(False)
    windows = []
    for form in restrictions - {_KEY - _QUERY}:  # key - query <= 0 hides later keys
        distance = form - (_QUERY - _KEY)  # query - key - window + 1 <= 0 hides keys before the window
        if distance.free_symbols or distance >= 0:
            return None
        windows.append(1 - int(distance))
    return Meaning(True, min(windows, default=0)) if _KEY - _QUERY in restrictions else None


class _Forms:
    """The linear forms of nodes."""

    def __init__(self, constants: Mapping[fx.Node, Tensor], changed: Collection[fx.Node]) -> None:
        self._constants, self._changed = constants, changed
        self._known: dict[fx.Node, _Form] = {}

    def of(self, node: fx.Node) -> _Form:
        """Return the form of a node, or raise `_NotLinearError`."""
        if node not in self._known:
            form, sizes = self._form(node), reversed(node.meta["val"].shape)
            # The index of a dim of size 1 is always 0.
            zeros = {_index(place): 0 for place, size in enumerate(sizes, 1) if isinstance(size, int) and size == 1}
            self._known[node] = _substitute(form, zeros)
        return self._known[node]

    def _form(self, node: fx.Node) -> _Form:
        value, op = node.meta.get("val"), node.target
        if (
            node in self._changed
            or not isinstance(value, Tensor)
            or value.dtype not in (torch.bool, torch.int32, torch.int64)
        ):
            raise _NotLinearError
        if node in self._constants and self._constants[node].numel() == 1:
            return _constant_form(value, self._constants[node].item())
        rule = _RULES.get(op) if isinstance(op, OpOverload) else None
        if rule is None:
            raise _NotLinearError
        form = rule(self, node)
        if isinstance(form, _Truth) != (value.dtype == torch.bool):
            raise _NotLinearError
        return form

    def linear(self, value: object) -> sympy.Expr:
        """Return the form of an operand that is a tensor of integers, or a number."""
        if isinstance(value, int) and not isinstance(value, bool):
            return sympy.Integer(value)
        form = self.of(value) if isinstance(value, fx.Node) else None
        if not isinstance(form, sympy.Expr):
            raise _NotLinearError
        return form

    def truth(self, value: object) -> _Truth:
        """Return the form of an operand that is a tensor of booleans."""
        form = self.of(value) if isinstance(value, fx.Node) else None
        if not isinstance(form, _Truth):
            raise _NotLinearError
        return form


def _substitute(form: _Form, values: Mapping[sympy.Symbol, Any]) -> _Form:
    """Substitute values for indices simultaneously."""
    if isinstance(form, _Truth):
        return _Truth(frozenset(sympy.expand(each.xreplace(values)) for each in form.forms), form.never)
    return sympy.expand(form.xreplace(values))


def _number(value: object) -> int:
    """Return an argument that is an integer in the graph, not a symbol."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _NotLinearError
    return value


def _constant(form: sympy.Expr) -> int:
    """Return the value of all elements; raise `_NotLinearError` if they differ."""
    if form.free_symbols:
        raise _NotLinearError
    return int(form)


def _constant_form(value: Tensor, number: object) -> _Form:
    if value.dtype == torch.bool:
        return _Truth(never=not number)
    return sympy.Integer(int(number))  # type: ignore[call-overload]


def _arange(forms: _Forms, node: fx.Node) -> _Form:
    # The only dim is the last one, whose index is that of keys in a mask.
    return _number(argument_of(node, "start", 0)) + _number(argument_of(node, "step", 1)) * _KEY


def _identity(forms: _Forms, node: fx.Node) -> _Form:
    return forms.of(node.all_input_nodes[0])


def _fill(forms: _Forms, node: fx.Node) -> _Form:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    number = 1 if "ones" in name else 0 if "zeros" in name else argument_of(node, "fill_value")
    if not isinstance(number, int):
        raise _NotLinearError
    return _constant_form(node.meta["val"], number)


def _sum(sign: int) -> Callable[[_Forms, fx.Node], _Form]:
    def form(forms: _Forms, node: fx.Node) -> _Form:
        times = sign * _number(node.kwargs.get("alpha", 1))
        return forms.linear(node.args[0]) + times * forms.linear(node.args[1])

    return form


def _unsqueeze(forms: _Forms, node: fx.Node) -> _Form:
    ndim = node.meta["val"].dim()
    new = ndim - _number(node.args[1]) % ndim
    shifted = {_index(place): _index(place + 1) for place in range(new, ndim)}
    return _substitute(forms.of(node.all_input_nodes[0]), shifted)


def _slice(forms: _Forms, node: fx.Node) -> _Form:
    ndim = node.meta["val"].dim()
    index = _index(ndim - _number(argument_of(node, "dim", 0)) % ndim)
    # A negative start counts from an end that depends on the size.
    start = _number(argument_of(node, "start") or 0)
    if start < 0 or _number(argument_of(node, "step", 1)) != 1:
        raise _NotLinearError
    return _substitute(forms.of(node.all_input_nodes[0]), {index: index + start})


def _select(forms: _Forms, node: fx.Node) -> _Form:
    ndim = node.meta["val"].dim() + 1
    gone, index = ndim - _number(node.args[1]) % ndim, _number(node.args[2])
    if index < 0:
        raise _NotLinearError
    # Dims count from the end: those before the removed one move by one.
    shifted = {_index(place): _index(place - 1) for place in range(gone + 1, ndim + 1)}
    return _substitute(forms.of(node.all_input_nodes[0]), {**shifted, _index(gone): sympy.Integer(index)})


def _differences(forms: _Forms, node: fx.Node) -> _Form:
    """Return the form of `diff` with one prepended element: a constant if that element continues the sequence.

    Models use it to find the starts of packed samples: positions of a single sample have differences of 1 everywhere.
    """
    source, before = forms.linear(node.args[0]), forms.linear(argument_of(node, "prepend"))
    dim, ndim = _number(argument_of(node, "dim", -1)), node.meta["val"].dim()
    index = _index(ndim - dim % ndim)
    step = source.coeff(index)
    single = argument_of(node, "prepend").meta["val"].shape[dim]
    if _number(argument_of(node, "n", 1)) != 1 or argument_of(node, "append") is not None or str(single) != "1":
        raise _NotLinearError
    if _constant(source - step * index - before) != step:
        raise _NotLinearError
    return step


def _running_sum(forms: _Forms, node: fx.Node) -> _Form:
    """Return the form of `cumsum` of zeros, which is zero at all sizes."""
    form = forms.of(node.all_input_nodes[0])
    if not (form.never if isinstance(form, _Truth) else _constant(form) == 0):
        raise _NotLinearError
    return sympy.Integer(0)


def _read_at(forms: _Forms, node: fx.Node) -> _Form:
    """Return the form of indexing all dims by positions: the composition of linear forms."""
    source, places = forms.linear(node.args[0]), node.args[1]
    assert isinstance(places, Sequence)
    indices = [forms.linear(place) for place in places]
    # A negative index would count from the end, at a position that depends on the size.
    terms = [number for index in indices for number in index.as_coefficients_dict().values()]
    if len(indices) != node.args[0].meta["val"].dim() or min(terms) < 0:  # type: ignore[union-attr]
        raise _NotLinearError
    return _substitute(source, {_index(place): index for place, index in enumerate(reversed(indices), 1)})


def _comparison(sign: int, margin: int) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of a comparison that is True where `sign` times the difference plus `margin` is at most 0."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        difference = forms.linear(node.args[0]) - forms.linear(node.args[1])
        # For integers, a < b is a - b + 1 <= 0: the margin of strict comparisons.
        signed = sympy.expand(margin + sign * difference)
        return _Truth(frozenset([signed])) if signed.free_symbols else _Truth(never=int(signed) > 0)

    return form


def _equal(expected: bool) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of `eq` or `ne` for tensors with a constant difference."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        difference = _constant(forms.linear(node.args[0]) - forms.linear(node.args[1]))
        return _Truth(never=(difference == 0) != expected)

    return form


def _logical_and(forms: _Forms, node: fx.Node) -> _Form:
    left, right = map(forms.truth, node.args)
    return _Truth(left.forms | right.forms, left.never or right.never)


def _triangle(sign: int) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of a triangle of booleans; `sign` is 1 for the lower one."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        truth, diagonal = forms.truth(node.args[0]), _number(argument_of(node, "diagonal", 0))
        # `tril` keeps key - query <= diagonal, `triu` query - key <= -diagonal; all others become False.
        inside = sympy.expand(sign * (_KEY - _QUERY - diagonal))
        return _Truth(truth.forms | {inside}, truth.never)

    return form


# The rule of each operator computes the form of its result from those of its operands.
_RULES: dict[Any, Callable[[_Forms, fx.Node], _Form]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys(
        (
            *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.alias.default),
            *(aten.clone.default, aten.contiguous.default, aten.expand.default),
        ),
        _identity,
    ),
    **dict.fromkeys(FACTORIES, _fill),
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diff.default: _differences,
    aten.cumsum.default: _running_sum,
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
    aten.index.Tensor: _read_at,
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _comparison(1, 0)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _comparison(1, 1)),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _comparison(-1, 0)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _comparison(-1, 1)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equal(True)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _equal(False)),
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _logical_and),
}


_SMALL = 1 << 22  # elements up to which a tensor is computed whole; larger ones by blocks of rows
_MOST = 1 << 30  # elements up to which a mask is evaluated: 32,768 positions take a second or two

# Element-wise operators without `torch.Tag.pointwise`.
_ELEMENTWISE = frozenset(
    {
        *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.__and__.Tensor),
        *(aten.__or__.Tensor, aten.__xor__.Tensor),
    }
)

_VIEWS = frozenset({aten.unsqueeze.default, aten.slice.Tensor})
_TRIANGLES = frozenset({aten.tril.default, aten.triu.default})
_BROADCASTS = frozenset({aten.expand.default, aten.clone.default, aten.contiguous.default, aten.alias.default})


def replace_position_masks(graph: fx.Graph, constants: Mapping[fx.Node, Tensor]) -> None:
    """Replace attention masks that depend on no input by flags of the operator, where flags can express them.

    Args:
        graph: an exported graph; if sizes are symbols, a flag has to hold at all sizes.
        constants: placeholders of tensors with known values.
    """
    changed = _changed_in_place(graph)
    # One evaluation for all calls, since layers share a mask, or what it is computed from.
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
    """Return the nodes whose memory some operator writes to, including views."""
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
        # The last query sees all keys of a causal mask, or exactly its window: there are two candidates.
        window = int(_kept_scores(_rows(value, query - 1, query), 1, key)[0].sum())
        unmasked, causal = Meaning(False), Meaning(True, 0 if window == key else window)
        candidates = [unmasked] if query != key else [unmasked, causal]
        # By blocks of rows: a mask of all scores may not fit into memory.
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
        # Models hide a score by -inf, or by the lowest number. Any other number is a bias.
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


# A value that is computed for a range of its second-to-last dim; dims of size 1 are broadcast.
_Rows = Callable[[int, int], Tensor]


def _rows(value: Any, first: int, end: int) -> Any:
    """Return a range of the second-to-last dim, which may be of size 1 for all rows; other arguments unchanged."""
    if not isinstance(value, Tensor):
        return value(first, end) if callable(value) else value
    return value[..., first:end, :] if value.dim() > 1 and value.shape[-2] > 1 else value


def _triangle_rows(op: OpOverload, value: Any, diagonal: int, columns: int) -> _Rows:
    """Return the rows of `tril` or `triu` of a value with `columns` columns."""

    def compute(first: int, end: int) -> Tensor:
        rows = _rows(value, first, end)
        whole = rows.expand(*rows.shape[:-2], end - first, columns)
        triangle: Tensor = op(whole, diagonal + first)  # later rows shift the diagonal
        return triangle

    return compute


class _MaskEvaluation:
    """The values of nodes that depend on no input: tensors, or functions of a range of rows."""

    def __init__(self, constants: Mapping[fx.Node, Tensor], changed: frozenset[fx.Node]) -> None:
        self.constants, self.changed = constants, changed
        self._values: dict[fx.Node, Tensor | _Rows] = dict(constants)

    def of(self, node: fx.Node) -> Tensor | _Rows:
        """Return the value of a node, or raise `_UnknownValueError`."""
        # List all before computing any: a mask that depends on an input costs nothing.
        missing: dict[fx.Node, None] = {}
        if node not in self._values:
            for operand in operands_first(node, lambda each: each not in missing and self._is_missing(each)):
                missing[operand] = None
        for operand in missing:
            self._values[operand] = self._value(operand)
        return self._values[node]

    def _is_missing(self, operand: fx.Node) -> bool:
        """Return True if an operand has no value yet, or raise `_UnknownValueError` at an input."""
        if operand not in self._values and operand.op != "call_function":
            raise _UnknownValueError
        return operand not in self._values

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
        # One element represents all of them.
        if op in FACTORIES:
            shape = [argument.name for argument in op._schema.arguments].index("size")
            element = op(*_numbers(args[:shape]), [1] * len(val.shape), *args[shape + 1 :], **_numbers(kwargs))
            return partial(_rows, element)
        if op in _TRIANGLES:
            return _triangle_rows(op, _collapse_repeats(args[0]), args[1] if len(args) > 1 else 0, val.shape[-1])
        elementwise = torch.Tag.pointwise in op.tags or op in _ELEMENTWISE
        if not elementwise or len(val.shape) < 2:
            raise _UnknownValueError
        operands = tuple(map(_collapse_repeats, args))
        return lambda first, end: op(*(_rows(operand, first, end) for operand in operands), **kwargs)


def _adds_no_rows(node: fx.Node) -> bool:
    """Return True if a view keeps the last two dims of its operand, and adds or drops only dims of size one."""
    source, shape = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    return source[-2:] == shape[-2:] and math.prod(source) == math.prod(shape)


def _numbers(arguments: Any) -> Any:
    """Return arguments whose tensors are all computed whole, or raise `_UnknownValueError`."""

    def number(value: Any) -> Any:
        if callable(value):
            raise _UnknownValueError
        return value

    return pytree.tree_map(number, arguments)


def _collapse_repeats(value: Any) -> Any:
    """Return the value with every dim along which it is constant reduced to size 1."""
    if not isinstance(value, Tensor):
        return value
    tensor = value
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1)
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor
