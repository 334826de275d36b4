"""Prices of memory at every moment from known plans: those at which their best mix within a limit is optimal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.linear import LinearProgram, minimise


def mix_prices(
    costs: Sequence[float], held: Sequence[np.ndarray], limit: float, strongest: float
) -> tuple[np.ndarray, float]:
    """Return the prices of memory at which no plan is better than the best mix of plans within a limit.

    They are the dual solution of the linear program over weights of plans, whose mix costs least and holds at most the
    limit at every moment (column generation: Dantzig and Wolfe, 1960). A plan that costs less at these prices than the
    second value would improve the mix.

    Args:
        costs: seconds of every plan.
        held: bytes of every plan at every moment, of one shape.
        limit: bytes.
        strongest: highest price of the limit's bytes, in seconds over all moments, which is reached if no mix fits.

    Returns:
        Seconds per byte at every moment, and the seconds of the best mix with its memory at these prices.
    """
    # In units of the most expensive plan, since GLOP's tolerances are absolute.
    unit = max(costs)
    table = np.asarray(held) / limit
    strongest /= unit
    # Keep one of several moments with equal bytes of all plans; drop moments at which no plan is near the limit.
    columns, first = np.unique(table, axis=1, return_index=True)
    near = np.flatnonzero(columns.max(axis=0) >= 0.5)
    columns, first = columns[:, near], first[near]
    prices = np.zeros(table.shape[1])
    if not len(first):
        return prices, min(costs)
    program = LinearProgram()
    moments = program.add_variables(np.ones(len(first)), upper=strongest)
    # The bound of the mix may be as large as the most expensive plan at the highest prices.
    largest = 1.0 + strongest * float(columns.max(initial=1.0))
    (bound,) = program.add_variables(np.array([-1.0]), lower=-largest, upper=largest)
    for cost, row in zip(costs, columns, strict=True):
        used = np.flatnonzero(row)
        variables = np.array([bound, *(moments[place] for place in used)])
        program.add_row(variables, np.array([1.0, *-row[used]]), -np.inf, cost / unit)
    program.add_row(np.array(moments), np.ones(len(moments)), 0.0, strongest)
    values = minimise(program, time_limit=10.0).values
    assert values is not None, "the program has a solution: all prices zero, and the least cost"
    prices[first] = values[np.array(moments)] * unit / limit
    return prices, float(values[bound]) * unit
