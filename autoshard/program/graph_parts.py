"""Graphs in two parts, of which the second runs some time after the first.

Zero-bubble schedules of pipelines run the backward half in parts: gradients of inputs as soon as they can, since the
stage before waits for them, and those of parameters in idle time. Reductions of gradients are awaited when there is
nothing else to do.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.specs.emitter import collectives


@dataclass(frozen=True, slots=True)
class GraphPart:
    """One part of a graph.

    Attributes:
        graph: the first part returns values for the second behind its results, which takes them behind its arguments.
        takes: places of its arguments among those of the whole graph.
        makes: places of its results among those of the whole graph.
    """

    graph: fx.GraphModule
    takes: tuple[int, ...]
    makes: tuple[int, ...]


def split_by_results(whole: fx.GraphModule, first: Sequence[int]) -> tuple[GraphPart, GraphPart]:
    """Split a graph, which returns a tuple, into all that the results at places `first` need, and the rest.

    Nothing is computed twice: the second part takes the values that it needs from the first.
    """
    results = _results(whole)
    early = {results[place] for place in first}
    pending = list(early)
    for node in pending:  # grows while it is walked
        fresh = [source for source in node.all_input_nodes if source not in early]
        early.update(fresh)
        pending += fresh
    # A part cannot hand over a tuple: several results of one operator go over one by one.
    early |= {user for node in early for user in node.users if user.target is operator.getitem}
    return _split_calls(whole, early, tuple(first))


def split_at_waits(whole: fx.GraphModule, places: Sequence[int]) -> tuple[GraphPart, GraphPart]:
    """Split a graph, which returns a tuple, before the waits for the last collectives of results at these places.

    The second part makes those of the results that share no collective with another result.
    """
    output, results = whole.graph.output_node(), _results(whole)
    ends = {place: _wait_chain(results[place]) for place in places}
    # A result that leaves the second part takes its wait along, which may be that of a further result.
    while True:
        late = set().union(*ends.values())
        shared = {node for node in late if not late.issuperset({*node.users} - {output})}
        alone = {place: nodes for place, nodes in ends.items() if shared.isdisjoint(nodes)}
        if len(alone) == len(ends):
            break
        ends = alone
    rest = tuple(place for place in range(len(results)) if place not in ends)
    return _split_calls(whole, {node for node in whole.graph.nodes if node not in late}, rest)


def _results(whole: fx.GraphModule) -> tuple[Any, ...]:
    return tuple(whole.graph.output_node().args[0])  # type: ignore[arg-type]


def _wait_chain(result: fx.Node) -> set[fx.Node]:
    """Return the views from a result back to the wait for its collective, and that wait."""
    chain = {result}
    while result.target is not collectives.wait_tensor.default:
        (result,) = result.all_input_nodes
        chain.add(result)
    return chain


def _split_calls(whole: fx.GraphModule, early: Set[fx.Node], first: tuple[int, ...]) -> tuple[GraphPart, GraphPart]:
    """Return the part that runs the calls in `early` and makes the results at places `first`, and the rest."""
    results = _results(whole)
    calls = [node for node in whole.graph.nodes if node.op == "call_function"]
    late = [node for node in calls if node not in early]
    rest = tuple(place for place in range(len(results)) if place not in first)
    read = dict.fromkeys(source for node in late for source in node.all_input_nodes)
    read |= dict.fromkeys(results[place] for place in rest)
    # Arguments of the whole graph are not handed over: the second part takes them itself.
    handed = [node for node in read if node in early and node.op == "call_function"]
    return (
        _extract_part(whole, [node for node in calls if node in early], (), first, handed),
        _extract_part(whole, late, handed, rest, ()),
    )


def _extract_part(
    whole: fx.GraphModule,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    makes: tuple[int, ...],
    handed: Sequence[fx.Node],
) -> GraphPart:
    """Return these nodes as a graph, which takes the placeholders that they read, and `given`."""
    results = _results(whole)
    returned = [*(results[place] for place in makes), *handed]
    read = {*returned}.union(*(node.all_input_nodes for node in nodes))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    takes = []
    for place, node in enumerate(whole.graph.find_nodes(op="placeholder")):
        if node in read:
            copies[node] = graph.node_copy(node)
            takes.append(place)
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    # Constants are read by both parts.
    for node in whole.graph.find_nodes(op="get_attr"):
        if node in read:
            copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in returned))
    graph.lint()
    return GraphPart(fx.GraphModule(whole, graph), tuple(takes), makes)
