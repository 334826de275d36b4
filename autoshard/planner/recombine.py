"""Plans that decide in each operator as one or another of some plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.solver import Edge, Problem, cost_frontier
from autoshard.solver.blend import blend

_EPSILON = 0.01  # accuracy of the frontier: its points are proposals
_LIMIT = 1  # partial assignments that one combination of strategies may keep for every gap of it
_CELLS = 5_000  # combinations of strategies of one table
_UNRESTRICTED_CELLS = 60_000  # the same if all strategies are open, and a fixed strategy would lose much


def recombine_plans(
    planner: PlanningContext,
    constraints: Constraints,
    plans: Sequence[Decisions] | None,
    weights: np.ndarray,
    count: int,
) -> list[tuple[Decisions, float]]:
    """Return decisions on the frontier of cost and weighted memory, in which every node decides as one of the plans.

    Args:
        planner: the planner of the graph.
        constraints: the constraints of all the plans.
        plans: the plans; None if all strategies are open.
        weights: weights of the moments [operators + 1].
        count: the most decisions, spread evenly over the frontier without its ends.

    Returns:
        Decisions and their cost in seconds. There are none on meshes of more than two axes, or of more than one if all
        strategies are open: these have too many strategies.
    """
    axes = frozenset(planner.axes)
    if len(axes) > (1 if plans is None else 2):
        return []
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, constraints)
    built = builder.build(axes, reuse="all")
    kept = [np.arange(len(costs)) for costs in built.problem.costs]
    if plans is not None:
        kept = [np.unique(chosen) for chosen in np.transpose([built.encode(plan) for plan in plans])]
    plain = _restrict_strategies(built.problem, kept)
    # The memory of a strategy is what a price adds to its seconds, which includes the copies that reshards make.
    priced = _restrict_strategies(built.with_memory_prices(weights).problem, kept)
    usages = tuple(_price_difference(*costs) for costs in zip(priced.costs, plain.costs, strict=True))
    tables = [
        _price_difference(*(edge.costs for edge in edges)) for edges in zip(priced.edges, plain.edges, strict=True)
    ]
    problem = replace(plain, usages=usages, intervals=((0, 1),) * len(usages))
    cells = _UNRESTRICTED_CELLS if plans is None else _CELLS
    frontier = cost_frontier(problem, edge_usages=tables, epsilon=_EPSILON, limit=_LIMIT, cells=cells)
    # The ends of the frontier are most often known: the fastest and the leanest of the plans.
    points = np.unique(np.linspace(0, len(frontier) - 1, count + 2).round().astype(int))[1:-1]
    recombined = []
    for point in points:
        chosen = zip(kept, frontier.assignments[point], strict=True)
        assignment = [int(strategies[place]) for strategies, place in chosen]
        recombined.append((built.decode(assignment), built.problem.cost(assignment)))
    return recombined


def _restrict_strategies(problem: Problem, kept: Sequence[np.ndarray]) -> Problem:
    """Return the problem with only the kept strategies of every node."""
    ends = [(edge, np.ix_(kept[edge.source], kept[edge.target])) for edge in problem.edges]
    edges = (
        Edge(edge.source, edge.target, blend((factor, table[at]) for factor, table in edge.parts).table)
        for edge, at in ends
    )
    costs = tuple(costs[strategies] for costs, strategies in zip(problem.costs, kept, strict=True))
    # An edge between single strategies costs the same in all assignments.
    return Problem(costs, tuple(edge for edge in edges if edge.costs.size > 1))


def _price_difference(priced: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """Return what the price added; zero where the plain costs are infinite."""
    finite = np.isfinite(plain)
    return np.maximum(0.0, np.where(finite, priced, 0.0) - np.where(finite, plain, 0.0))
