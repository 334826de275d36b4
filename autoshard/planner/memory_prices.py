"""Prices of memory at every moment, from plans that were met: those at which a mix of them is best within a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.linear import LinearProgram, minimise


def mix_prices(
    costs: Sequence[float], held: Sequence[np.ndarray], limit: float, strongest: float
) -> tuple[np.ndarray, float]:
    """Return the prices of memory at which no plan of some is better than their best mix within a limit.

    They are the dual solution of the linear program that mixes plans, each with a weight, so that the mix costs least
    and holds no more than the limit at any moment (column generation: Dantzig and Wolfe, 1960). A plan that costs less
    at these prices than the second value would make the mix better.

    Args:
        costs: seconds of every plan.
        held: bytes of every plan at every moment, of one shape.
        limit: bytes.
        strongest: seconds that the limit's bytes cost at most, at all moments together: so much where no mix fits.

    Returns:
        Seconds per byte at every moment, and the seconds of the best mix with its memory at these prices.
    """
    # In units of the dearest plan: GLOP's tolerances are absolute.
    unit = max(costs)
    table = np.asarray(held) / limit
    strongest /= unit
    # Of moments at which all plans hold as much, one stands for all; where no plan comes near the limit, none counts.
    columns, first = np.unique(table, axis=1, return_index=True)
    near = np.flatnonzero(columns.max(axis=0) >= 0.5)
    columns, first = columns[:, near], first[near]
    prices = np.zeros(table.shape[1])
    if not len(first):
        return prices, min(costs)
    program = LinearProgram()
    moments = program.add_variables(np.ones(len(first)), upper=strongest)
    # The bound of the mix: it may be as large as the dearest plan at the strongest prices.
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
