"""The backward half in two parts: gradients of what the step was given first, those of its parameters later.

Zero-bubble schedules of pipelines run the first part as soon as they can, since the stage before waits for it, and fill
idle time with the second.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a graph.

    Attributes:
        graph: takes some of what the whole graph takes, and for the second part what the first hands over, behind it.
        takes: places of its arguments among those of the whole graph.
        makes: places of its results among those of the whole graph; what the first part hands over stands behind them.
    """

    graph: fx.GraphModule
    takes: tuple[int, ...]
    makes: tuple[int, ...]


def part(whole: fx.GraphModule, first: Sequence[int]) -> tuple[Part, Part]:
    """Split a graph by its results: all that some of them need, and the rest.

    Args:
        whole: returns a tuple.
        first: places of the results that the first part makes.

    Returns:
        The parts. Nothing is computed twice: the second takes what it needs of the first's values.
    """
    output = whole.graph.output_node()
    results = tuple(output.args[0])  # type: ignore[arg-type]
    early = _ancestors([results[place] for place in first])
    # Several results of one operator go over one by one.
    early |= {user for node in early for user in node.users if user.target is operator.getitem}
    late = [node for node in whole.graph.nodes if node.op == "call_function" and node not in early]
    rest = tuple(place for place in range(len(results)) if place not in first)
    read = dict.fromkeys(source for node in late for source in node.all_input_nodes)
    read |= dict.fromkeys(results[place] for place in rest)
    handed = [node for node in read if node in early and node.op == "call_function"]
    nodes = [node for node in whole.graph.nodes if node.op == "call_function" and node in early]
    return (
        _extracted(whole, nodes, (), tuple(first), handed),
        _extracted(whole, late, handed, rest, ()),
    )


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(nodes)
    waiting = list(found)
    for node in waiting:  # grows while it is walked
        fresh = [source for source in node.all_input_nodes if source not in found]
        found.update(fresh)
        waiting += fresh
    return found


def _extracted(
    whole: fx.GraphModule,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    makes: tuple[int, ...],
    handed: Sequence[fx.Node],
) -> Part:
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
    return Part(fx.GraphModule(whole, graph), tuple(takes), makes)
