"""Local programs: one operator call as one rank runs it, on values that read like tensors.

Every operation on a `LocalValue` emits an operator; a `LocalCall` holds the local operands and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from autoshard.patterns.rule import FACTORS_BY_LAYOUT, OpCall, Rule, TensorMeta
from autoshard.patterns.strategy import Choices, local_shape, local_size, resolve_variant
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import Emitter, collectives

__all__ = ["LocalValue", "TorchEmitter", "unwrap"]


class LocalValue:
    """A tensor of one rank in a local program.

    `x + y` emits `aten.add`: the overload for tensors or, if `y` is a number, for scalars. Every operator of ATen is a
    method: `x.sum([0])`.

    Attributes:
        emit: the emitter that made it.
        raw: the value of the base emitter, such as an FX node.
    """

    __slots__ = ("emit", "raw")

    def __init__(self, emit: TorchEmitter, raw: Any) -> None:
        self.emit = emit
        self.raw = raw

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape."""
        return self.emit.base.shape(self.raw)

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.emit.base.dtype(self.raw)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.emit.base.device(self.raw)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # An operator of ATen, this value its first argument.
        return partial(getattr(self.emit, name), self)

    def to(self, dtype: torch.dtype) -> LocalValue:
        """The value in a dtype; the value itself if it has that dtype."""
        value: LocalValue = self if self.dtype == dtype else self.emit._to_copy(self, dtype=dtype)
        return value

    def __add__(self, other: Any) -> Any:
        return self.emit.add(self, other)

    def __sub__(self, other: Any) -> Any:
        return self.emit.sub(self, other)

    def __rsub__(self, other: float) -> Any:
        return self.emit.rsub(self, other)

    def __mul__(self, other: Any) -> Any:
        return self.emit.mul(self, other)

    def __truediv__(self, other: Any) -> Any:
        return self.emit.div(self, other)

    def __neg__(self) -> Any:
        return self.emit.neg(self)

    # No `__eq__`: values compare by identity, so that they can be keys. `x.eq(y)` compares elements.

    def __lt__(self, other: Any) -> Any:
        return self.emit.lt(self, other)

    def __gt__(self, other: Any) -> Any:
        return self.emit.gt(self, other)

    def __ge__(self, other: Any) -> Any:
        return self.emit.ge(self, other)


class TorchEmitter:
    """Emits local programs that read like torch: `emit.rsqrt(variance + eps)`.

    Every operator of ATen is a method, with the arguments of its schema. It emits the first overload, in torch's order,
    whose schema fits the arguments: `emit.max(x)` is `aten.max.default` and `emit.max(x, 0)` is `aten.max.dim`. `call`
    emits operators of other namespaces, and overloads by name.

    Args:
        base: any emitter, which takes the operators.
    """

    def __init__(self, base: Emitter) -> None:
        self.base = base
        self.mesh: MeshShape = base.mesh
        self.home: torch.device = base.home
        self.group, self.stream = base.group, base.stream

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not _overloads(name):
            raise AttributeError(f"ATen has no operator {name!r}: emit those of other namespaces by call(op, ...)")
        return partial(self._aten, name)

    def _aten(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # Resolve by kinds of arguments, not by values, so that the cache serves all calls of a kind.
        keywords = tuple((keyword, _kind(value)) for keyword, value in kwargs.items())
        return self.call(_resolve(name, tuple(map(_kind, args)), keywords), *args, **kwargs)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of one operator call; a tuple of values where the operator has several results."""
        result = self.base.call(op, *unwrap(args), **{name: unwrap(value) for name, value in kwargs.items()})
        return tuple(map(self.wrap, result)) if isinstance(result, tuple) else self.wrap(result)

    def wrap(self, raw: Any) -> Any:
        """Wrap a value of the base emitter; None, for a missing result, stays None."""
        return raw if raw is None or isinstance(raw, LocalValue) else LocalValue(self, raw)

    def collective(self, op: Any, value: Any, *args: Any, axis: int) -> Any:
        """The result of a functional collective over a mesh axis, awaited; the axis's group is the last argument."""
        return self.call(collectives.wait_tensor.default, self.call(op, value, *args, self.group(axis)))

    def coordinate(self, axis: int) -> LocalValue:
        """This rank's coordinate on an axis: a 0-d int64 value on the program's device."""
        return LocalValue(self, self.base.coordinate(axis))

    def host_coordinate(self, axis: int) -> LocalValue:
        """The same on the CPU."""
        return LocalValue(self, self.base.host_coordinate(axis))

    def seed(self) -> LocalValue:
        """The step's random seed: a 0-d int64 value on the CPU."""
        return LocalValue(self, self.base.seed())


def unwrap(value: Any) -> Any:
    """Unwrap a value, or those in lists and tuples, to values of the base emitter."""
    if isinstance(value, LocalValue):
        return value.raw
    if isinstance(value, list):
        return [unwrap(item) for item in value]
    if isinstance(value, tuple):
        return tuple(unwrap(item) for item in value)
    return value


_TENSOR, _TENSORS, _NUMBERS, _DTYPE, _TEXT, _PLAIN, _NONE = range(7)
"""The kinds of arguments by which overloads differ."""


def _kind(value: Any) -> int:
    if isinstance(value, LocalValue):
        return _TENSOR
    if isinstance(value, (list, tuple)):
        # An empty list counts as numbers: many operators take one, and none takes an empty list of tensors.
        return _TENSORS if any(isinstance(item, LocalValue) for item in value) else _NUMBERS
    if value is None:
        return _NONE
    if isinstance(value, str):
        return _TEXT
    return _DTYPE if isinstance(value, torch.dtype) else _PLAIN


@cache
def _overloads(name: str) -> tuple[Any, ...]:
    """The overloads of an ATen operator in torch's order; nothing where ATen has no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    return () if packet is None else tuple(getattr(packet, overload) for overload in packet.overloads())


@cache
def _resolve(name: str, args: tuple[int, ...], kwargs: tuple[tuple[str, int], ...]) -> Any:
    """The first overload whose schema takes arguments of these kinds."""
    for overload in _overloads(name):
        if _fits(overload._schema.arguments, args, dict(kwargs)):
            return overload
    raise TypeError(f"no overload of aten.{name} takes {len(args)} arguments of these kinds and {dict(kwargs)}")


def _fits(schema: Sequence[Any], args: Sequence[int], kwargs: dict[str, int]) -> bool:
    positional = [argument for argument in schema if not argument.kwarg_only]
    given = dict(zip((argument.name for argument in positional), args, strict=False)) | kwargs
    if len(args) > len(positional) or len(given) < len(args) + len(kwargs):
        return False
    required = {argument.name for argument in schema if not argument.has_default_value()}
    kinds = {argument.name: _schema_kinds(str(argument.real_type)) for argument in schema}
    return required <= given.keys() <= kinds.keys() and all(given[name] in kinds[name] for name in given)


@cache
def _schema_kinds(declared: str) -> tuple[int, ...]:
    """The kinds of arguments that a declared type takes."""
    if declared.startswith("Optional["):
        return (*_schema_kinds(declared[len("Optional[") : -1]), _NONE)
    if declared == "Tensor":
        return (_TENSOR,)
    # Dim names are strings, too; torch 2.12 lists `select.Dimname` before `select.int`.
    if "str" in declared:
        return (_TEXT,) if declared == "str" else ()
    if declared.startswith("List["):
        return (_TENSORS,) if "Tensor" in declared else (_NUMBERS,)
    return (_DTYPE,) if declared == "ScalarType" else (_PLAIN,)


class LocalCall:
    """One operator call of one rank: its local operands, and the local shapes that follow from the strategy.

    Attributes:
        call: the call on whole tensors.
        rule: its refined rule, or the chosen variant of it.
        choices: the strategy, in the factors of that variant.
        mesh: the mesh axes.
        emit: the emitter of the local program; its methods are ATen's operators.
        operands: local values of the operands, in the order of `OpCall.operands`: `LocalValue`s.
        zeros: for every operand, True if all padding in it is known to be zero.
    """

    def __init__(
        self,
        call: OpCall,
        rule: Rule,
        choices: Choices,
        mesh: MeshShape,
        emit: Emitter | TorchEmitter,
        operands: Sequence[Any],
        zeros: Sequence[bool] = (),
    ) -> None:
        self.call = call
        self.rule, self.choices = resolve_variant(rule, choices)
        self.mesh = mesh
        self.emit = emit if isinstance(emit, TorchEmitter) else TorchEmitter(emit)
        self.operands = tuple(map(self.emit.wrap, operands))
        self.zeros = tuple(zeros) or (False,) * len(self.operands)

    def arg(self, name: str) -> Any:
        """Return a non-tensor argument by its name in the operator's schema."""
        return self.call.arg(name)

    def axes(self, name: str) -> tuple[int, ...]:
        """Return the mesh axes that shard the factor `name` or a part of it, in mesh order."""
        indices = self.rule.indices(name)
        return tuple(axis for axis, choice in enumerate(self.choices) if choice in indices)

    def share(self, name: str) -> int:
        """Return the number of parts that the factor `name` is split into."""
        return math.prod(self.mesh.sizes[axis] for axis in self.axes(name))

    def size(self, name: str) -> int:
        """Return the steps of the factor `name` on this rank, padding included; 1 if the call has no such factor."""
        return math.prod(local_size(self.rule, self.choices, self.mesh, index) for index in self.rule.indices(name))

    def position(self, name: str) -> Any:
        """Return the index of this rank's part of the factor `name` (0-d int64 value); None if the factor is whole."""
        return self.linear_index(self.axes(name))

    def linear_index(self, axes: Sequence[int], *, host: bool = False) -> Any:
        """Return the row-major index of this rank among the ranks of `axes`.

        Args:
            axes: indices of mesh axes, outermost first.
            host: True for a value on the host, False for one on the program's device.

        Returns:
            A 0-d int64 value; None without axes.
        """
        index = None
        # An explicit overload: a number would resolve to mul.Scalar, but unequal shares are found by mul.Tensor.
        for axis in axes:
            coordinate = self.emit.host_coordinate(axis) if host else self.emit.coordinate(axis)
            if index is None:
                index = coordinate
            else:
                index = self.emit.call(torch.ops.aten.mul.Tensor, index, self.mesh.sizes[axis]) + coordinate
        return index

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Return the local shape of an operand."""
        whole = self.call.operands[operand].shape
        return local_shape(self.rule, self.rule.operands[operand], self.choices, self.mesh, whole)

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result."""
        dims, meta = self.rule.results[result], self.call.results[result]
        assert dims is not None
        assert meta is not None
        return local_shape(self.rule, dims, self.choices, self.mesh, meta.shape)

    def all_reduce(self, value: Any, name: str, reduction: str = "sum") -> Any:
        """Reduce `value` over the axes that shard the factor `name`."""
        for axis in self.axes(name):
            value = self.emit.collective(collectives.all_reduce.default, value, reduction, axis=axis)
        return value

    def run(self, op: Any = None, operands: Sequence[Any] | None = None, **changed: Any) -> Any:
        """Emit the operator on local operands, with the arguments named in `changed` replaced.

        Args:
            op: the operator to run, whose first arguments are those of the call; the call's operator by default.
            operands: tensor arguments; the local operands by default.
            changed: arguments by their schema name.
        """
        # In the order of `OpCall.operands`, as `local` visits them.
        values = iter(self._in_captured_layout(self.operands if operands is None else operands))

        def local(value: Any) -> Any:
            if isinstance(value, TensorMeta):
                return next(values)
            if isinstance(value, tuple):
                return [local(item) for item in value]
            return value

        args = [local(value) for value in self.call.args]
        kwargs = {name: local(value) for name, value in self.call.kwargs}
        op = self.call.op if op is None else op
        names = [argument.name for argument in op._schema.arguments]
        if not self.call.operands and "device" in names:
            # A captured graph names no device for factory operators.
            changed = {"device": self.emit.home, **changed}
        for name, value in changed.items():
            position = names.index(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return self.emit.call(op, *args, **kwargs)

    def _in_captured_layout(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values, the first, a matrix, with its layout in the captured graph where that matters."""
        if self.call.name not in FACTORS_BY_LAYOUT:
            return values
        matrix, *others = values
        if self.call.operands[0].is_contiguous:
            return [matrix.contiguous(), *others]
        # Column-major.
        return [matrix.transpose(-2, -1).contiguous().transpose(-2, -1), *others]


def emit_program(call: LocalCall) -> Any:
    """Emit the rule's local program or, without one, the operator itself on the shards."""
    return unwrap(call.run() if call.rule.local is None else call.rule.local(call))
