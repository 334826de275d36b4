"""Continuation of graphs in depth: graphs of a module with a and a + 1 periods of layers predict one with more.

The nodes of the last period but one are inserted again. A copied node reads what the original node reads: in the same
period, in an adjacent one, or in a fixed one. Names contain counters; these continue as from the first graph to the
second.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import fx

from autoshard.capture.repeated_layers import Depth, LayerPlace
from autoshard.size import DynamicSize, Ratio

Item = TypeVar("Item")

# Inputs of a graph without gradients are named arg0_1, arg1_1 and so on; other nodes mul, mul_1 and so on. Constants of
# an export are named lifted_tensor_0 and so on, after the path of a module.
_NUMBER = re.compile(
    r"(?P<head>arg)(?P<place>\d+)(?P<tail>_1)|(?P<lifted>lifted_tensor_)(?P<which>\d+)|(?P<base>.*?)(?:_(?P<number>\d+))?"
)
_LIFTED = re.compile(r"(?P<path>.*\.)?(?P<name>lifted_tensor_\d+)")
# The relevant metadata of joint graph nodes. Other entries of `meta` belong to the trace.
_CARRIED = (
    *("val", "sizes", "partitioner_tag", "module_path", "task_graph", "stack_trace", "custom", "is_gradient_acc"),
    *("nn_module_stack", "fwd_nn_module_stack", "gradients_on"),
)


class UnpredictableError(Exception):
    """A graph cannot be continued: its layers do not repeat as continuation requires."""


class LayeredGraph:
    """A graph with the period of every node.

    Args:
        graph: its nodes have `meta["module_path"]`, and the modules of a call in `meta["nn_module_stack"]` or
            `meta["fwd_nn_module_stack"]`.
        names: the paths of the tensors in placeholders.
        depth: the periods of the module.

    Attributes:
        places: the period of every node; None outside periods.
        keys: for every node, a key shared by corresponding nodes of other periods and graphs.
        at: nodes by place and key.
        lifted: for constants of the export, the last part of their names, which contains a number.
    """

    def __init__(self, graph: fx.Graph, names: Mapping[fx.Node, str], depth: Depth) -> None:
        self.graph = graph
        self.depth = depth
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.places: dict[fx.Node, LayerPlace | None] = {}
        matches = [(node, _LIFTED.fullmatch(name)) for node, name in names.items()]
        self.lifted = {node: match["name"] for node, match in matches if match}
        names = {**names, **{node: match["path"] or "" for node, match in matches if match}}
        self._locate(names)
        self.keys: dict[fx.Node, Hashable] = {}
        self.at: dict[tuple[LayerPlace | None, Hashable], fx.Node] = {}
        counts: Counter[Hashable] = Counter()
        for node in self.nodes:
            path = names.get(node, "") if node.op == "placeholder" else node.meta["module_path"]
            target = "" if node.op == "placeholder" else node.target
            key = (node.op, node.meta.get("partitioner_tag"), depth.locate(path)[1], target)
            place = self.places[node]
            self.keys[node] = (*key, counts[place, key])
            counts[place, key] += 1
            self.at[place, self.keys[node]] = node

    def _locate(self, names: Mapping[fx.Node, str]) -> None:
        position: dict[fx.Node, int] = {}
        for index, node in enumerate(self.nodes):
            position[node] = index
            if node.op == "placeholder":
                self.places[node] = self.depth.locate(names.get(node, ""))[0]
                continue
            stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
            if stack:
                places = (self.depth.locate(path)[0] for path, _ in reversed(stack.values()))
                self.places[node] = next((place for place in places if place is not None), None)
            else:
                latest = max(node.all_input_nodes, key=position.__getitem__, default=None)
                self.places[node] = None if latest is None else self.places[latest]
        self._locate_nodes_between()
        for node in self.lifted:
            if self.places[node] is None:  # made in a loop over layers
                self.places[node] = next((self.places[user] for user in node.users if user.op != "output"), None)

    def _locate_nodes_between(self) -> None:
        """Assign nodes between two adjacent periods, such as a sum in the loop over layers, to the first of them."""
        called = (node for node in self.nodes if node.op != "placeholder")
        chunks = [(place, list(nodes)) for place, nodes in groupby(called, self.places.__getitem__)]
        for (before, _), (place, nodes), (after, _) in zip(chunks, chunks[1:], chunks[2:], strict=False):
            if place is None and before is not None and after is not None and _step(before, after):
                self.places.update(dict.fromkeys(nodes, before))


def _step(first: LayerPlace | None, second: LayerPlace | None) -> int:
    """Return 1 if the second place is right after the first in the same repetition, -1 if right before, else 0."""
    if first is None or second is None or first.repetition != second.repetition:
        return 0
    return second.period - first.period if abs(second.period - first.period) == 1 else 0


class Continuation:
    """The continuation of two graphs.

    Args:
        first: the graph of a module with a periods of layers.
        second: the graph with a + 1 periods.
        count: the periods of the graph to make, more than a + 1.

    Raises:
        UnpredictableError: (in all methods) the graphs do not begin a regular series.
    """

    def __init__(self, first: LayeredGraph, second: LayeredGraph, count: int) -> None:
        assert second.depth.count == first.depth.count + 1 < count
        self._first = first
        self._second = second
        self._count = count
        self._added = count - second.depth.count
        self._template = second.depth.count - 2  # the period to copy
        self._new: dict[tuple[LayerPlace | None, Hashable], fx.Node] = {}

    def order(self, items: Iterable[Item], place_of: Callable[[Item], LayerPlace | None]) -> Iterator[tuple[Item, int]]:
        """Yield the items of a sequence, those of the copied periods included, each with its new period.

        Args:
            items: in the order of the second graph.
            place_of: returns the place of an item.

        Returns:
            Items with the number of their period; -1 outside periods.
        """
        chunks = [(place, list(each)) for place, each in groupby(items, place_of)]
        for index, (place, each) in enumerate(chunks):
            if place is None:
                yield from ((item, -1) for item in each)
            elif place.period != self._template:
                yield from ((item, self._new_period(place.period)) for item in each)
            else:
                copies = range(self._template, self._template + self._added + 1)
                before = chunks[index - 1][0] if index else None
                after = chunks[index + 1][0] if index + 1 < len(chunks) else None
                steps = {_step(before, place), _step(place, after)} - {0}
                if len(steps) != 1:
                    raise UnpredictableError(f"layers come in no order at {place}")
                for period in copies if steps == {1} else reversed(copies):
                    yield from ((item, period) for item in each)

    def graph(self) -> fx.Graph:
        """Return the graph, without an output node."""
        new = fx.Graph()
        second = self._second
        for node, period in self.order(second.nodes, second.places.__getitem__):
            if node.op not in ("placeholder", "call_function"):
                raise UnpredictableError(f"{node.op} {node.target} may differ from layer to layer")
            operands = iter(self._operands(node, period))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(operands))  # noqa: B023
            name = self._continued_text(node, period, _name_of)
            target = name if node.op == "placeholder" else node.target
            copy = new.create_node(node.op, target, args, kwargs, name)
            if copy.name != name:
                raise UnpredictableError(f"two nodes would have the name {name}")
            copy.meta = self._meta(node, period)
            self._new[self._place(node, period), second.keys[node]] = copy
        return new

    def result(self, place: LayerPlace | None, period: int, node: fx.Node) -> fx.Node:
        """Return the new node for a result of the graph.

        Args:
            place: the place of the result in the second graph, such as that of the parameter whose gradient it is.
            period: the new period.
            node: a node of the second graph.
        """
        return self._find(self._source(place, period, node), self._second.keys[node])

    def path(self, path: str, period: int) -> str:
        """Return the path of a module or tensor of the second graph in a period; -1 outside periods."""
        return self._second.depth.move(path, None if period < 0 else period, self._count)

    def _place(self, node: fx.Node, period: int) -> LayerPlace | None:
        place = self._second.places[node]
        return None if place is None else LayerPlace(place.repetition, period)

    def _new_period(self, period: int) -> int:
        """Return the new number of a period: those after the template move to the end."""
        return period if period <= self._template else period + self._added

    def _find(self, place: LayerPlace | None, key: Hashable) -> fx.Node:
        node = self._new.get((place, key))
        if node is None:
            raise UnpredictableError(f"{place} has no node {key}")
        return node

    def _operands(self, node: fx.Node, period: int) -> list[fx.Node]:
        """Return the new nodes that a node reads in a period."""
        place, key = self._second.places[node], self._second.keys[node]
        sources = [
            (self._source(place, period, operand, self._is_shared(node, operand)), self._second.keys[operand])
            for operand in _operands(node)
        ]
        if place is not None and place.period == self._template and period < self._template + self._added:
            # A copy is followed by another copy, but the template by the last period, which may lack nodes. So a copy
            # reads from the next period what the period before the template reads from the template.
            before = self._second.at.get((LayerPlace(place.repetition, place.period - 1), key))
            operands = [] if before is None else _operands(before)
            for index, operand in enumerate(operands if len(operands) == len(sources) else ()):
                if self._second.places[operand] == place:
                    sources[index] = LayerPlace(place.repetition, period + 1), self._second.keys[operand]
        return [self._find(*source) for source in sources]

    def _source(
        self, place: LayerPlace | None, period: int, operand: fx.Node, is_shared: bool = False
    ) -> LayerPlace | None:
        """Return the place of a reader's operand in the new graph.

        Args:
            place: the reader's place in the second graph.
            period: the reader's new period.
            operand: the operand in the second graph.
            is_shared: True if readers in other periods read the same operand.
        """
        source = self._second.places[operand]
        if source is None:
            return None
        if place is not None and place.repetition == source.repetition and not is_shared:
            distance = source.period - place.period
            is_template = place.period == self._template
            if (is_template and abs(distance) <= 1) or (source.period == self._template and abs(distance) == 1):
                return LayerPlace(source.repetition, period + distance)  # in the same period, or in an adjacent one
        return LayerPlace(source.repetition, self._new_period(source.period))

    def _is_shared(self, node: fx.Node, operand: fx.Node) -> bool:
        """Return True if the corresponding reader, one period further away from the operand, reads it, too."""
        place, source = self._second.places[node], self._second.places[operand]
        if place is None or source is None or place.repetition != source.repetition:
            return False
        away = LayerPlace(place.repetition, 2 * place.period - source.period)
        other = self._second.at.get((away, self._second.keys[node]))
        return away != place and other is not None and operand in other.all_input_nodes

    def constant(self, node: fx.Node, period: int) -> str:
        """Return the last part of the name of an export's constant in a new period."""
        return self._continued_text(node, period, _constant_of)

    def _continued_text(self, node: fx.Node, period: int, text_of: Callable[[LayeredGraph, fx.Node], str]) -> str:
        """Return a text of a node with the number that it has in a period.

        Args:
            node: a node of the second graph.
            period: the new period.
            text_of: returns a text, such as the name, of a node of one of the graphs.
        """
        place, key = self._second.places[node], self._second.keys[node]
        base, number = _split_number(text_of(self._second, node))
        numbers = _Numbers(self._first, self._second, key, base, text_of)
        if place is None or place.period < self._template:
            number += self._added * numbers.shift(place, place)
        elif place.period > self._template:
            number += self._added * numbers.shift(LayerPlace(place.repetition, place.period - 1), place)
        else:
            before = LayerPlace(place.repetition, place.period - 1)
            number += self._added * numbers.shift(before, before) + (period - place.period) * numbers.stride(place)
        if number < 0:
            raise UnpredictableError(f"{node.name} would get the number {number}")
        return base.replace("#", str(number)) if "#" in base else f"{base}_{number}" if number else base

    def _meta(self, node: fx.Node, period: int) -> dict[str, Any]:
        meta = {key: node.meta[key] for key in _CARRIED if key in node.meta}
        if "module_path" in meta:
            meta["module_path"] = self.path(meta["module_path"], period)
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if meta.get(key):
                meta[key] = {
                    name.replace(path, self.path(path, period)) if path else name: (self.path(path, period), kind)
                    for name, (path, kind) in meta[key].items()
                }
        return meta


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers in texts of corresponding nodes of two graphs.

    Attributes:
        first, second: the graphs.
        key: the key of the nodes.
        base: the texts without their numbers.
        text_of: returns the text of a node.
    """

    first: LayeredGraph
    second: LayeredGraph
    key: Hashable
    base: str
    text_of: Callable[[LayeredGraph, fx.Node], str]

    def shift(self, first: LayerPlace | None, second: LayerPlace | None) -> int:
        """Return the increase of the number from a place in the first graph to a place in the second."""
        return self._number(self.second, second) - self._number(self.first, first)

    def stride(self, place: LayerPlace) -> int:
        """Return the increase of the number from one period to the next, starting at a place."""
        before, behind = (LayerPlace(place.repetition, place.period + step) for step in (-1, 1))
        if (behind, self.key) not in self.second.at:
            # The last period may lack a node, such as the sum of a gradient with that of the next period.
            return self._number(self.second, place) - self._number(self.second, before)
        # An added period increases the numbers of all nodes that are made later: in the forward half those of later
        # periods, in the backward half those of earlier ones.
        return self.shift(place, behind) - self.shift(before, before)

    def _number(self, graph: LayeredGraph, place: LayerPlace | None) -> int:
        node = graph.at.get((place, self.key))
        found = None if node is None else _split_number(self.text_of(graph, node))
        if found is None or found[0] != self.base:
            raise UnpredictableError(f"{place} has no node {self.key} of the name {self.base}")
        return found[1]


def _name_of(graph: LayeredGraph, node: fx.Node) -> str:
    return node.name


def _constant_of(graph: LayeredGraph, node: fx.Node) -> str:
    return graph.lifted[node]


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes in the arguments of a node, with repetitions."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands


@functools.lru_cache(maxsize=2**16)
def _split_number(name: str) -> tuple[str, int]:
    """Return a node's name without its number, and the number, or 0; an inner number is replaced by #."""
    match = _NUMBER.fullmatch(name)
    assert match is not None
    if match["head"]:
        return f"{match['head']}#{match['tail']}", int(match["place"])
    if match["lifted"]:
        return f"{match['lifted']}#", int(match["which"])
    return match["base"], int(match["number"] or 0)


def difference(first: fx.Graph, second: fx.Graph) -> str | None:
    """Return a short description of where two graphs differ; None if they are equal node by node.

    Names, operators, arguments and relevant metadata are compared, in order.
    """
    if len(first.nodes) != len(second.nodes):
        return f"{len(first.nodes)} and {len(second.nodes)} nodes"
    pairs: dict[fx.Node, fx.Node] = {}
    for node, like in zip(first.nodes, second.nodes, strict=True):
        if (node.op, node.name, node.target) != (like.op, like.name, like.target):
            return f"{node.format_node()} and {like.format_node()}"
        if not _is_equal((node.args, node.kwargs), (like.args, like.kwargs), pairs):
            return f"arguments of {node.format_node()} and {like.format_node()}"
        # The output node has no metadata.
        for key in _CARRIED if node.op != "output" else ():
            if not _is_equal(node.meta.get(key), like.meta.get(key), pairs):
                return f"{key} of {node.name}: {node.meta.get(key)} and {like.meta.get(key)}"
        pairs[node] = like
    return None


def _is_equal(first: Any, second: Any, pairs: Mapping[fx.Node, fx.Node]) -> bool:
    """Return True if nested values are equal: corresponding nodes, tensors of equal shape, layout and dtype."""
    if first is second:
        return True
    if isinstance(first, fx.Node):
        return pairs.get(first) is second
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        # Without the offset in memory: a fake result has that of some operand.
        return (
            first.shape == second.shape
            and first.stride() == second.stride()
            and first.dtype == second.dtype
            and first.device == second.device
            and first.requires_grad == second.requires_grad
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(functools.partial(_is_equal, pairs=pairs), first, second))
    if isinstance(first, dict):
        same_keys = list(first) == list(second)
        return same_keys and all(_is_equal(first[key], second[key], pairs) for key in first)
    if isinstance(first, slice):
        return _is_equal((first.start, first.stop, first.step), (second.start, second.stop, second.step), pairs)
    if isinstance(first, (DynamicSize, Ratio)):
        return bool(first.expr == second.expr)
    # As text, so that nan equals nan, and 0.0 differs from -0.0.
    return repr(first) == repr(second)
