"""Copies of forward operators in the backward half, which recompute values just before they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture._torch import lazy_graph_module
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.nodes import closure

aten = torch.ops.aten

RECOMPUTES = "recomputes"
"""Key in `node.meta` of the name of the forward node that a node of the backward half recomputes."""

_AGAIN = "_again"  # suffix of the names of such nodes

STATISTICS = frozenset(
    {aten._native_batch_norm_legit_functional.default, aten._batch_norm_with_update_functional.default}
)
"""Operators whose results, except the new running statistics, do not depend on the old statistics."""


def rerun_name(name: str) -> str:
    """Return the name of an operator's, or a value's, copy in the backward half."""
    operator_name, separator, result = name.partition(":")
    return f"{operator_name}{_AGAIN}{separator}{result}"


def copy_graph(graph: JointGraph) -> tuple[JointGraph, dict[fx.Node, fx.Node]]:
    """Return a copy of a joint graph with the same node names, and the copy of every node."""
    new, at = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        # Plans and constraints refer to nodes by name, so names must not change.
        at[node] = new.node_copy(node, at.__getitem__)
        assert at[node].name == node.name, f"{node.name} became {at[node].name}"
    copy = replace(
        graph,
        graph_module=lazy_graph_module(graph.graph_module, new),
        inputs=tuple(replace(source, node=at[source.node]) for source in graph.inputs),
        outputs=tuple(
            output if output.node is None else replace(output, node=at[output.node]) for output in graph.outputs
        ),
    )
    return copy, at


def run_again(graph: JointGraph, made_again: Collection[fx.Node]) -> None:
    """Replace nodes, in the backward half, by copies that are computed just before they are first needed."""
    position = {node: place for place, node in enumerate(graph.graph.nodes)}
    renewed = _updated_inputs(graph)
    copies: dict[fx.Node, fx.Node] = {}
    missing = set(made_again)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or graph.phase(node) == "forward":
            continue
        read = [source for source in node.all_input_nodes if source in made_again]
        # At the first reader, so that recomputed values exist as briefly as possible.
        for source in sorted(pending_nodes(read, missing), key=position.__getitem__):
            with graph.graph.inserting_before(node):
                copies[source] = _copy(graph.graph, source, copies, renewed)
            missing.discard(source)
        for source in read:
            node.replace_input_with(source, copies[source])


def _updated_inputs(graph: JointGraph) -> dict[fx.Node, fx.Node]:
    """Return the new value of every input that the step changes."""
    inputs = {source.name: source.node for source in graph.inputs if source.kind != "tangent"}
    return {
        inputs[output.name]: output.node
        for output in graph.outputs
        if output.kind == "mutation" and output.node is not None
    }


def pending_nodes(read: Iterable[fx.Node], missing: Collection[fx.Node]) -> set[fx.Node]:
    """Return the missing nodes to compute before these nodes can be read."""
    return closure(
        (node for node in read if node in missing),
        lambda node: (source for source in node.all_input_nodes if source in missing),
    )


def _copy(
    graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], renewed: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Insert a node of the backward half that recomputes a forward node from kept or recomputed tensors."""

    def source(argument: fx.Node) -> fx.Node:
        if node.target in STATISTICS and argument in renewed:
            return renewed[argument]  # the old value is gone; no result that is read depends on it
        return copies.get(argument, argument)

    copy = graph.create_node(
        node.op,
        node.target,
        *fx.node.map_arg((node.args, node.kwargs), source),
        name=rerun_name(node.name),
    )
    copy.meta = {**node.meta, "partitioner_tag": "is_backward", RECOMPUTES: node.name}
    return copy
