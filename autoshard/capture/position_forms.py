"""Attention masks of dynamic sizes as linear inequalities of positions, which hold at all sizes.

A tensor of integers is represented by a linear expression of its own indices, as `arange` is one; a tensor of booleans
by expressions that all have to be zero or less. The rule of each operator is exact for tensors of every size; without a
rule, the mask stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx

from autoshard.capture._torch import OpOverload
from autoshard.capture.nodes import argument_of

aten = torch.ops.aten

FACTORIES = frozenset(
    {
        *(aten.ones.default, aten.zeros.default, aten.full.default, aten.new_ones.default, aten.new_zeros.default),
        aten.new_full.default,
    }
)
"""Operators that make a tensor of one number."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a mask: True if later keys are hidden, and the size of the window of visible keys (0: none)."""

    causal: bool
    window: int = 0


class _NotLinearError(Exception):
    """A value is not a linear form of positions, or is not known to be one."""


@dataclass(frozen=True, slots=True)
class _Truth:
    """Booleans: true where all `forms` are zero or less; nowhere if `never`."""

    forms: frozenset[sympy.Expr] = frozenset()
    never: bool = False


_Form: TypeAlias = sympy.Expr | _Truth


def _index(place: int) -> sympy.Symbol:
    """Return the symbol of an index; dims are counted from the end, from 1 on, so that broadcasting keeps places."""
    return sympy.Symbol(f"index_{place}", integer=True)


_KEY, _QUERY = _index(1), _index(2)


def meaning_at_all_sizes(
    mask: fx.Node, constants: Mapping[fx.Node, Tensor], changed: Collection[fx.Node]
) -> Meaning | None:
    """Return the meaning of a square mask `[..., queries, keys]` at every size; None if it is not known.

    Args:
        mask: a node of an exported graph, whose sizes may be symbols.
        constants: placeholders of tensors with known numbers.
        changed: nodes that are changed in place, of which nothing is known.
    """
    try:
        truth = _Forms(constants, changed).of(mask)
    except _NotLinearError:
        return None
    if not isinstance(truth, _Truth) or truth.never:
        return None
    # Indices are never negative: a form without positive terms holds everywhere.
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
            # The index of a dim of size one is always zero.
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
    """Return the form with values in place of indices, all at once."""
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
    start = _number(argument_of(node, "start") or 0)
    if start < 0 or _number(argument_of(node, "step", 1)) != 1:
        raise _NotLinearError
    return _substitute(forms.of(node.all_input_nodes[0]), {index: index + start})


def _select(forms: _Forms, node: fx.Node) -> _Form:
    ndim = node.meta["val"].dim() + 1
    gone, index = ndim - _number(node.args[1]) % ndim, _number(node.args[2])
    if index < 0:
        raise _NotLinearError
    shifted = {_index(place): _index(place - 1) for place in range(gone + 1, ndim + 1)}
    return _substitute(forms.of(node.all_input_nodes[0]), {**shifted, _index(gone): sympy.Integer(index)})


def _differences(forms: _Forms, node: fx.Node) -> _Form:
    """Return the form of `diff` with one prepended element: a constant if that element continues the sequence.

    Models find the starts of packed samples so: positions of a single sample have differences of 1 everywhere.
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
    # A negative index would count from the end, at a place that depends on the size.
    terms = [number for index in indices for number in index.as_coefficients_dict().values()]
    if len(indices) != node.args[0].meta["val"].dim() or min(terms) < 0:  # type: ignore[union-attr]
        raise _NotLinearError
    return _substitute(source, {_index(place): index for place, index in enumerate(reversed(indices), 1)})


def _comparison(sign: int, margin: int) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of a comparison that is true where `sign` times the difference plus `margin` is at most 0."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        difference = forms.linear(node.args[0]) - forms.linear(node.args[1])
        signed = sympy.expand(margin + sign * difference)
        return _Truth(frozenset([signed])) if signed.free_symbols else _Truth(never=int(signed) > 0)

    return form


def _equal(expected: bool) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of `eq` or `ne` for numbers whose difference is the same everywhere."""

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
        inside = sympy.expand(sign * (_KEY - _QUERY - diagonal))
        return _Truth(truth.forms | {inside}, truth.never)

    return form


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
"""The rule of each operator: the form of its result from those of its operands."""
