"""What a rank runs for one operator or one reshard, recorded once for all places that run the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture.fake_module import DEVICE
from autoshard.capture.joint import JointGraph
from autoshard.capture.simplify import freeze
from autoshard.patterns.local import LocalCall, emit_program
from autoshard.patterns.local_values import unwrap
from autoshard.patterns.padding import fill_operands, padded_factors, zero_padded_results
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.strategy import Choices
from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path
from autoshard.size import plain
from autoshard.specs.axes import MeshShape


@dataclass(frozen=True, slots=True, eq=False)
class RecordedValue:
    """A value of a recording: an operand, a coordinate, the seed, or what a call makes."""

    index: int
    val: torch.Tensor


@dataclass(frozen=True, slots=True)
class _RecordedOp:
    """One call; its arguments hold slots. `val` is a tensor without numbers, or several."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    val: Any


class Recording:
    """Takes the operators of a local program; `play` then adds them to a graph, as often as is asked.

    Args:
        mesh: the mesh axes; process groups are called after them.
        operands: tensors without numbers that the program takes, in a fake mode.
        mode: the fake mode.
        values: what calls make, by what they are called with: filled, and of use to other recordings.
    """

    def __init__(
        self, mesh: MeshShape, operands: Sequence[torch.Tensor], mode: Any, values: dict[Hashable, Any] | None = None
    ) -> None:
        self.mesh = mesh
        self.home = DEVICE
        self.results: Any = None
        self._mode = mode
        self._values = {} if values is None else values
        self._steps: list[_RecordedOp] = []
        self.operands = [RecordedValue(index, val) for index, val in enumerate(operands)]
        with mode:
            number = torch.empty((), dtype=torch.int64, device=DEVICE)
        self._shared = [RecordedValue(len(operands) + index, number) for index in range(mesh.ndim + 1)]
        self._slots = len(operands) + mesh.ndim + 1

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The slot of one call, or slots where it has several results."""
        key = (op, _cache_key(args), _cache_key(kwargs))
        if key not in self._values:
            fakes = fx.node.map_aggregate(
                (args, kwargs), lambda one: one.val if isinstance(one, RecordedValue) else plain(one)
            )
            with self._mode, torch.no_grad():
                self._values[key] = op(*fakes[0], **fakes[1])
        val = self._values[key]
        self._steps.append(_RecordedOp(op, args, kwargs, val))
        made = self._slot(val)
        if not isinstance(val, (tuple, list)):
            return made
        return tuple(self._item(made, index, item) for index, item in enumerate(val))

    def _item(self, made: RecordedValue, index: int, val: torch.Tensor | None) -> RecordedValue | None:
        if not isinstance(val, torch.Tensor):
            return None
        self._steps.append(_RecordedOp(operator.getitem, (made, index), {}, val))
        return self._slot(val)

    def _slot(self, val: Any) -> RecordedValue:
        self._slots += 1
        return RecordedValue(self._slots - 1, val)

    def coordinate(self, axis: int) -> RecordedValue:
        """The rank's coordinate on an axis."""
        return self._shared[axis]

    def host_coordinate(self, axis: int) -> RecordedValue:
        """The same: no program runs here."""
        return self._shared[axis]

    def seed(self) -> RecordedValue:
        """The step's seed."""
        return self._shared[-1]

    def group(self, axis: int) -> str:
        """The name of the axis stands for its process groups."""
        return self.mesh.names[axis]

    def stream(self) -> int:
        """Programs that are played several times would draw the same numbers: this is for shapes alone."""
        return 0

    def shape(self, value: RecordedValue) -> tuple[int, ...]:
        """Local shape of a value."""
        return tuple(value.val.shape)

    def dtype(self, value: RecordedValue) -> torch.dtype:
        """Element type of a value."""
        return value.val.dtype

    def device(self, value: RecordedValue) -> torch.device:
        """Device of a value."""
        return value.val.device

    def is_contiguous(self, value: RecordedValue) -> bool:
        """Whether the value lies row-major in memory."""
        return value.val.is_contiguous()

    def play(self, given: Sequence[fx.Node], call: Callable[..., fx.Node]) -> Callable[[RecordedValue], fx.Node]:
        """Run the program on nodes.

        Args:
            given: nodes for the operands, the coordinates and the seed.
            call: adds one call, of an operator with arguments and keyword arguments, whose value is the last argument.

        Returns:
            The node of every slot.
        """
        nodes = list(given)

        def node_of(argument: Any) -> Any:
            return nodes[argument.index] if isinstance(argument, RecordedValue) else argument

        for step in self._steps:
            args, kwargs = fx.node.map_aggregate((step.args, step.kwargs), node_of)
            nodes.append(call(step.op, args, kwargs, step.val))
        return node_of


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """What a rank runs for one operator.

    Attributes:
        recording: the calls.
        operands: the operands, their padding filled where that had to be.
        operand_zeros: for every one of these, whether its padding is zero.
        results: slots of the results; None for those that the operator does not have.
        zeros: for every result, whether its padding is zero.
    """

    recording: Recording
    operands: tuple[RecordedValue, ...]
    operand_zeros: tuple[bool, ...]
    results: tuple[RecordedValue | None, ...]
    zeros: tuple[bool, ...]


class LocalPrograms:
    """Recordings of operators and reshards by what they depend on: the call, the strategy, how operands lie in memory.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
    """

    def __init__(self, graph: JointGraph, mesh: MeshShape) -> None:
        example = next(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
        self.mesh = mesh
        self.mode = example.fake_mode
        self._calls: dict[Hashable, RecordedCall] = {}
        self._by_identity: dict[
            Hashable, RecordedCall
        ] = {}  # by identity: what a tensor looks like takes longer to ask
        self._empty: dict[Hashable, torch.Tensor] = {}
        self._reshards: dict[Hashable, Recording] = {}
        self._values: dict[Hashable, Any] = {}
        self._keep_alive: list[object] = []  # what the keys name by identity stays alive

    def operator(
        self, call: OpCall, rule: Rule, choices: Choices, operands: Sequence[torch.Tensor], zeros: Sequence[bool]
    ) -> RecordedCall:
        """What a rank runs for an operator on local operands."""
        met = (id(call), id(rule), choices, tuple(zeros), tuple(map(id, operands)))
        if met not in self._by_identity:
            key = (*met[:-1], tuple(map(_layout, operands)))
            if key not in self._calls:
                self._calls[key] = self._record(call, rule, choices, operands, zeros)
            self._keep_alive += [call, rule, *operands]
            self._by_identity[met] = self._calls[key]
        return self._by_identity[met]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without numbers, row-major; one for all of a shape, so that calls on it are met again."""
        key = (tuple(int(plain(size)) for size in shape), dtype)
        if key not in self._empty:
            with self.mode:
                self._empty[key] = torch.empty(key[0], dtype=dtype, device=DEVICE)
        return self._empty[key]

    def _record(
        self, call: OpCall, rule: Rule, choices: Choices, operands: Sequence[torch.Tensor], zeros: Sequence[bool]
    ) -> RecordedCall:
        recording = Recording(self.mesh, operands, self.mode, self._values)
        local = LocalCall(call, rule, choices, self.mesh, recording, recording.operands, zeros)
        fill_operands(local)
        padded = padded_factors(local.rule, local.choices, self.mesh)
        results = emit_program(local)
        results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        zero = zero_padded_results(local.rule, padded, local.zeros)
        return RecordedCall(recording, unwrap(local.operands), local.zeros, results, zero)

    def reshard(self, path: Path, value: torch.Tensor) -> Recording:
        """The steps of a path on a local tensor; its `results` is the slot of what they make."""
        key = (id(path), _layout(value))
        if key not in self._reshards:
            self._keep_alive.append(path)
            recording = Recording(self.mesh, [value], self.mode, self._values)
            recording.results = lower(path, recording.operands[0], recording, value.dtype)
            self._reshards[key] = recording
        return self._reshards[key]


def _cache_key(value: Any) -> Hashable:
    """An argument of a call as part of a key, slots by the layout of their tensors."""
    if isinstance(value, RecordedValue):
        return (RecordedValue, value.val if not isinstance(value.val, torch.Tensor) else _layout(value.val))
    if isinstance(value, (list, tuple)):
        return tuple(map(_cache_key, value))
    if isinstance(value, dict):
        return tuple((name, _cache_key(value[name])) for name in sorted(value))
    return freeze(plain(value))


def _layout(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
