"""The memory-constrained integer program of Rhino, sections 4.2 and 4.4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.flat.core import Core, starts
from autoshard.solver.flat.integer import solve_core
from autoshard.solver.flat.thin import thin_memory
from autoshard.solver.local_search import NO_ASSIGNMENT, ScoredAssignment
from autoshard.solver.memory_moments import Moments
from autoshard.solver.network import Network


@dataclass(frozen=True, slots=True)
class IntegerResult:
    """An assignment (`NO_ASSIGNMENT` if none was found), a bound, and True if the result is final either way."""

    best: ScoredAssignment
    bound: float
    proved: bool


def solve_integer(
    network: Network,
    *,
    moments: Moments | None = None,
    hint: ScoredAssignment = NO_ASSIGNMENT,
    deadline: float = float("inf"),
    seed: int = 0,
    nodes: int | None = None,
) -> IntegerResult:
    """Solve a reduced network by mixed integer programming, see `flat.integer`.

    Args:
        network: after `reduce`; with usages where there are moments.
        moments: the limit; None where memory plays no part.
        hint: a known assignment.
        deadline: `time.monotonic()` seconds.
        seed: of the backend.
        nodes: nodes of the search tree at most.

    Source: Rhino 4.2 and 4.4.
    """
    core = thin_memory(network_to_core(network, moments)) if network.feasible else None
    if core is None or not core.feasible:
        return IntegerResult(NO_ASSIGNMENT, float("inf"), True)
    positions = network.positions(hint.choices) if hint.choices else None
    start = None if positions is None else np.array([positions[node] for node in network.vectors], dtype=np.int64)
    answer = solve_core(core, start=start, deadline=deadline, seed=seed, nodes=nodes)
    if answer.places is None:
        return IntegerResult(NO_ASSIGNMENT, answer.bound, answer.proved)
    pairs = zip(network.vectors, answer.places.tolist(), strict=True)
    choices = {node: int(network.labels[node][place]) for node, place in pairs}
    # Valued in the network: the program's own sum was scaled.
    best = ScoredAssignment(network.expand(choices), network.value(choices))
    return IntegerResult(best, min(answer.bound, best.cost), answer.proved)


def network_to_core(network: Network, moments: Moments | None) -> Core:
    """Return the remaining nodes of a network as a core, in the order of the network."""
    number = {node: place for place, node in enumerate(network.vectors)}
    size = np.array([len(vector) for vector in network.vectors.values()], dtype=np.int64)
    pairs = [
        (number[node], number[neighbour], table)
        for node, around in network.edges.items()
        for neighbour, table in around.items()
        if node < neighbour
    ]
    tables = [table.ravel() for *_, table in pairs]
    live = [node for node in network.usages if moments is not None and moments.first[node] < moments.last[node]]
    rows = np.array([number[node] for node in live], dtype=np.int64)
    # Eliminated nodes still hold their memory, whatever is chosen for the others.
    fixed_usage = np.zeros(0 if moments is None else len(moments.usages))
    for node, usage in network.held.items():
        fixed_usage[node] = usage
    return Core(
        size=size,
        offset=starts(size),
        cost=np.concatenate([*network.vectors.values(), np.zeros(0)]),
        ends=np.array([(source, target) for source, target, _ in pairs], dtype=np.int64).reshape(-1, 2),
        start=starts(np.array([table.size for table in tables], dtype=np.int64)),
        table=np.concatenate([*tables, np.zeros(0)]),
        item_node=rows,
        low=np.array([moments.first[node] for node in live] if moments else [], dtype=np.int64),
        high=np.array([moments.last[node] for node in live] if moments else [], dtype=np.int64),
        usage_start=starts(size[rows])[:-1],
        usage=np.concatenate([*(network.usages[node] for node in live), np.zeros(0)]),
        base=np.zeros(0) if moments is None else moments.spread(fixed_usage),
        limit=float("inf") if moments is None else moments.limit,
        moment=np.arange(0 if moments is None else moments.count),
        constant=network.offset,
    )
