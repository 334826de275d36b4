"""Graphs in two parts that run apart, one some time after the other.

Zero-bubble schedules of pipelines run the backward half in parts: gradients of what the step was given as soon as they
can, since the stage before waits for them, and those of parameters in idle time. Reductions of gradients are awaited
when there is nothing else to do.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch import fx

from autoshard.specs.emitter import collectives


@dataclass(frozen=True, slots=True)
class GraphPart:
    """One part of a graph.

    Attributes:
        graph: takes some of what the whole graph takes, and for the second part what the first hands over, behind it.
        takes: places of its arguments among those of the whole graph.
        makes: places of its results among those of the whole graph; what the first part hands over stands behind them.
    """

    graph: fx.GraphModule
    takes: tuple[int, ...]
    makes: tuple[int, ...]


def split_by_results(whole: fx.GraphModule, first: Sequence[int]) -> tuple[GraphPart, GraphPart]:
    """Split a graph by its results: all that some of them need, and the rest.

    Args:
        whole: returns a tuple.
        first: places of the results that the first part makes.

    Returns:
        The parts. Nothing is computed twice: the second takes what it needs of the first's values.
    """
    results = tuple(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    early = _ancestors([results[place] for place in first])
    # Several results of one operator go over one by one.
    early |= {user for node in early for user in node.users if user.target is operator.getitem}
    return _split_calls(whole, early, tuple(first))


def split_at_waits(whole: fx.GraphModule, places: Sequence[int]) -> tuple[GraphPart, GraphPart]:
    """Split a graph where it awaits the last collectives of some of its results.

    Args:
        whole: returns a tuple.
        places: of the results that the second part may make: all that share no collective with another result.
    """
    output = whole.graph.output_node()
    ends = {place: _wait_chain(output.args[0][place]) for place in places}  # type: ignore[arg-type, index]
    while True:
        late = set().union(*ends.values())
        shared = {node for node in late if not late.issuperset({*node.users} - {output})}
        alone = {place: nodes for place, nodes in ends.items() if shared.isdisjoint(nodes)}
        if len(alone) == len(ends):
            break
        ends = alone
    rest = tuple(place for place in range(len(output.args[0])) if place not in ends)  # type: ignore[arg-type]
    return _split_calls(whole, {node for node in whole.graph.nodes if node not in late}, rest)


def _wait_chain(result: fx.Node) -> set[fx.Node]:
    """The wait for a collective that a result looks at, and all on the way."""
    found = {result}
    while result.target is not collectives.wait_tensor.default:
        (result,) = result.all_input_nodes
        found.add(result)
    return found


def _split_calls(whole: fx.GraphModule, early: Set[fx.Node], first: tuple[int, ...]) -> tuple[GraphPart, GraphPart]:
    """The parts of which the first runs the calls that are `early`, and makes some of the results."""
    results = tuple(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    late = [node for node in whole.graph.nodes if node.op == "call_function" and node not in early]
    rest = tuple(place for place in range(len(results)) if place not in first)
    read = dict.fromkeys(source for node in late for source in node.all_input_nodes)
    read |= dict.fromkeys(results[place] for place in rest)
    handed = [node for node in read if node in early and node.op == "call_function"]
    nodes = [node for node in whole.graph.nodes if node.op == "call_function" and node in early]
    return (
        _extract_part(whole, nodes, (), first, handed),
        _extract_part(whole, late, handed, rest, ()),
    )


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(nodes)
    waiting = list(found)
    for node in waiting:  # grows while it is walked
        fresh = [source for source in node.all_input_nodes if source not in found]
        found.update(fresh)
        waiting += fresh
    return found


def _extract_part(
    whole: fx.GraphModule,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    makes: tuple[int, ...],
    handed: Sequence[fx.Node],
) -> GraphPart:
    """These nodes as a graph, which takes the placeholders that they read and `given`."""
    results = tuple(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    returned = [*(results[place] for place in makes), *handed]
    read = {*returned}.union(*(node.all_input_nodes for node in nodes))
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    takes = []
    for place, node in enumerate(whole.graph.find_nodes(op="placeholder")):
        if node in read:
            own[node] = graph.node_copy(node)
            takes.append(place)
    for node in given:
        own[node] = graph.placeholder(node.name)
        own[node].meta = dict(node.meta)
    for node in whole.graph.find_nodes(op="get_attr"):
        if node in read:
            own[node] = graph.node_copy(node)
    for node in nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
    graph.output(tuple(own[node] for node in returned))
    graph.lint()
    return GraphPart(fx.GraphModule(whole, graph), tuple(takes), makes)
