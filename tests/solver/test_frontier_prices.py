"""Elimination at many prices at once: optima of the whole, and of every choice, against trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np

from autoshard.solver.frontier_prices import Costs, PricedProblem, buckets

SIZES = {0: 2, 1: 3, 2: 2, 3: 3}
ORDER = (2, 0, 3, 1)
WEIGHTS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5], [1.0, 7.0]])


def ring() -> list[Costs]:
    """Four nodes in a ring, of which one combination is forbidden; scopes from the node eliminated last."""
    random = np.random.default_rng(0)
    scopes: list[tuple[int, ...]] = [(0,), (1,), (2,), (3,), (1, 0), (1, 2), (3, 2), (3, 0)]
    costs = []
    for scope in scopes:
        shape = [SIZES[node] for node in scope]
        time = random.integers(1, 50, shape).astype(float)
        costs.append(Costs(scope, time, random.integers(0, 50, shape).astype(float)))
    costs[4].time[2, 1] = np.inf
    return costs


def every(costs: list[Costs]) -> dict[tuple[int, ...], np.ndarray]:
    """What all assignments cost at each price."""
    result = {}
    for choice in product(*(range(size) for size in SIZES.values())):
        parts = [one.at(WEIGHTS)[tuple(choice[node] for node in one.scope)] for one in costs]
        result[choice] = np.sum(parts, axis=0)
    return result


def test_optima_at_every_price() -> None:
    costs = ring()
    priced = PricedProblem(SIZES, Costs((), np.array(0.0), np.array(0.0)), buckets(ORDER, costs), WEIGHTS)
    all_costs = every(costs)
    assert (priced.best == np.min(list(all_costs.values()), axis=0)).all()
    optima = priced.optima()
    for price in range(len(WEIGHTS)):
        choice = tuple(int(optima[node][price]) for node in sorted(SIZES))
        assert all_costs[choice][price] == priced.best[price]


def test_optima_given_the_strategies_of_every_bucket() -> None:
    costs = ring()
    tree = buckets(ORDER, costs)
    priced = PricedProblem(SIZES, Costs((), np.array(0.0), np.array(0.0)), tree, WEIGHTS)
    all_costs = every(costs)
    for bucket, (wholes, outside) in zip(reversed(tree), priced.conditional_optima(), strict=True):
        assert outside.shape == (*wholes.shape[:-2], len(WEIGHTS))
        for strategies in product(*(range(SIZES[node]) for node in bucket.scope)):
            given = dict(zip(bucket.scope, strategies, strict=True))
            meant = [cost for choice, cost in all_costs.items() if all(choice[n] == s for n, s in given.items())]
            assert np.allclose(wholes[strategies], np.min(meant, axis=0))
