"""Room between known points: what the hull proves, and which bounds are followed."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.solver.frontier_corners import KnownPoints, OpenCorners, PruningBounds

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
