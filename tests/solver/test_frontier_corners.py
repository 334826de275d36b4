"""Room between known points: what the hull proves, and which bounds are followed.

Elimination at many prices at once: optima of the whole, and of every choice, against trying everything.
"""

from __future__ import annotations

from itertools import product
from operator import attrgetter

import numpy as np
import pytest

from autoshard.solver.buckets import buckets
from autoshard.solver.frontier_corners import Costs, KnownPoints, OpenCorners, PricedProblem, PruningBounds

WEIGHTS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]])
BEST = np.array([2.0, 1.0, 6.0])  # of the points (memory, time) (1, 6) and (2, 2), and of a hull that passes below
MOST = (100.0, 100.0)


def known(*points: tuple[float, float]) -> KnownPoints:
    memory, time = np.array(points, dtype=float).T
    return KnownPoints.of(memory, time, np.arange(len(points))[:, None])


def test_beaten_points_are_not_kept() -> None:
    kept = known((3, 1), (1, 6), (2, 7), (2, 2), (2, 2 * (1 - 1e-15)))
    assert kept.memory.tolist() == [1, 2, 3]
    assert kept.time == pytest.approx([6, 2, 1])
    assert kept.merge(known((0, 1))).memory.tolist() == [0]


def test_within_is_what_the_hull_leaves_open() -> None:
    # Below two bytes the third price allows 6 - 2 * 2 = 2 seconds; above them the first allows 2.
    assert known((1, 6), (2, 2)).largest_gap(WEIGHTS, BEST) == pytest.approx(6 / 2 - 1)
    assert known((2, 2)).largest_gap(WEIGHTS, BEST) == 0.0
    assert known((1, 6), (2, 2)).largest_gap(WEIGHTS, np.array([0.0, 1.0, 0.0])) == np.inf


def test_only_bounds_before_a_corner_are_followed() -> None:
    open_corners = OpenCorners.between(known((1, 6), (2, 2)), WEIGHTS, BEST, 0.0, MOST)
    # Corners: less than one byte and more than 100 bytes are ruled out by the optima; (2, 6) is left.
    assert len(open_corners) == 1
    bounds = np.array([[5.0, 1.5, 7.0], [6.0, 1.5, 9.0], [5.0, 2.0, 9.0], [3.0, 1.0, 10.0]])
    rows, places = open_corners.pairs_below(bounds)
    assert rows.tolist() == [0]
    assert places.tolist() == [0]


def test_the_most_promising_points_of_a_cell_stay() -> None:
    open_corners = OpenCorners.between(known((1, 6), (2, 2)), WEIGHTS, BEST, 0.0, MOST)
    pruning = PruningBounds(open_corners, np.zeros((2, 3)), np.ones(2, dtype=bool))
    cell, memory, time = np.array([0, 0, 1]), np.array([1.5, 1.2, 1.9]), np.array([4.0, 3.6, 5.9])
    assert pruning.promising_points(cell, memory, time, None).tolist() == [0, 1, 2]
    assert pruning.promising_points(cell, memory, time, 1).tolist() == [1, 2]


def test_points_that_are_hoped_for_lie_beside_the_hull() -> None:
    points = known((1, 6), (2, 2))
    hoped = points.with_targets(WEIGHTS, BEST, 0.1)
    assert len(hoped) > 5
    new = hoped.assignments[:, 0] < 0
    times = hoped.time[new] / 1.1
    assert hoped.memory[new] == pytest.approx((6 - times) / 2)


SIZES = {0: 2, 1: 3, 2: 2, 3: 3}
ORDER = (2, 0, 3, 1)
PRICED_WEIGHTS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5], [1.0, 7.0]])


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
        parts = [one.at(PRICED_WEIGHTS)[tuple(choice[node] for node in one.scope)] for one in costs]
        result[choice] = np.sum(parts, axis=0)
    return result


def test_optima_at_every_price() -> None:
    costs = ring()
    priced = PricedProblem(
        SIZES, Costs((), np.array(0.0), np.array(0.0)), buckets(ORDER, costs, attrgetter("scope")), PRICED_WEIGHTS
    )
    all_costs = every(costs)
    assert (priced.best == np.min(list(all_costs.values()), axis=0)).all()
    optima = priced.optima()
    for price in range(len(PRICED_WEIGHTS)):
        choice = tuple(int(optima[node][price]) for node in sorted(SIZES))
        assert all_costs[choice][price] == priced.best[price]


def test_optima_given_the_strategies_of_every_bucket() -> None:
    costs = ring()
    tree = buckets(ORDER, costs, attrgetter("scope"))
    priced = PricedProblem(SIZES, Costs((), np.array(0.0), np.array(0.0)), tree, PRICED_WEIGHTS)
    all_costs = every(costs)
    for bucket, (wholes, outside) in zip(reversed(tree), priced.conditional_optima(), strict=True):
        assert outside.shape == (*wholes.shape[:-2], len(PRICED_WEIGHTS))
        for strategies in product(*(range(SIZES[node]) for node in bucket.scope)):
            given = dict(zip(bucket.scope, strategies, strict=True))
            meant = [cost for choice, cost in all_costs.items() if all(choice[n] == s for n, s in given.items())]
            assert np.allclose(wholes[strategies], np.min(meant, axis=0))
