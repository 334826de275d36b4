"""Plans that do in one layer as one plan does, and in another as another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.solver import Edge, Problem, cost_frontier
from autoshard.solver.blend import blend

_EPSILON = 0.01  # of the frontier: it is a proposal
_LIMIT = 1  # partial mixtures that one combination of strategies may have for every gap of it
_CELLS = 5_000  # combinations of strategies of one table
_UNRESTRICTED_CELLS = 60_000  # the same where all strategies are open, and settling a node would lose much


def recombine_plans(
    planner: Planner, wishes: Constraints, plans: Sequence[Decisions] | None, weights: np.ndarray, count: int
) -> list[tuple[Decisions, float]]:
    """Decisions that are worth their memory, and in which everything is decided as in some of the plans.

    Args:
        planner: whose problem it is.
        wishes: under which all the plans were made.
        plans: the plans that are mixed; None: all strategies are open.
        weights: of the moments at which memory counts [operators + 1].
        count: mixtures wanted at most, spread evenly over the frontier of cost and weighted memory, ends left out.

    Returns:
        Decisions, and their cost in seconds; none on meshes of more than two axes, or of more than one where all
        strategies are open: there are too many of them.
    """
    axes = frozenset(axis for axis, size in enumerate(planner.mesh.sizes) if size > 1)
    if len(axes) > (1 if plans is None else 2):
        return []
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, wishes)
    built = builder.build(axes, reuse="all")
    kept = [np.arange(len(costs)) for costs in built.problem.costs]
    if plans is not None:
        kept = [np.unique(chosen) for chosen in np.transpose([built.encode(plan) for plan in plans])]
    narrow = _restrict_strategies(built.problem, kept)
    # The memory of a strategy is what a price adds to its seconds: the copies that reshards make are among it.
    priced = _restrict_strategies(built.with_memory_prices(weights).problem, kept)
    usages = tuple(_price_difference(*costs) for costs in zip(priced.costs, narrow.costs, strict=True))
    tables = [
        _price_difference(*(edge.costs for edge in edges)) for edges in zip(priced.edges, narrow.edges, strict=True)
    ]
    problem = replace(narrow, usages=usages, intervals=((0, 1),) * len(usages))
    cells = _UNRESTRICTED_CELLS if plans is None else _CELLS
    frontier = cost_frontier(problem, edge_usages=tables, epsilon=_EPSILON, limit=_LIMIT, cells=cells)
    chosen = np.unique(np.linspace(0, len(frontier) - 1, count + 2).round().astype(int))[1:-1]
    found = []
    for point in chosen:
        assignment = [int(strategies[one]) for strategies, one in zip(kept, frontier.assignments[point], strict=True)]
        found.append((built.decode(assignment), built.problem.cost(assignment)))
    return found


def _restrict_strategies(problem: Problem, kept: Sequence[np.ndarray]) -> Problem:
    """The problem with these strategies of every node alone.

    Edges between two single strategies are left out: they are the same for every mixture.
    """
    ends = [(edge, np.ix_(kept[edge.source], kept[edge.target])) for edge in problem.edges]
    edges = (
        Edge(edge.source, edge.target, blend((factor, table[at]) for factor, table in edge.parts).table)
        for edge, at in ends
    )
    costs = tuple(costs[one] for costs, one in zip(problem.costs, kept, strict=True))
    return Problem(costs, tuple(edge for edge in edges if edge.costs.size > 1))


def _price_difference(priced: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """What the price added; nothing where the plain costs forbid."""
    finite = np.isfinite(plain)
    return np.maximum(0.0, np.where(finite, priced, 0.0) - np.where(finite, plain, 0.0))
