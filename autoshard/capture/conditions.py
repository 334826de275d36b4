"""Values that Python takes from the numbers in inputs while `forward` is captured, and a program that reads them again.

A graph holds the way that the example took. A call for which one of these values is another one asks for another graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import FakeTensor, OpOverload, operators_under_autocast, outside_functions
from autoshard.capture.fake_module import DEVICE
from autoshard.capture.simplify import is_random
from autoshard.errors import InputError

aten = torch.ops.aten

_MOST_VALUES = 16
"""Values of one line for which a kind of call has programs."""

_DETACHES = aten.detach_.default  # changes no number, and follows every constant that is written in `forward`


class NoNumbersError(Exception):
    """An input, by its name, is asked for numbers that the example does not have."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that Python took from the numbers in inputs.

    Attributes:
        line: the user's, such as `model.py:12 (if mask.all():)`.
        value: the example's.
    """

    line: str
    value: Tensor


@dataclass(slots=True, eq=False)
class Conditions:
    """What a captured graph took from the numbers in its inputs.

    Attributes:
        inputs: names of the inputs that are read, in the order of the program's arguments.
        readings: the values that were taken.
        program: from these inputs to flags, one for each reading: whether the value is the example's.
    """

    inputs: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()
    program: fx.GraphModule | None = None
    _device: torch.device = DEVICE

    def flags(self, tensors: Mapping[str, Tensor]) -> list[bool]:
        """Whether each value is the example's in a call with these inputs, found with one synchronisation."""
        if self.program is None:
            return []
        passed = [tensors[name].detach() for name in self.inputs]
        given = [one.full_tensor() if isinstance(one, DTensor) else one for one in passed]
        if any(tensor.is_meta for tensor in given):
            return [False] * len(self.readings)
        self._move(given[0].device)
        with torch.no_grad(), outside_functions():
            flags: list[bool] = torch.stack(self.program(*given)).tolist()
        return flags

    def hold(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a call with these inputs would be captured as the same graph."""
        return all(self.flags(tensors))

    def changes(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """The lines whose values are others in a call with these inputs, as subjects of an error, and what that is."""
        if self.program is not None:
            for reading, flag in zip(self.readings, self.flags(tensors), strict=True):
                if not flag:
                    yield f"the value at {reading.line}", "another than before"

    def _move(self, device: torch.device) -> None:
        """Have the program run where the inputs are."""
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
    """`InputError` where one kind of call asks for one graph after another, because of the numbers in its inputs."""
    values: dict[str, set[str]] = {}
    for conditions in known:
        for reading in conditions.readings:
            values.setdefault(reading.line, set()).add(str(reading.value.tolist()))
    for line, found in values.items():
        if len(found) >= _MOST_VALUES:
            raise InputError(
                f"{line} takes a value from the numbers in an input, and each needs a program of its own: there are "
                f"{len(found)} for inputs of these shapes. Keep the number in a tensor (torch.where for a branch, a "
                "fixed size with a mask for a size), or take it out of forward and pass inputs of few values."
            )


class InputProgram:
    """The part of a graph that is being written which is computed from inputs and constants alone, with its values.

    Args:
        inputs: names and tensors of the example, by the nodes that stand for them; no tensor where it has no numbers.
        root: holds the constants of the graph.
    """

    def __init__(self, inputs: Mapping[fx.Node, tuple[str, Tensor | None]], root: nn.Module) -> None:
        self._inputs = inputs
        self._root = root
        self._constants: dict[str, Tensor] = {}
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Any] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._flags: list[fx.Node] = []
        self._readings: list[Reading] = []
        self._read: set[fx.Node] = set()
        self._fixed: set[fx.Node] = set()  # made of constants alone
        self._named: dict[str, fx.Node] = {}

    def sources(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes that make the numbers of one, in order; None where more than inputs and constants make them."""
        found: set[fx.Node] = set()
        waiting, changes = [node], list(_changes(node.graph))
        while waiting:
            source = waiting.pop()
            if source in found:
                continue
            if not self._is_known(source):
                return None
            found.add(source)
            waiting += source.all_input_nodes[:1] if _is_like(source) else source.all_input_nodes
            bases = {_base(source), source}
            waiting += [change for change, changed in changes if changed in bases]
        return sorted(found)

    def _is_known(self, node: fx.Node) -> bool:
        """Whether a node has numbers where its operands have."""
        if node.op == "placeholder":
            return node in self._inputs
        if node.op == "get_attr":
            return _constant(getattr(self._root, str(node.target), None)) is not None
        if node.op != "call_function":
            return False
        if not isinstance(node.target, OpOverload):
            return getattr(node.target, "__module__", "") == "_operator"
        cast = torch.is_autocast_enabled("cpu") and node.target._schema.name.removeprefix("aten::") in _CAST
        return node.target.namespace == "aten" and not is_random(node) and not cast

    def copy(self, node: fx.Node) -> fx.Node | None:
        """A node of the program with the value of one of the graph that is being written; None where it has none.

        Raises:
            NoNumbersError: the example has no numbers.
        """
        sources = self.sources(node)
        if sources is None:
            return None
        for source in sources:
            if source in self._inputs and self._inputs[source][1] is None:
                raise NoNumbersError(self._inputs[source][0])
        changes = any(_is_change(source) for source in sources)
        copies = {} if changes else self._copies
        for source in sources:
            if source not in copies:
                copies[source] = self._copy_node(source, copies, changes)
        return copies[node]

    def is_fixed(self, copy: fx.Node) -> bool:
        """Whether a node of the program is made of constants alone."""
        return copy in self._fixed

    def value(self, copy: fx.Node) -> Any:
        """The example's value of a node of the program."""
        return self._values[copy]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A further operator of the program."""
        node = self._graph.call_function(target, args, kwargs)
        if self._fixed.issuperset(node.all_input_nodes):
            self._fixed.add(node)
        with outside_functions(), torch.no_grad():
            real_args, real_kwargs = fx.map_arg((args, kwargs), self._values.__getitem__)
            self._values[node] = target(*real_args, **real_kwargs)
        return node

    def read(self, copy: fx.Node, line: str) -> None:
        """Note that Python took the value of a node: calls for which it is another one have other graphs."""
        if copy in self._read or copy in self._fixed:
            return
        self._read.add(copy)
        with outside_functions():
            value = self._values[copy].clone()
        name = f"value_{len(self._readings)}"
        self._constants[name] = value
        self._readings.append(Reading(line, value))
        self._flags.append(self._graph.call_function(_is_same, (copy, self._graph.get_attr(name))))

    def _copy_node(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node], changes: bool) -> fx.Node:
        if node.op == "placeholder":
            name, value = self._inputs[node]
            assert value is not None
            copy = self._input(name, value)
            wanted = node.meta["val"].dtype
            return self.call(_cast_copy, copy, wanted) if changes or value.dtype != wanted else copy
        if node.op == "get_attr":
            constant = _constant(getattr(self._root, str(node.target)))
            assert constant is not None
            name = f"constant_{len(self._values)}"
            copy = self._graph.get_attr(name)
            self._fixed.add(copy)
            with outside_functions():
                self._values[copy] = self._constants[name] = constant.detach().clone()
            return copy
        if _is_like(node):
            return self.call(_LIKE[node.target], copies[node.args[0]], list(node.meta["val"].shape))  # type: ignore[index]
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        return self.call(node.target, *args, **kwargs)

    def _input(self, name: str, value: Tensor) -> fx.Node:
        if name not in self._named:
            with self._graph.inserting_before(next(iter(self._graph.nodes), None)):
                copy = self._graph.placeholder(f"input_{len(self._named)}")
            self._named[name] = copy
            with outside_functions():
                self._values[copy] = value.detach().to(DEVICE)
        return self._named[name]

    def has_read(self) -> bool:
        """Whether Python took a value."""
        return bool(self._readings)

    def conditions(self) -> Conditions:
        """What was read."""
        if not self._readings:
            return Conditions()
        placeholders = self._graph.find_nodes(op="placeholder")
        names = {node: name for name, node in self._named.items()}
        self._graph.output(list(self._flags))
        self._graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _is_change(node))
        program = fx.GraphModule(self._constants, self._graph)
        return Conditions(tuple(names[node] for node in placeholders), tuple(self._readings), program)


_LIKE: Mapping[Any, Any] = {
    aten.expand_as.default: aten.expand.default,
    aten.view_as.default: aten.view.default,
    aten.reshape_as.default: aten.reshape.default,
}
"""Operators that take no more than the shape of their second operand, by those that are told the shape."""


def _is_like(node: fx.Node) -> bool:
    """Whether a node takes the shape of a tensor, and that shape is the same in all calls."""
    return node.target in _LIKE and all(isinstance(size, int) for size in node.meta["val"].shape)


_CAST = operators_under_autocast("CPU")


def _cast_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An input as the captured graph takes it, which a policy of precisions may have cast, to be changed in place."""
    return tensor.to(dtype, copy=True)


def _is_same(now: Tensor, value: Tensor) -> Tensor:
    """A flag: whether two tensors have the same shape and numbers."""
    return (now == value).all() if now.shape == value.shape else torch.zeros((), dtype=torch.bool, device=now.device)


def _constant(held: object) -> Tensor | None:
    """The numbers of a constant."""
    if isinstance(held, FakeTensor):
        held = held.constant
    return held if isinstance(held, Tensor) and not held.is_meta else None


def _is_change(node: fx.Node) -> bool:
    """Whether a node changes numbers in place."""
    target = node.target
    return isinstance(target, OpOverload) and target is not _DETACHES and target._schema.is_mutable


def _changes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes that change numbers in place, and what made the memory that they change."""
    for node in graph.nodes:
        if _is_change(node):
            for place, argument in enumerate(node.target._schema.arguments):
                given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, fx.Node):
                    yield node, _base(given)


def _base(node: fx.Node) -> fx.Node:
    """What made the memory that the value of a node lies in, or may lie in."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        target = node.target
        returns: Sequence[Any] = target._schema.returns if isinstance(target, OpOverload) else ()
        if target is not operator.getitem and not any(one.alias_info is not None for one in returns):
            break
        node = node.args[0]
    return node
