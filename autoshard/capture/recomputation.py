"""Recomputation: the backward half runs layers of the forward half again instead of keeping their tensors.

The joint graph is rewritten before anything is planned: copies of a layer's operators, in the backward half, compute
from the inputs of the layer what the backward half reads of it, just before it is needed. The copies are placed,
priced and accounted for like all operators, their collectives with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.layers import Layer, layers
from autoshard.capture.nodes import closure, is_view
from autoshard.errors import PlanError

aten = torch.ops.aten

RECOMPUTES = "recomputes"
"""Key of the name, in `node.meta`, of the forward node that a node of the backward half runs again."""

_STATISTICS = frozenset(
    {aten._native_batch_norm_legit_functional.default, aten._batch_norm_with_update_functional.default}
)
"""Operators whose results, except for the new running statistics, do not depend on the old statistics."""

_COMPARISONS = frozenset(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
"""Operators of two tensors whose results a rounding may change: the gradient of `amax` goes where `input == result`."""


@dataclass(frozen=True, slots=True)
class Recomputable:
    """A layer that the backward half can run again.

    Attributes:
        name: of the layer.
        freed: forward nodes whose tensors need not be kept if the layer is run again.
        rerun: forward nodes that are then run again.
    """

    name: str
    freed: tuple[fx.Node, ...]
    rerun: tuple[fx.Node, ...]


def recompute_layers(graph: JointGraph, names: Collection[str]) -> JointGraph:
    """Return the graph in which the backward half runs some layers again.

    The inputs and outputs of these layers are kept; all other tensors that the backward half reads of them are computed
    again. A view of a tensor that is kept is taken again. Operators that read an input which the step changes are not
    run again: its old value is gone. Tensors that are compared with others are not computed again: computed from other
    shards they may be rounded differently, and no longer equal what they equalled.

    Args:
        graph: the captured step; it stays as it is.
        names: of the layers, as `capture.layers.layers` names them; without names, the graph itself is returned.

    Raises:
        PlanError: the model has no such layer.
    """
    if not names:
        return graph
    known = {layer.name: layer for layer in layers(graph)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PlanError(
            f"the plan recomputes {unknown[0]!r}, which is no layer of this model: it was made for another model, or "
            "by another version of autoshard. Make the plan again."
        )
    copy, at = copy_graph(graph)
    made_again: set[fx.Node] = set()
    for name in dict.fromkeys(names):
        made_again |= {at[node] for node in _nodes_to_recompute(graph, known[name])}
    _insert_recomputation(copy, made_again)
    copy.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    copy.graph.lint()
    copy.graph_module.recompile()
    return replace(copy, recomputed=tuple(name for name in known if name in set(names)))


def recomputable(graph: JointGraph) -> tuple[Recomputable, ...]:
    """Return the layers of which the backward half could recompute something that it reads, in the model's order."""
    results = []
    for layer in layers(graph):
        again = _nodes_to_recompute(graph, layer)
        read = [
            node for node in layer.nodes if node in again and any(graph.phase(u) == "backward" for u in _users(node))
        ]
        bases = dict.fromkeys(_base(node, again) for node in read)
        freed = tuple(node for node in bases if node in again)
        rerun = _pending_nodes(read, again)
        if freed:
            results.append(Recomputable(layer.name, freed, tuple(node for node in layer.nodes if node in rerun)))
    return tuple(results)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if user.op != "output")


def _base(node: fx.Node, again: Collection[fx.Node]) -> fx.Node:
    """Return the node in whose memory a node's tensor lies, as far as it is computed again."""
    while is_view(node) and not _is_tuple(node.all_input_nodes[0]) and node.all_input_nodes[0] in again:
        node = node.all_input_nodes[0]
    return node


def copy_graph(graph: JointGraph) -> tuple[JointGraph, dict[fx.Node, fx.Node]]:
    """Return a copy of a joint graph whose nodes have the same names, and the copy of every node."""
    new, at = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        at[node] = new.node_copy(node, at.__getitem__)
        assert at[node].name == node.name, f"{node.name} became {at[node].name}"
    copy = replace(
        graph,
        graph_module=fx.GraphModule(graph.graph_module, new),
        inputs=tuple(replace(source, node=at[source.node]) for source in graph.inputs),
        outputs=tuple(
            output if output.node is None else replace(output, node=at[output.node]) for output in graph.outputs
        ),
    )
    return copy, at


def _nodes_to_recompute(graph: JointGraph, layer: Layer) -> set[fx.Node]:
    """Return the nodes of a layer whose results need not be kept for the backward half."""
    members = set(layer.nodes)
    returned = {output.node for output in graph.outputs if output.kind != "gradient"}
    stays = _old_state_readers(graph, layer)
    for node in layer.nodes:
        leaves = any(user not in members and _forward(graph, user) for user in _users(node))
        if leaves or node in returned or _is_compared(graph, node):
            stays.add(node)
            while is_view(node) and node.all_input_nodes[0] in members:
                node = node.all_input_nodes[0]  # a view keeps the whole tensor
                if not _is_tuple(node):
                    stays.add(node)
    return members - stays


def _old_state_readers(graph: JointGraph, layer: Layer) -> set[fx.Node]:
    """Return the nodes of a layer that read an input that the step changes, itself or a view of it."""
    changed = {output.name for output in graph.outputs if output.kind == "mutation"}
    old = {source.node for source in graph.inputs if source.name in changed and source.kind != "tangent"}
    readers: set[fx.Node] = set()
    for node in layer.nodes:
        sources = node.all_input_nodes
        if node.target not in _STATISTICS and any(
            source in old or (source in readers and is_view(source)) for source in sources
        ):
            readers.add(node)
    return readers


def _is_compared(graph: JointGraph, node: fx.Node) -> bool:
    """Return True if a forward node compares numbers of two tensors, or the backward half compares its numbers."""
    return _compares(node) or any(
        not _forward(graph, user) and (_compares(user) or (is_view(user) and _is_compared(graph, user)))
        for user in _users(node)
    )


def _compares(node: fx.Node) -> bool:
    return node.target in _COMPARISONS and any(
        source.meta["val"].dtype.is_floating_point for source in node.all_input_nodes
    )


def _is_tuple(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)


def _forward(graph: JointGraph, node: fx.Node) -> bool:
    return graph.phase(node) == "forward"


def _insert_recomputation(graph: JointGraph, made_again: Collection[fx.Node]) -> None:
    """Replace these nodes, in the backward half, by copies that are computed just before they are first needed."""
    position = {node: place for place, node in enumerate(graph.graph.nodes)}
    renewed = _updated_inputs(graph)
    copies: dict[fx.Node, fx.Node] = {}
    missing = set(made_again)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or _forward(graph, node):
            continue
        read = [source for source in node.all_input_nodes if source in made_again]
        for source in sorted(_pending_nodes(read, missing), key=position.__getitem__):
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


def _pending_nodes(read: Iterable[fx.Node], missing: Collection[fx.Node]) -> set[fx.Node]:
    """Return the missing nodes that have to be computed so that these nodes can be read."""
    return closure(
        (node for node in read if node in missing),
        lambda node: (source for source in node.all_input_nodes if source in missing),
    )


def _copy(
    graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], renewed: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Return a node of the backward half that computes what a forward node does, from kept or recomputed tensors."""

    def source(argument: fx.Node) -> fx.Node:
        if node.target in _STATISTICS and argument in renewed:
            return renewed[argument]  # the old value is gone, and no result that is read depends on it
        return copies.get(argument, argument)

    copy = graph.create_node(
        node.op,
        node.target,
        *fx.node.map_arg((node.args, node.kwargs), source),
        name=f"{node.name}_again",
    )
    copy.meta = {**node.meta, "partitioner_tag": "is_backward", RECOMPUTES: node.name}
    return copy
