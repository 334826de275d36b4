"""Attention masks of dynamic sizes as linear inequalities of positions, which hold at all sizes.

A tensor of integers is represented by a linear form of its own indices, as `arange` is one; a tensor of booleans by
linear forms that all have to be zero or less. The rule of each operator is exact for tensors of every size; without a
rule, the mask stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    """The meaning of a mask: whether later keys are hidden, and the size of the window of visible keys (0: none)."""

    causal: bool
    window: int = 0


class _NotLinearError(Exception):
    """A value is not a linear form of positions, or is not known to be one."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """Integers: every element is the sum of its indices times `slopes`, plus `start`."""

    slopes: tuple[int, ...]
    start: int

    def plus(self, form: _Linear, times: int) -> _Linear:
        """Return the sum with `times` another form, broadcast."""
        ndim = max(len(self.slopes), len(form.slopes))
        pairs = zip(_pad_slopes(self.slopes, ndim), _pad_slopes(form.slopes, ndim), strict=True)
        return _Linear(tuple(left + times * right for left, right in pairs), self.start + times * form.start)

    @property
    def constant(self) -> int:
        """The value of all elements; `_NotLinearError` if they differ."""
        if any(self.slopes):
            raise _NotLinearError
        return self.start


@dataclass(frozen=True, slots=True)
class _Truth:
    """Booleans: true where all `forms` are zero or less; nowhere if `never`."""

    ndim: int
    forms: frozenset[_Linear] = frozenset()
    never: bool = False


_Form = _Linear | _Truth


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
    if not isinstance(truth, _Truth) or truth.never or truth.ndim < 2:
        return None
    limiting = [form for form in truth.forms if not _always_holds(form)]
    restrictions = {(*_pad_slopes(form.slopes, truth.ndim), form.start) for form in limiting}
    if not restrictions:
        return Meaning(False)
    other_dims = (0,) * (truth.ndim - 2)
    behind = (*other_dims, -1, 1, 0)  # key - query <= 0
    before = {form for form in restrictions if form[:-1] == (*other_dims, 1, -1)}  # query - key - window + 1 <= 0
    if behind not in restrictions or restrictions - before != {behind} or any(form[-1] >= 0 for form in before):
        return None
    return Meaning(True, min((1 - form[-1] for form in before), default=0))


def _always_holds(form: _Linear) -> bool:
    """Return True if the form is zero or less at all indices, which are never negative."""
    return form.start <= 0 and all(slope <= 0 for slope in form.slopes)


class _Forms:
    """The linear forms of nodes."""

    def __init__(self, constants: Mapping[fx.Node, Tensor], changed: Collection[fx.Node]) -> None:
        self._constants, self._changed = constants, changed
        self._known: dict[fx.Node, _Form] = {}

    def of(self, node: fx.Node) -> _Form:
        """Return the form of a node, or raise `_NotLinearError`."""
        if node not in self._known:
            self._known[node] = _drop_unit_dims(self._form(node), node)
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

    def linear(self, value: object) -> _Linear:
        """Return the form of an operand that is a tensor of integers, or a number."""
        if isinstance(value, int) and not isinstance(value, bool):
            return _Linear((), value)
        form = self.of(value) if isinstance(value, fx.Node) else None
        if not isinstance(form, _Linear):
            raise _NotLinearError
        return form

    def truth(self, value: object) -> _Truth:
        """Return the form of an operand that is a tensor of booleans."""
        form = self.of(value) if isinstance(value, fx.Node) else None
        if not isinstance(form, _Truth):
            raise _NotLinearError
        return form


def _drop_unit_dims(form: _Form, node: fx.Node) -> _Form:
    """Return the form without slopes in dims of size one, whose index is always zero."""
    shape = node.meta["val"].shape

    def change(linear: _Linear) -> _Linear:
        slopes = _pad_slopes(linear.slopes, len(shape))
        kept = (0 if isinstance(size, int) and size == 1 else slope for slope, size in zip(slopes, shape, strict=True))
        return replace(linear, slopes=tuple(kept))

    return _on_dims(form, len(shape), change)


def _on_dims(form: _Form, ndim: int, change: Callable[[_Linear], _Linear]) -> _Form:
    if isinstance(form, _Linear):
        return change(form)
    return replace(form, ndim=ndim, forms=frozenset(map(change, form.forms)))


def _pad_slopes(slopes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return (0,) * (ndim - len(slopes)) + slopes


def _number(value: object) -> int:
    """Return an argument that is an integer in the graph, not a symbol."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _NotLinearError
    return value


def _constant_form(value: Tensor, number: object) -> _Form:
    if value.dtype == torch.bool:
        return _Truth(value.dim(), never=not number)
    return _Linear((0,) * value.dim(), int(number))  # type: ignore[call-overload]


def _arange(forms: _Forms, node: fx.Node) -> _Form:
    return _Linear((_number(argument_of(node, "step", 1)),), _number(argument_of(node, "start", 0)))


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
        return forms.linear(node.args[0]).plus(forms.linear(node.args[1]), times)

    return form


def _unsqueeze(forms: _Forms, node: fx.Node) -> _Form:
    source, ndim = node.all_input_nodes[0], node.meta["val"].dim()
    dim = _number(node.args[1]) % ndim

    def change(linear: _Linear) -> _Linear:
        slopes = _pad_slopes(linear.slopes, ndim - 1)
        return replace(linear, slopes=(*slopes[:dim], 0, *slopes[dim:]))

    return _on_dims(forms.of(source), ndim, change)


def _slice(forms: _Forms, node: fx.Node) -> _Form:
    source, ndim = node.all_input_nodes[0], node.meta["val"].dim()
    dim = _number(argument_of(node, "dim", 0)) % ndim
    start = _number(argument_of(node, "start") or 0)
    if start < 0 or _number(argument_of(node, "step", 1)) != 1:
        raise _NotLinearError

    def change(linear: _Linear) -> _Linear:
        return replace(linear, start=linear.start + start * _pad_slopes(linear.slopes, ndim)[dim])

    return _on_dims(forms.of(source), ndim, change)


def _select(forms: _Forms, node: fx.Node) -> _Form:
    source, ndim = node.all_input_nodes[0], node.meta["val"].dim()
    dim, index = _number(node.args[1]) % (ndim + 1), _number(node.args[2])
    if index < 0:
        raise _NotLinearError

    def change(linear: _Linear) -> _Linear:
        slopes = _pad_slopes(linear.slopes, ndim + 1)
        return _Linear((*slopes[:dim], *slopes[dim + 1 :]), linear.start + index * slopes[dim])

    return _on_dims(forms.of(source), ndim, change)


def _differences(forms: _Forms, node: fx.Node) -> _Form:
    """`diff` with one prepended element: a constant if that element continues the sequence.

    Models find the starts of packed samples so: positions of a single sample have differences of 1 everywhere.
    """
    source, before = forms.linear(node.args[0]), forms.linear(argument_of(node, "prepend"))
    dim = _number(argument_of(node, "dim", -1))
    ndim = node.meta["val"].dim()
    slopes = list(_pad_slopes(source.slopes, ndim))
    step, slopes[dim] = slopes[dim], 0
    single = argument_of(node, "prepend").meta["val"].shape[dim]
    at_first = replace(source, slopes=tuple(slopes)).plus(before, -1)
    if _number(argument_of(node, "n", 1)) != 1 or argument_of(node, "append") is not None or str(single) != "1":
        raise _NotLinearError
    if at_first.constant != step:
        raise _NotLinearError
    return _Linear((), step)


def _running_sum(forms: _Forms, node: fx.Node) -> _Form:
    """`cumsum` of zeros, which is zero at all sizes."""
    form = forms.of(node.all_input_nodes[0])
    if not (form.never if isinstance(form, _Truth) else form.constant == 0):
        raise _NotLinearError
    return _Linear((), 0)


def _read_at(forms: _Forms, node: fx.Node) -> _Form:
    """Indexing of all dims by positions: the composition of linear forms."""
    # A negative index would count from the end, at a place that depends on the size.
    source, places = forms.linear(node.args[0]), node.args[1]
    assert isinstance(places, Sequence)
    indices = [forms.linear(place) for place in places]
    ndim = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if len(indices) != ndim or any(index.start < 0 or min(index.slopes, default=0) < 0 for index in indices):
        raise _NotLinearError
    result = _Linear((), source.start)
    for slope, index in zip(_pad_slopes(source.slopes, ndim), indices, strict=True):
        result = result.plus(index, slope)
    return result


def _comparison(sign: int, margin: int) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of a comparison that is true where `sign` times the difference plus `margin` is at most 0."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        difference = forms.linear(node.args[0]).plus(forms.linear(node.args[1]), -1)
        signed = _Linear((), margin).plus(difference, sign)
        if any(signed.slopes):
            return _Truth(node.meta["val"].dim(), frozenset([signed]))
        return _Truth(node.meta["val"].dim(), never=signed.start > 0)

    return form


def _equal(expected: bool) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of `eq` or `ne` for numbers whose difference is the same everywhere."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        difference = forms.linear(node.args[0]).plus(forms.linear(node.args[1]), -1).constant
        return _Truth(node.meta["val"].dim(), never=(difference == 0) != expected)

    return form


def _logical_and(forms: _Forms, node: fx.Node) -> _Form:
    left, right = map(forms.truth, node.args)
    ndim = node.meta["val"].dim()
    parts = (_Linear(_pad_slopes(form.slopes, ndim), form.start) for form in (*left.forms, *right.forms))
    return _Truth(ndim, frozenset(parts), left.never or right.never)


def _triangle(sign: int) -> Callable[[_Forms, fx.Node], _Form]:
    """Return the rule of a triangle of booleans; `sign` is 1 for the lower one."""

    def form(forms: _Forms, node: fx.Node) -> _Form:
        truth, diagonal = forms.truth(node.args[0]), _number(argument_of(node, "diagonal", 0))
        inside = _Linear((0,) * (truth.ndim - 2) + (-sign, sign), -sign * diagonal)
        return replace(truth, forms=truth.forms | {inside})

    return form


_RULES: dict[Any, Callable[[_Forms, fx.Node], _Form]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys(
        (
            aten.to.dtype,
            aten.to.dtype_layout,
            aten.to.device,
            aten._to_copy.default,
            aten.alias.default,
            aten.clone.default,
            aten.contiguous.default,
            aten.expand.default,
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
