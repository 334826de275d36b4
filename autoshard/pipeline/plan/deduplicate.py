"""Stages that are alike but for their names: what was decided for one serves all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.capture.fingerprint import fingerprint
from autoshard.capture.joint import JointGraph
from autoshard.patterns.decisions import Decisions


def structural_fingerprint(graph: JointGraph) -> str:
    """A hash that is the same for graphs which differ in the names of parameters, buffers and inputs alone."""
    number = {item.name: str(place) for place, item in enumerate(graph.inputs)}
    inputs = [replace(item, name=number[item.name]) for item in graph.inputs]
    outputs = [replace(item, name=number.get(item.name, item.name), tangent=None) for item in graph.outputs]
    return fingerprint(inputs, outputs, graph.graph)


def task_graph_marks(graph: JointGraph) -> tuple[tuple[str, int] | None, ...]:
    """The primitive of every operator, and which of the graph's task graphs it belongs to, counted as they come."""
    found = [graph.task_graph(node) for node in graph.graph.nodes]
    number = {one: place for place, one in enumerate(dict.fromkeys(found))}
    return tuple(None if one is None else (str(one.primitive), number[one]) for one in found)


def rename_decisions(decisions: Decisions, made: JointGraph, wanted: JointGraph) -> Decisions:
    """Decisions for one graph as those for another that is alike: nodes stand in the same order in both."""
    nodes = {one.name: other.name for one, other in zip(made.graph.nodes, wanted.graph.nodes, strict=True)}
    outputs = {one.name: other.name for one, other in zip(made.outputs, wanted.outputs, strict=True)}
    return Decisions(
        choices={nodes[name]: choices for name, choices in decisions.choices.items()},
        rest={nodes[name]: spec for name, spec in decisions.rest.items()},
        outputs={outputs[name]: spec for name, spec in decisions.outputs.items()},
        hubs={_rename_key(key, nodes): spec for key, spec in decisions.hubs.items()},
    )


def _rename_key(key: str, nodes: Mapping[str, str]) -> str:
    """The key of a hub: the name of a value, which names a node and perhaps one of its results, and a phase."""
    value, at, phase = key.partition("@")
    node, colon, index = value.partition(":")
    return f"{nodes[node]}{colon}{index}{at}{phase}"
