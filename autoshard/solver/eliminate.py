"""Exact bucket elimination: min-plus dynamic programming over an elimination order that keeps tables small."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.solver.elimination_order import EliminationOrder, find_order
from autoshard.solver.network import Network, fold, reduce
from autoshard.solver.problem import Array, SolverError

DEFAULT_CAP = 50_000_000
"""Entries of the largest table that elimination builds."""

_SMALL = 1 << 16
"""Entries of joint tables that are built at once; the choice of the node is recomputed from their parts.

Larger tables are computed one strategy at a time, and the choice is stored.
"""

_CHEAP = 4e6
"""Entries of all tables up to which elimination starts at once, without a thorough reduction first."""

Scope = tuple[int, ...]
Factor = tuple[Scope, Array]
Choose = Callable[[dict[int, int]], int]


class WidthError(SolverError):
    """Elimination would need a table larger than the cap."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """An optimum: node -> strategy of the problem, and its cost; no choices and `inf` if nothing is feasible."""

    choices: dict[int, int]
    cost: float


def eliminate(network: Network, *, cap: float = DEFAULT_CAP) -> Optimum:
    """Solve a network exactly, without regard to memory.

    The network is reduced, then nodes are eliminated one after another: the tables of a node are added up, and the
    minimum over its strategies is a table over its neighbours. Order: least fill, weighted by the number of strategies.

    Args:
        network: left as it is.
        cap: entries of the largest table allowed, checked before any table is built.

    Raises:
        WidthError: the order found needs a larger table.
    """
    core, order = reduce_and_order(network, cap)
    if order is None:
        return Optimum({}, float("inf"))
    if not order.fits:
        raise WidthError(
            f"elimination needs more than the {cap:.3g} table entries allowed (it came to a table of "
            f"{order.largest:.3g} over {order.width + 1} nodes): the problem is too entangled for one exact pass. Use "
            'method="auto", which bounds and searches, or give fewer strategies per node'
        )
    choices, cost = run_order(core, order)
    if not np.isfinite(cost):
        return Optimum({}, float("inf"))
    return Optimum(core.expand(choices), cost + core.offset)


def reduce_and_order(network: Network, cap: float) -> tuple[Network, EliminationOrder | None]:
    """Return a reduced copy of the network and its elimination order; None if nothing is feasible."""
    # Thorough reduction takes longer than most eliminations: it is done only where tables would be large.
    core = fold(network.copy())
    if not core.feasible:
        return core, None
    order = _order(core, min(cap, _CHEAP))
    if order.fits and order.entries <= _CHEAP:
        return core, order
    core = reduce(core)
    return core, _order(core, cap) if core.feasible else None


def _order(core: Network, cap: float) -> EliminationOrder:
    return find_order({node: len(vector) for node, vector in core.vectors.items()}, core.edges, cap)


def run_order(core: Network, order: EliminationOrder) -> tuple[dict[int, int], float]:
    """Eliminate every node of a network in a given order; equal components are solved once.

    Returns:
        The choices (node -> strategy of the problem), empty if no assignment is finite; the cost without the offset.
    """
    solved: dict[Hashable, tuple[list[int], float]] = {}
    choices: dict[int, int] = {}
    total = 0.0
    for nodes in _components(core, [node for node, _ in order.steps]):
        # Towers and blocks that are alike and not joined (after the shared hub was held) are solved once.
        signature = _signature(core, nodes)
        if signature not in solved:
            solved[signature] = _run_component(core, nodes)
        places, cost = solved[signature]
        if not np.isfinite(cost):
            return {}, float("inf")
        total += cost
        choices.update((node, int(core.labels[node][place])) for node, place in zip(nodes, places, strict=True))
    return choices, total


def _components(core: Network, nodes: list[int]) -> list[list[int]]:
    """Return the nodes by connected component, in their order within each."""
    number: dict[int, int] = {}
    for start in nodes:
        waiting = [] if start in number else [start]
        while waiting:
            node = waiting.pop()
            if node not in number:
                number[node] = start
                waiting.extend(core.edges[node])
    components: dict[int, list[int]] = {}
    for node in nodes:
        components.setdefault(number[node], []).append(node)
    return list(components.values())


def _signature(core: Network, nodes: list[int]) -> Hashable:
    """Return a key, equal for components with equal costs and edges in the order of elimination."""
    rank = {node: position for position, node in enumerate(nodes)}
    return tuple(
        # Tables are interned: equal ones are one object.
        (id(core.vectors[node]), *sorted((rank[neighbour], id(table)) for neighbour, table in core.edges[node].items()))
        for node in nodes
    )


def _run_component(core: Network, nodes: list[int]) -> tuple[list[int], float]:
    """Eliminate nodes in their order; return the position of each choice, empty if nothing is finite, and the cost."""
    rank = {node: position for position, node in enumerate(nodes)}
    buckets = _buckets(core, rank)
    constant = 0.0
    choosers: list[tuple[int, Choose]] = []
    for node in nodes:
        factors = buckets.pop(node)
        # Of all nodes in the bucket's tables, this one is the first in the order; the others are what its minimum
        # depends on.
        scope = tuple(sorted(set().union(*(part for part, _ in factors)), key=rank.__getitem__))[1:]
        result, choose = _minimum_over(node, scope, factors, core)
        choosers.append((node, choose))
        if scope:
            # The minimum waits where the first of its nodes is eliminated: then all terms with that node are in one
            # bucket.
            buckets[scope[0]].append((scope, result))
        else:
            constant += float(result)
    if not np.isfinite(constant):
        return [], float("inf")
    places: dict[int, int] = {}
    # The last node depends on no other; each one before it on nodes that have been chosen by then.
    for node, choose in reversed(choosers):
        places[node] = choose(places)
    return [places[node] for node in nodes], constant


def _buckets(core: Network, rank: dict[int, int]) -> dict[int, list[Factor]]:
    """Put every table in the bucket of the node that is eliminated first, with that node as its first axis."""
    buckets: dict[int, list[Factor]] = {node: [((node,), core.vectors[node])] for node in rank}
    for node in rank:
        for neighbour, table in core.edges[node].items():
            if rank[node] < rank[neighbour]:
                buckets[node].append(((node, neighbour), table))
    return buckets


def _minimum_over(node: int, scope: Scope, factors: list[Factor], core: Network) -> tuple[Array, Choose]:
    """Return the minimum of the sum of the factors over `node`, a table over `scope`, and a chooser of the node."""
    joint = (node, *scope)
    shape = tuple(len(core.vectors[member]) for member in joint)
    # Narrow factors first: their sum stays small for long.
    factors = sorted(factors, key=lambda factor: (factor[1].size, factor[0]))
    spread = [_spread(part, table, joint) for part, table in factors]
    # Entries of the joint table, the node included, which is never stored whole above this size.
    if np.prod(shape, dtype=float) > _SMALL:
        return _minimum_by_strategy(scope, shape, spread)
    total = spread[0]
    for table in spread[1:]:
        total = total + table
    # The argmin over a joint table is not kept: recomputing one column on the way back is cheaper than storing all.
    return np.broadcast_to(total, shape).min(0), _recompute(factors)


def _spread(part: Scope, table: Array, joint: Scope) -> Array:
    """Return the table with axes of size 1 for nodes that it does not depend on."""
    sizes = dict(zip(part, table.shape, strict=True))
    return table.reshape(tuple(sizes.get(node, 1) for node in joint))


def _recompute(factors: list[Factor]) -> Choose:
    """Return a chooser that adds up the factors at the neighbours' values."""

    def choose(places: dict[int, int]) -> int:
        total: Array = np.zeros(())
        for part, table in factors:
            index: tuple[Any, ...] = (slice(None), *(places[neighbour] for neighbour in part[1:]))
            total = total + table[index]
        return int(np.argmin(total))

    return choose


def _minimum_by_strategy(scope: Scope, shape: tuple[int, ...], spread: list[Array]) -> tuple[Array, Choose]:
    """Compute `_minimum_over` for large tables, one strategy at a time, and store the best strategies."""
    result = np.full(shape[1:], np.inf)
    # A byte per entry, where strategies allow it: this is the largest array of a solve.
    winner = np.zeros(shape[1:], dtype=np.uint8 if shape[0] <= 256 else np.uint32)
    for strategy in range(shape[0]):
        total = np.zeros(())
        for table in spread:
            total = total + (table[strategy] if table.shape[0] > 1 else table[0])
        # Strictly less: the first of equal strategies wins, as `argmin` has it in the other branch.
        better = np.broadcast_to(total < result, shape[1:])
        winner[better] = strategy
        np.minimum(result, total, out=result)
    return result, lambda places: int(winner[tuple(places[neighbour] for neighbour in scope)])
