"""One operator call as one rank runs it, on local operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.local_values import TorchEmitter, unwrap
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.patterns.strategy import Choices, local_shape, local_size, resolve_variant
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import Emitter, collectives


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
            axes: numbers of mesh axes, the outermost first.
            host: True for a value on the host, False for one on the program's device.

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
            operands: values of the tensors; the local operands by default.
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
        if not self.call.operands and "device" in names:
            # A captured graph names no device for an operator that makes a tensor out of none.
            changed = {"device": self.emit.home, **changed}
        for name, value in changed.items():
            position = names.index(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return self.emit.call(op, *args, **kwargs)


def emit_program(call: LocalCall) -> Any:
    """Emit the rule's own program, or the operator itself on the shards, for a call whose operands are filled."""
    return unwrap(call.run() if call.rule.local is None else call.rule.local(call))
