"""A lower bound of the cost of every plan within a memory limit, and the plans found on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.memory_prices import mix_prices
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.solving import SolveOptions, SolveResult, is_large, solve_by_messages, solve_problem
from autoshard.solver.reduced_problem import ReducedProblem

_ROUNDS = 8  # most prices at which the bound is computed
_ENOUGH = 1e-3  # fraction of the cost by which another plan has to improve the best mix, and so the bound


def bound_within(
    context: PlanningContext,
    limit: int,
    costs: Sequence[float],
    held: Sequence[np.ndarray],
    strongest: float,
    meet: Callable[[Decisions, float], object],
) -> float:
    """Return a lower bound of the cost of every plan whose peak is within a limit, in seconds.

    A Lagrangian bound: a plan that fits never exceeds the limit, so pricing the excess over the limit at every moment
    does not raise its cost. The least cost at some prices, less the price of the limit, is therefore a bound over
    everything that the problem leaves open: shardings, copies that are kept or gathered again, operators that run
    again, values that are moved. Good prices are found by column generation, starting from known plans.

    Args:
        context: the problem, on a mesh of at most two axes with more than one device.
        limit: bytes per device.
        costs: of known plans of the problem, in seconds.
        held: the bytes of each at every moment of the problem.
        strongest: the highest price of the limit's bytes, in seconds.
        meet: called with the decisions and the cost of every assignment on the way.

    Raises:
        KeyboardInterrupt: the search was interrupted.
    """
    axes = frozenset(context.axes)
    builder = context.builder_for(context.certain)

    def solve(prices: np.ndarray, closely: bool) -> tuple[BuiltProblem, SolveResult, bool]:
        """Return the problem at some prices, its result, and True if the bound is valid for independent layers."""
        with context.time_phase("problem"):
            built = builder.build(axes, None, prices, None, "all")
            tiling = context.tiling(built) if is_large(built.problem) else None
        with context.time_phase("solve"):
            options = SolveOptions("auto", context.budget.part(1.0), proof=False, proposal=not closely)
            if closely:
                whole = ReducedProblem.of(built.problem, built.program_positions)
                result = solve_by_messages(whole, whole if tiling is None else tiling.tie(whole), options)
            else:
                result = solve_problem(built, tiling, options)
        if options.budget.interrupted:
            raise KeyboardInterrupt
        return built, result, closely or tiling is None

    costs, held, best, best_prices, is_proved = [*costs], [*held], -math.inf, None, False
    for _ in range(_ROUNDS):
        prices, mix = mix_prices(costs, held, limit, strongest)
        least_mix = mix - limit * float(prices.sum())
        if (1 + _ENOUGH) * best >= least_mix or context.budget.is_over:
            break  # the bound is no better than the best mix at any prices
        built, result, is_free = solve(prices, closely=False)
        bound = result.lower_bound - limit * float(prices.sum())
        if bound > best:
            best, best_prices, is_proved = bound, prices, is_free
        if not result.assignment:
            break
        cost = built.plain.problem.cost(result.assignment)
        meet(built.decode(result.assignment), cost)
        costs.append(cost)
        held.append(built.held_bytes(result.assignment, len(prices)))
        if mix - cost - float(prices @ held[-1]) <= _ENOUGH * cost:
            break  # nor does the assignment at these prices improve the mix
    if best_prices is None or is_proved:
        return best
    if context.budget.is_over:
        return -math.inf
    _, result, _ = solve(best_prices, closely=True)
    return result.lower_bound - limit * float(best_prices.sum())
