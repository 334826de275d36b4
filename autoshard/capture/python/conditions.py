"""Numbers in inputs and buffers that Python reads while `forward` is captured.

A graph has the branches that the example took. A call in which a value read from an input or a buffer differs needs
another graph: a program rereads the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import FakeTensor, OpOverload, operators_under_autocast, outside_functions
from autoshard.capture.capture_device import DEVICE
from autoshard.capture.nodes import base_of, changed_memory, is_in_place, is_random
from autoshard.errors import InputError

aten = torch.ops.aten

# Most programs for the values of one line: a flag or a small enumeration needs far fewer.
_MAX_VALUES = 16


class NoNumbersError(Exception):
    """The code reads the values of an input (by name) or a `ModuleTensor` that has none."""

    def __init__(self, source: str | ModuleTensor) -> None:
        super().__init__(str(source))
        self.source = source


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTensor:
    """A buffer of the user's module, or a tensor in one of its attributes.

    Attributes:
        path: the user's expression for it, such as `self.encoder.stride`.
        table: of the module that holds it.
        name: its key in `table`.
    """

    path: str
    table: Mapping[str, Any]
    name: str

    def __str__(self) -> str:
        return self.path

    @property
    def tensor(self) -> Tensor:
        """The current tensor, which may have been replaced."""
        held: Tensor = self.table[self.name]
        return held

    def numbers(self) -> Tensor | None:
        """Return the current tensor; None if it has no values."""
        with outside_functions():  # code in `forward` sees the fake tensor instead
            return numbers_of(self.tensor)


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that Python read from inputs and buffers.

    Attributes:
        line: the user's line, such as `model.py:12 (if mask.all():)`.
        value: the value in the example.
    """

    line: str
    value: Tensor


@dataclass(slots=True, eq=False)
class Conditions:
    """The values that a captured graph depends on, read from its inputs and from tensors of the module.

    Attributes:
        inputs: the tensors that are read, in the order of the program's arguments: inputs by name, and module tensors.
        readings: the values in the example.
        program: maps these inputs to one flag per reading: True if the value is that of the example.
    """

    inputs: tuple[str | ModuleTensor, ...] = ()
    readings: tuple[Reading, ...] = ()
    program: fx.GraphModule | None = None
    _device: torch.device = DEVICE
    # The data of all module tensors when the values were last those of the example.
    _numbers: list[Tensor] | None = None

    def flags(self, tensors: Mapping[str, Tensor]) -> list[bool]:
        """Return one flag per reading: True if a call with these inputs has the value of the example."""
        if self.program is None:
            return []
        sources = [tensors[source] if isinstance(source, str) else source.tensor for source in self.inputs]
        passed = [tensor.detach() for tensor in sources]
        inputs = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in passed]
        # Without data there is no answer, and the graph may be wrong.
        if any(tensor.is_meta for tensor in inputs):
            return [False] * len(self.readings)
        device = inputs[0].device
        self._move(device)
        inputs = [tensor.to(device) for tensor in inputs]
        with torch.no_grad(), outside_functions():
            # Stacked, all flags come from the device with one synchronisation.
            flags: list[bool] = torch.stack(self.program(*inputs)).tolist()
        return flags

    def hold(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if a call with these inputs would be captured as the same graph."""
        # Runs at every call, and buffers hardly ever change: compare them without the program.
        held = [source.tensor for source in self.inputs if isinstance(source, ModuleTensor)]
        only_held = len(held) == len(self.inputs) and not any(tensor.is_meta for tensor in held)
        numbers = _join(held) if held and only_held else None
        if numbers is not None and self._numbers is not None and _are_equal(numbers, self._numbers):
            return True
        holds = all(self.flags(tensors))
        self._numbers = numbers if holds else None
        return holds

    def changes(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """Yield, for lines whose values differ in a call with these inputs, subject and predicate of an error."""
        if self.program is not None:
            for reading, flag in zip(self.readings, self.flags(tensors), strict=True):
                if not flag:
                    yield f"the value at {reading.line}", "another than before"

    def _move(self, device: torch.device) -> None:
        """Move the program to the device of the inputs."""
        if device == self._device or self.program is None:
            return
        for node in self.program.graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda value: device if isinstance(value, torch.device) else value
            )
        self.program.recompile()
        self.program.to(device)
        self._device = device


def check_conditions(known: Sequence[Conditions]) -> None:
    """Raise an error if one kind of call needs more and more graphs because of values in its inputs.

    Raises:
        InputError: a line has read too many different values.
    """
    values: dict[str, set[str]] = {}
    for conditions in known:
        for reading in conditions.readings:
            values.setdefault(reading.line, set()).add(str(reading.value.tolist()))
    for line, texts in values.items():
        if len(texts) >= _MAX_VALUES:
            raise InputError(
                f"{line} takes a value from the numbers in an input or a buffer, and each needs a program of its own: "
                f"there are {len(texts)} for inputs of these shapes. Keep the number in a tensor (torch.where for a "
                "branch, a fixed size with a mask for a size), or take it out of forward and pass inputs of few values."
            )


def _join(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one concatenated copy of all tensors per device and dtype, to compare them at once."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1))
    return [torch.cat(group) for group in groups.values()]


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return True if two results of `_join` are equal."""
    return len(first) == len(second) and all(
        one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        for one, other in zip(first, second, strict=True)
    )


class InputProgram:
    """The part of a graph under construction that depends only on inputs and constants, with its values.

    Every operator that is copied into the program is run on the example at once.

    Args:
        inputs: node -> name and tensor of the example; None for a tensor without data.
        held: identity of a fake tensor -> the tensor of the user's module.
    """

    def __init__(
        self,
        inputs: Mapping[fx.Node, tuple[str | ModuleTensor, Tensor | None]],
        held: Mapping[int, ModuleTensor] | None = None,
    ) -> None:
        self._inputs = dict(inputs)
        self._held = held or {}
        self._constants: dict[str, Tensor] = {}
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Any] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._flags: list[fx.Node] = []
        self._readings: list[Reading] = []
        self._read: set[fx.Node] = set()
        self._fixed: set[fx.Node] = set()  # computed from constants only
        self._named: dict[str | ModuleTensor, fx.Node] = {}

    def _sources(self, node: fx.Node, root: nn.Module) -> list[fx.Node] | None:
        """Return the nodes that a node is computed from, in order; None if not only from inputs and constants."""
        sources: set[fx.Node] = set()
        waiting = [node]
        changes = [(change, base) for change in node.graph.nodes for base in changed_memory(change)]
        while waiting:
            source = waiting.pop()
            if source in sources:
                continue
            if not self._is_known(source, root):
                return None
            sources.add(source)
            waiting += source.all_input_nodes[:1] if _is_like(source) else source.all_input_nodes
            # The graph is not functional yet: in-place changes of the memory are sources, too.
            bases = {base_of(source), source}
            waiting += [change for change, changed in changes if changed in bases]
        return sorted(sources)

    def _is_known(self, node: fx.Node, root: nn.Module) -> bool:
        """Return True if a node has a value if its operands do."""
        if node.op == "placeholder":
            return node in self._inputs
        if node.op == "get_attr":
            value = getattr(root, str(node.target), None)
            held = self._held.get(id(value))
            if held is not None:
                self._inputs[node] = held, held.numbers()
            return held is not None or _constant(value) is not None
        if node.op != "call_function":
            return False
        if not isinstance(node.target, OpOverload):
            return getattr(node.target, "__module__", "") == "_operator"
        # The program runs outside of autocast, which would cast the operands of these operators.
        cast = torch.is_autocast_enabled("cpu") and node.target._schema.name.removeprefix("aten::") in _CAST
        return node.target.namespace == "aten" and not is_random(node) and not cast

    def copy(self, node: fx.Node, root: nn.Module) -> fx.Node | None:
        """Return a node of the program with the value of a node of the graph under construction.

        Args:
            node: of that graph.
            root: the module of its constants.

        Returns:
            The node; None if the value depends on more than inputs and constants.

        Raises:
            NoNumbersError: the example has no data.
        """
        sources = self._sources(node, root)
        if sources is None:
            return None
        for source in sources:
            if source in self._inputs and self._inputs[source][1] is None:
                raise NoNumbersError(self._inputs[source][0])
        # Copies are shared only without in-place changes: another node may need the value before a change.
        changes = any(is_in_place(source) for source in sources)
        copies = {} if changes else self._copies
        for source in sources:
            if source not in copies:
                copies[source] = self._copy_node(source, root, copies, changes)
        return copies[node]

    def is_fixed(self, copy: fx.Node) -> bool:
        """Return True if a node of the program is computed from constants only."""
        return copy in self._fixed

    def value(self, copy: fx.Node) -> Any:
        """Return the value of a node of the program in the example."""
        return self._values[copy]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator to the program, and return its node."""
        node = self._graph.call_function(target, args, kwargs)
        # Equal in every call, so reading it is no condition.
        if self._fixed.issuperset(node.all_input_nodes):
            self._fixed.add(node)
        with outside_functions(), torch.no_grad():
            real_args, real_kwargs = fx.map_arg((args, kwargs), self._values.__getitem__)
            self._values[node] = target(*real_args, **real_kwargs)
        return node

    def read(self, copy: fx.Node, line: str) -> None:
        """Record that Python read the value of a node: calls with another value need another graph."""
        if copy in self._read or copy in self._fixed:
            return
        self._read.add(copy)
        # A later operator of the program may change the tensor in place.
        with outside_functions():
            value = self._values[copy].clone()
        name = f"value_{len(self._readings)}"
        self._constants[name] = value
        self._readings.append(Reading(line, value))
        self._flags.append(self._graph.call_function(_is_same, (copy, self._graph.get_attr(name))))

    def _copy_node(self, node: fx.Node, root: nn.Module, copies: Mapping[fx.Node, fx.Node], changes: bool) -> fx.Node:
        if node in self._inputs:
            name, value = self._inputs[node]
            assert value is not None
            copy = self._input(name, value)
            # Mixed precision may have cast the input; the caller's tensor must not be changed in place.
            dtype = node.meta["val"].dtype
            return self.call(aten.to.dtype, copy, dtype, False, True) if changes or value.dtype != dtype else copy
        if node.op == "get_attr":
            constant = _constant(getattr(root, str(node.target)))
            assert constant is not None
            name = f"constant_{len(self._values)}"
            copy = self._graph.get_attr(name)
            self._fixed.add(copy)
            # A copy, since the model may change its tensor in place later.
            with outside_functions():
                self._values[copy] = self._constants[name] = constant.detach().clone()
            return copy
        if _is_like(node):
            return self.call(_LIKE[node.target], copies[node.args[0]], list(node.meta["val"].shape))  # type: ignore[index]
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        return self.call(node.target, *args, **kwargs)

    def _input(self, name: str | ModuleTensor, value: Tensor) -> fx.Node:
        if name not in self._named:
            # Placeholders come first in a graph, and an input may be read late.
            with self._graph.inserting_before(next(iter(self._graph.nodes), None)):
                copy = self._graph.placeholder(f"input_{len(self._named)}")
            self._named[name] = copy
            with outside_functions():
                self._values[copy] = value.detach().to(DEVICE)
        return self._named[name]

    def has_read(self) -> bool:
        """Return True if Python read a value."""
        return bool(self._readings)

    def conditions(self) -> Conditions:
        """Return the conditions of what was read, and end the program."""
        if not self._readings:
            return Conditions()
        placeholders = self._graph.find_nodes(op="placeholder")
        names = {node: name for name, node in self._named.items()}
        # Keep all arguments, and in-place changes, which are not dead though nothing reads their results.
        self._graph.output(list(self._flags))
        self._graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_in_place(node))
        program = fx.GraphModule(self._constants, self._graph)
        return Conditions(tuple(names[node] for node in placeholders), tuple(self._readings), program)


# Operators that read only the shape of their second operand -> operators that take the shape itself.
_LIKE: Mapping[Any, Any] = {
    aten.expand_as.default: aten.expand.default,
    aten.view_as.default: aten.view.default,
    aten.reshape_as.default: aten.reshape.default,
}


def _is_like(node: fx.Node) -> bool:
    """Return True if a node only reads the shape of a tensor, and the shape is the same in all calls."""
    return node.target in _LIKE and all(isinstance(size, int) for size in node.meta["val"].shape)


_CAST = operators_under_autocast("CPU")


def _is_same(now: Tensor, value: Tensor) -> Tensor:
    """Return a flag: True if two tensors have the same shape and values."""
    return (now == value).all() if now.shape == value.shape else torch.zeros((), dtype=torch.bool, device=now.device)


def numbers_of(tensor: object) -> Tensor | None:
    """Return a tensor of the caller's if it has data; None for a fake tensor, one on the meta device, or a shard."""
    return tensor if type(tensor) is Tensor and not tensor.is_meta else None


def _constant(held: object) -> Tensor | None:
    """Return the value of a constant; None if it has no data."""
    if isinstance(held, FakeTensor):
        held = held.constant
    return held if isinstance(held, Tensor) and not held.is_meta else None
