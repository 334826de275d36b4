"""One operator call as a rank runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.local_values import TorchEmitter, unwrap
from autoshard.patterns.padding import fill_padding, zero_padded_operands
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.patterns.strategy import Choices, local_shape, local_size
from autoshard.patterns.variants import resolve_variant
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import Emitter, all_reduce

__all__ = ["LocalCall", "emit_local"]


class LocalCall:
    """One operator call as a rank makes it: local operands, and what the strategy says of the shapes.

    Attributes:
        call: the call on whole tensors.
        rule: its rule, refined; of several variants, the one that was chosen.
        choices: the strategy, as that variant counts its factors.
        mesh: the mesh axes.
        emit: where to emit the local program; its methods are ATen's operators.
        operands: local values of the operands, in the order of `OpCall.operands`: `LocalValue`s.
        zeros: for every operand, whether all padding in it is known to be zero.
    """

    def __init__(
        self,
        call: OpCall,
        rule: Rule,
        choices: Choices,
        mesh: MeshShape,
        emit: Emitter,
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
        """A non-tensor argument by its name in the operator's schema."""
        return self.call.arg(name)

    def _device_argument(self, op: Any) -> dict[str, torch.device]:
        """The device for an operator that makes a tensor out of none: a captured graph names none."""
        if self.call.operands or all(argument.name != "device" for argument in op._schema.arguments):
            return {}
        return {"device": self.emit.home}

    def axes(self, name: str) -> tuple[int, ...]:
        """Mesh axes that shard the factor `name` or a part of it, in mesh order."""
        indices = self.rule.indices(name)
        return tuple(axis for axis, choice in enumerate(self.choices) if choice in indices)

    def share(self, name: str) -> int:
        """Into how many parts the factor `name` is split."""
        share = 1
        for axis in self.axes(name):
            share *= self.mesh.sizes[axis]
        return share

    def size(self, name: str) -> int:
        """Steps of the factor `name` that this rank runs, padding included; 1 where the call has no such factor."""
        return math.prod(local_size(self.rule, self.choices, self.mesh, index) for index in self.rule.indices(name))

    def position(self, name: str) -> Any:
        """Which part of the factor `name` this rank holds (0-d int64 value, first axis outermost); None if whole."""
        return self.linear_index(self.axes(name))

    def linear_index(self, axes: Sequence[int], *, host: bool = False) -> Any:
        """Row-major index of this rank among the ranks of `axes`.

        Args:
            axes: numbers of mesh axes, the outermost first.
            host: whether the index is to be known on the host, and not on the program's device.

        Returns:
            A 0-d int64 value; None without axes.
        """
        index = None
        for axis in axes:
            coordinate = self.emit.host_coordinate(axis) if host else self.emit.coordinate(axis)
            if index is None:
                index = coordinate
            else:
                index = self.emit.call(torch.ops.aten.mul.Tensor, index, self.mesh.sizes[axis]) + coordinate
        return index

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        whole = self.call.operands[operand].shape
        return local_shape(self.rule, self.rule.operands[operand], self.choices, self.mesh, whole)

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""
        dims, meta = self.rule.results[result], self.call.results[result]
        assert dims is not None
        assert meta is not None
        return local_shape(self.rule, dims, self.choices, self.mesh, meta.shape)

    def all_reduce(self, value: Any, name: str, reduction: str = "sum") -> Any:
        """Reduce `value` over the axes that shard the factor `name`."""
        for axis in self.axes(name):
            value = all_reduce(self.emit, value, axis, reduction)
        return value

    def run(self, op: Any = None, operands: Sequence[Any] | None = None, **changed: Any) -> Any:
        """Emit the operator on local operands, with the arguments named in `changed` replaced.

        Args:
            op: the operator to run, whose first arguments are those of the call; the call's own by default.
            operands: values to use for the tensors; the local operands by default.
            changed: arguments by their schema name.
        """
        values = iter(self.operands if operands is None else operands)

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
        for name, value in (self._device_argument(op) | changed).items():
            position = names.index(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return self.emit.call(op, *args, **kwargs)


def fill_operands(call: LocalCall) -> None:
    """Emit what replaces the padding of operands, where a factor is padded, by what the rule says is harmless."""
    call.operands, call.zeros = fill_padding(call), zero_padded_operands(call)


def emit_local(call: LocalCall) -> Any:
    """Emit what a rank runs for this call: the rule's own program, or the operator itself on the shards."""
    fill_operands(call)
    return emit_program(call)


def emit_program(call: LocalCall) -> Any:
    """As `emit_local`, for a call whose operands are filled."""
    return unwrap(call.run() if call.rule.local is None else call.rule.local(call))
