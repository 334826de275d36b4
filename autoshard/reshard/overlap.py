"""When collectives run: started as early and awaited as late as their data allows."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from autoshard.patterns.local import collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_STARTS = (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default, _GATHER)
_FOLLOWS = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.split_with_sizes.default,  # takes joined reductions apart
    operator.getitem,
    aten._to_copy.default,  # the cast of what was reduced
)


def schedule(graph: fx.Graph) -> None:
    """Order the collectives of half a program, which stay in one order on all ranks."""
    continue_late(graph)
    await_late(graph)
    gather_ahead(graph)


def continue_late(graph: fx.Graph) -> None:
    """Start the later collectives of gradients that are reduced in stages when the next gradients' are started.

    A stage waits for the one before it, and what is computed behind it waits too. Where the next gradient is ready to
    be reduced, the stage before has had time to end. Stages of the last gradients, behind which there are no more, are
    started at the end of the half.
    """
    output = next(iter(graph.find_nodes(op="output")))
    chains = _chains(graph, output)
    most = max(map(len, chains), default=0)
    for turn in range(1, len(chains) + most - 1):
        place = chains[turn][0] if turn < len(chains) else output
        for stage in range(1, most):
            chain = chains[turn - stage] if 0 <= turn - stage < len(chains) else []
            if stage < len(chain):
                place.prepend(chain[stage])  # `await_late` brings the waits behind their collectives again


def _chains(graph: fx.Graph, output: fx.Node) -> list[list[fx.Node]]:
    """The collectives that are started for nothing but outputs, each with those that go on with its result.

    They are in the order in which the first of each is started; of several that go on with one result, one follows the
    other.
    """
    handed = {output}
    for node in reversed(graph.nodes):
        if node.users and handed.issuperset(node.users) and (node.target in _STARTS or _awaits(node)):
            handed.add(node)
    chains: list[list[fx.Node]] = []
    chain_of: dict[fx.Node | None, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in handed and node.target in _STARTS:
            chain = chain_of.get(_started(node.args[0]))
            if chain is None:
                chains.append(chain := [])
            chain.append(node)
            chain_of[node] = chain
    return chains


def await_late(graph: fx.Graph) -> None:
    """Move every wait, and views and casts of what is awaited, to just before its first user."""
    for node in reversed(list(graph.nodes)):
        if _awaits(node) and node.users:
            min(node.users).prepend(node)  # nodes compare by their places, those moved before included


def _awaits(node: fx.Node) -> bool:
    """Whether the node is a wait, or only a view or a cast of one."""
    return _started(node) is not None


def _started(node: object) -> fx.Node | None:
    """The collective whose result a node is, or is a view or a cast of; None where it is something else."""
    while isinstance(node, fx.Node) and (node.target is _WAIT or node.target in _FOLLOWS):
        if node.target is _WAIT:
            return node.all_input_nodes[0]
        node = node.args[0]
    return None


def gather_ahead(graph: fx.Graph) -> None:
    """Start every gather of a parameter one gather early, so that it runs behind the compute in between.

    One and not more: each gather in flight holds a whole parameter.
    """
    gathers = [node for node in graph.nodes if node.target is _GATHER and node.all_input_nodes[0].op == "placeholder"]
    for before, node in itertools.pairwise(gathers):
        wait = next(iter(before.users))
        if wait.target is _WAIT and wait < node:
            wait.prepend(node)
