"""Values that are moved to the host from the half of the step that makes them to the half that reads them.

Offloading rewrites the joint graph before planning, as recomputation does: it inserts a copy to the host where the
value is made, and a copy back where the backward half first reads it. Both are operators with placements, prices and
memory like all others. In between, the device does not hold the value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture.backward_copies import copy_graph, run_again
from autoshard.capture.host_copies import TO_DEVICE, TO_HOST
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.nodes import is_view
from autoshard.errors import PlanError

_SMALL_FACTOR = 64  # a value this many times smaller than the largest requested one stays: a copy has a fixed cost

HOST_NAME = "{}_to_host"
"""Name of the copy of a value to the host, by the value's name."""

DEVICE_NAME = "{}_to_device"
"""Name of the copy back."""


def offload_values(graph: JointGraph, names: Collection[str]) -> JointGraph:
    """Return the graph in which some values are moved to the host until the backward half reads them.

    Reads of views of these values in the backward half become reads of the same views of the copy. A value that the
    backward half does not read, because it recomputes the readers' operands, is not moved.

    Args:
        graph: the captured step, in which operators may be recomputed; it is not changed.
        names: values, as named by `movable_values`, besides those already moved; without names, the graph itself is
            returned.

    Raises:
        PlanError: the graph has no such value that can be moved.
    """
    if not names:
        return graph
    unmoved = graph if graph.unmoved is None else graph.unmoved
    movable = movable_values(unmoved, read=False)
    unknown = sorted(set(names) - movable.keys())
    if unknown:
        raise PlanError(
            f"the plan moves {unknown[0]!r} to the host, which is no value of this model that can be moved: it was "
            "made for another model, or by another version of autoshard. Make the plan again."
        )
    asked = {*names, *graph.offloaded}
    # A copy, because a search compares graphs with and without moves.
    copy, at = copy_graph(unmoved)
    moved = [at[node] for name, node in movable.items() if name in asked]
    run_again(copy, {view for node in moved for view in _forward_views(copy, node)})
    for node in moved:
        _move(copy, node)
    copy.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    copy.graph.lint()
    copy.graph_module.recompile()
    return replace(copy, offloaded=tuple(name for name in movable if name in asked), unmoved=unmoved)


def movable_values(graph: JointGraph, read: bool = True) -> dict[str, fx.Node]:
    """Return the nodes whose values can be moved to the host, by name, in the order in which they are made.

    They are the tensors that the forward half makes and the backward half reads, directly or through views. Excluded
    are what the step is given or returns, which is held in any case, what the user keeps, and single numbers.

    Args:
        graph: the step.
        read: False to include values that the backward half does not read.
    """
    unmoved = graph if graph.unmoved is None else graph.unmoved
    returned = {base_in_memory(output.node) for output in unmoved.outputs if output.node is not None}
    found = {}
    for node in unmoved.graph.nodes:
        value = node.meta.get("val")
        if (
            node.op == "call_function"
            and unmoved.phase(node) == "forward"
            and isinstance(value, torch.Tensor)
            and value.ndim
            and value.numel()
            and base_in_memory(node) is node
            and node not in returned
            and node.name not in unmoved.kept
            and (not read or _is_read_backward(unmoved, node))
        ):
            found[node.name] = node
    return found


def base_in_memory(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a node's tensor; each result of an operator owns its memory."""
    while is_view(node):
        source = node.all_input_nodes[0]
        if not isinstance(source.meta.get("val"), torch.Tensor) and not is_view(source):
            return node  # one of several results
        node = source
    return node


def _forward_views(graph: JointGraph, node: fx.Node) -> Iterable[fx.Node]:
    """Yield the views that the forward half takes of a value."""
    for user in node.users:
        if user.op == "call_function" and is_view(user) and graph.phase(user) == "forward":
            yield user
            yield from _forward_views(graph, user)


def _is_read_backward(graph: JointGraph, node: fx.Node) -> bool:
    readers = (user for value in (node, *_forward_views(graph, node)) for user in value.users)
    return any(user.op == "call_function" and graph.phase(user) == "backward" for user in readers)


def _move(graph: JointGraph, node: fx.Node) -> None:
    """Let the backward half read a value from a copy of the host's copy."""
    readers = [user for user in node.users if user.op == "call_function" and graph.phase(user) == "backward"]
    if not readers:
        return
    with graph.graph.inserting_after(node):
        host = graph.graph.create_node("call_function", TO_HOST, (node,), name=HOST_NAME.format(node.name))
    # Nodes compare by their positions.
    with graph.graph.inserting_before(min(readers)):
        copy = graph.graph.create_node("call_function", TO_DEVICE, (host,), name=DEVICE_NAME.format(node.name))
    host.meta = dict(node.meta)
    copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
    for reader in readers:
        reader.replace_input_with(node, copy)


def values_of_modules(graph: JointGraph, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Return the names of values worth moving among those that some nodes save for the backward half."""
    # By name: the nodes may belong to the graph with moves.
    names = {node.name for node in nodes}
    chosen = {name: node.meta["val"] for name, node in movable_values(graph).items() if name in names}
    sizes = {name: value.numel() * value.element_size() for name, value in chosen.items()}
    return tuple(name for name, size in sizes.items() if size * _SMALL_FACTOR >= max(sizes.values()))
