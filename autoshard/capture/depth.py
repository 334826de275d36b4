"""Capture of a deep module from a few of its layers, whose joint graph is continued to full depth.

Three depths are captured. The third graph must equal the prediction from the first two, node by node. Then the graph of
full depth is their prediction for it, provided that they also predict a record of `forward` at full depth, which takes
little time: it shows whether `forward` differs in some layer, by its number or in the loop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import fake_mode, lazy_graph_module
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.continuation import Continuation, LayeredGraph, UnpredictableError, difference
from autoshard.capture.forward_record import record_forward
from autoshard.capture.joint import CaptureOptions, capture_call, without_garbage_collection
from autoshard.capture.joint_graph import JointGraph, JointInput, JointOutput, fingerprint
from autoshard.capture.marks import defaults_of, marked_regions
from autoshard.capture.output_history import TensorKey
from autoshard.capture.python.fake_module import fake_copy
from autoshard.capture.python.state import PythonState
from autoshard.capture.repeated_layers import Depth, LayerPlace, Repetition, find_repetitions, with_periods

logger = logging.getLogger(__name__)

# The number of periods from which this saves time: nine to fourteen periods are captured, in three or four graphs.
# Llama with 17 layers takes as long either way.
_LEAST = 20
# Periods of the first of three graphs. The first number fails for graphs in which a layer reads a layer other than the
# previous one, such as the first.
_FIRST = (2, 3)


def capture_repeated(call: BoundCall, options: CaptureOptions, least: int = _LEAST) -> JointGraph:
    """Capture a call of a module for planning, in a time almost independent of the number of equal layers.

    Args:
        call, options: as for `capture_call`.
        least: the number of periods of layers from which only a few are captured.

    Returns:
        The graph that `capture_call` returns, except that its `state` is empty if layers were continued: such a graph
        does not distinguish calls.

    Raises:
        CaptureError, InputError: as for `capture_call`.
    """
    module = call.module
    repetitions = find_repetitions(module, max(least, max(_FIRST) + 2)) if not defaults_of(module) else ()
    if repetitions:
        graph = None
        # The capture of the whole module raises errors about the module, with the right names.
        try:
            with without_garbage_collection():
                graph = _LayerSeries(call, options, repetitions).capture()
        except Exception as error:
            logger.info("layers are captured one by one: %s: %s", type(error).__name__, error)
        if graph is not None:
            return graph
    return capture_call(call, options)


class _LayerSeries:
    """The captures of a module with a few of its layers.

    call: the call of the module.
        call: of the module.
        options: as for `capture_call`; this series reports the progress.
        repetitions: the repeated layers.
    """

    def __init__(self, call: BoundCall, options: CaptureOptions, repetitions: Sequence[Repetition]) -> None:
        self._call = call
        self._begin = options.progress
        self._options = replace(options, progress=lambda _: None)
        self._repetitions = repetitions
        self._count = repetitions[0].count
        self._mode = fake_mode()
        self._twin = replace(call, module=fake_copy(call.module, self._mode))
        self._graphs: dict[int, JointGraph] = {}
        self._warnings: dict[int, list[warnings.WarningMessage]] = {}

    def capture(self) -> JointGraph | None:
        """Return the graph of full depth; None if a few layers do not predict it."""
        for first in _FIRST:
            try:
                third = self._predict(first, first + 2)
                self._check(third, self._graph(first + 2))
                graph = self._predict(first, self._count)
            except UnpredictableError as error:
                logger.info("%d layers predict no others: %s", first + 1, error)
                continue
            self._check_forward(first)
            for warning in self._warnings[first + 2]:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            return replace(graph, signature=self._call.signature, model=type(self._call.module).__name__)
        return None

    def _graph(self, count: int) -> JointGraph:
        if count not in self._graphs:
            self._begin(f"{count} of {self._count} layers")
            with warnings.catch_warnings(record=True) as raised, self._periods(count):
                self._graphs[count] = capture_call(self._twin, self._options)
            self._warnings[count] = raised
        return self._graphs[count]

    def _periods(self, count: int) -> contextlib.AbstractContextManager[object]:
        return with_periods(self._twin.module, self._repetitions, count)

    def _predict(self, first: int, count: int) -> JointGraph:
        graph = self._graph(first + 1)
        second = self._layered_graph(graph, first + 1)
        return _continue_graph(
            Continuation(self._layered_graph(self._graph(first), first), second, count), second, graph
        )

    def _layered_graph(self, graph: JointGraph, count: int) -> LayeredGraph:
        depth = Depth(self._repetitions, count)
        layered = LayeredGraph(graph.graph, {item.node: item.name for item in graph.inputs}, depth)
        for item in graph.inputs:
            # A record of forward contains the numbers of constants in code only.
            if item.kind == "constant" and layered.places[item.node] is not None and item.node not in layered.lifted:
                raise UnpredictableError(f"layers have constants of their own, such as {item.name}")
        if any(node.meta.get("task_graph") for node in layered.nodes):
            raise UnpredictableError("the model has task graphs")
        # A record of forward contains no marks.
        if any(marked_regions(node) for node in layered.nodes):
            raise UnpredictableError("the model's code marks what runs again, is kept or moved")
        return layered

    def _check(self, predicted: JointGraph, captured: JointGraph) -> None:
        """Raise an `UnpredictableError` unless a graph equals its prediction."""
        state = captured.state
        outside = [mutation.path for mutation in state.mutations if not mutation.place.is_inside]
        if outside or state.hooks or state.observed:
            # A record of forward would make the same changes, with fake tensors, and nothing would undo them.
            raise UnpredictableError(f"forward changes objects outside of the module, or hooks look at it: {outside}")
        where = difference(predicted.graph, captured.graph)
        if where is not None:
            raise UnpredictableError(where)
        for name in ("inputs", "outputs"):
            items = zip(getattr(predicted, name), getattr(captured, name), strict=True)
            for item, like in items:
                if _description(item) != _description(like):
                    raise UnpredictableError(f"{_description(item)} and {_description(like)}")
        if list(predicted.aliases.items()) != list(captured.aliases.items()):
            raise UnpredictableError("tied tensors differ")
        for name in ("dynamic", "call", "result", "recomputed", "histories"):
            if getattr(predicted, name) != getattr(captured, name):
                raise UnpredictableError(f"{name} differs")
        assert predicted.fingerprint == captured.fingerprint

    def _check_forward(self, first: int) -> None:
        """Raise an `UnpredictableError` unless `forward` at full depth runs as predicted from a few layers."""
        self._begin(f"forward of {self._count} layers")
        records = []
        for count in (first, first + 1, self._count):
            with self._periods(count), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record = record_forward(self._twin, self._repetitions, self._mode)
            records.append((record, LayeredGraph(record.graph, record.names, Depth(self._repetitions, count))))
        layered = [each for _, each in records]
        continuation = Continuation(layered[0], layered[1], self._count)
        predicted = continuation.graph()
        second = layered[1]
        results: Any = second.graph.output_node().args[0]
        _output(predicted, [continuation.result(None, -1, node) for node in results], second.graph)
        where = difference(predicted, records[2][0].graph)
        if where is not None:
            raise UnpredictableError(f"forward of {self._count} layers: {where}")


def _continue_graph(continuation: Continuation, second: LayeredGraph, graph: JointGraph) -> JointGraph:
    """Return the joint graph that continues others, of which `graph` is the second."""
    nodes = continuation.graph()

    def locate(name: str) -> LayerPlace | None:
        return second.depth.locate(name)[0]

    places = {item.name: second.places[item.node] for item in graph.inputs}
    names: dict[tuple[str, int], str] = {}  # names of constants, by old name and new period
    inputs = []
    for item, period in continuation.order(graph.inputs, lambda item: second.places[item.node]):
        name = continuation.path(item.name, period)
        if item.node in second.lifted:
            name = name.removesuffix(second.lifted[item.node]) + continuation.constant(item.node, period)
            names[item.name, period] = name
        inputs.append(replace(item, name=name, node=continuation.result(second.places[item.node], period, item.node)))
    outputs = tuple(
        replace(
            item,
            name=continuation.path(item.name, period),
            node=None if item.node is None else continuation.result(locate(item.name), period, item.node),
        )
        for item, period in continuation.order(graph.outputs, lambda item: locate(item.name))
    )
    _output(nodes, [item.node for item in outputs], graph.graph)
    aliases = {
        continuation.path(name, period): tuple(continuation.path(alias, period) for alias in names)
        for (name, names), period in continuation.order(graph.aliases.items(), lambda item: locate(item[0]))
    }
    return replace(
        graph,
        graph_module=lazy_graph_module(graph.graph_module, nodes),
        inputs=tuple(inputs),
        outputs=outputs,
        aliases=aliases,
        fingerprint=fingerprint(inputs, outputs, nodes),
        state=PythonState(),
        histories=replace(
            graph.histories, memory=_continued_memory(continuation, graph.histories.memory, places, names)
        ),
    )


def _continued_memory(
    continuation: Continuation,
    memory: Mapping[TensorKey, int],
    known: Mapping[str, LayerPlace | None],
    constants: Mapping[tuple[str, int], str],
) -> dict[TensorKey, int]:
    """Return, for the tensors at full depth, a number shared by those in the same memory.

    Args:
        continuation: the continuation to full depth.
        memory: these numbers in the second graph.
        known: the places of inputs.
        constants: the new names of constants by their old names and new periods.
    """

    def new_name(name: str, period: int) -> str:
        return constants.get((name, period)) or continuation.path(name, period)

    first: dict[int, TensorKey] = {}
    for key, number in memory.items():
        first.setdefault(number, key)
    places = {key: None if key[0] == "output" else known.get(key[1]) for key in memory}
    continued: dict[TensorKey, int] = {}
    numbers = itertools.count()
    for key, period in continuation.order(memory, places.__getitem__):
        kind, name = first[memory[key]]
        if places[kind, name] not in (places[key], None):
            raise UnpredictableError(f"{key[1]} lies in memory of {name}")
        holder = kind, new_name(name, period)
        new = continued[holder] if holder in continued else next(numbers)
        continued[key[0], new_name(key[1], period)] = new
    return continued


def _output(graph: fx.Graph, nodes: Sequence[fx.Node | None], like: fx.Graph) -> None:
    """Add an output node with the name of another graph's."""
    graph.create_node("output", "output", (tuple(nodes),), name=like.output_node().name)


def _description(item: JointInput | JointOutput) -> object:
    value: object = item.value if isinstance(item, JointInput) else item.tangent
    if isinstance(value, torch.Tensor):
        value = (value.shape, value.dtype, value.tolist())
    return (item.kind, item.name, None if item.node is None else item.node.name, value)
