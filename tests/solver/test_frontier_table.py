"""Tables of frontiers: joined, thinned and unrolled."""

from __future__ import annotations

import numpy as np

from autoshard.solver.frontier_table import UNIT, FrontierTable, Joiner, unroll

HERE = np.zeros(1, dtype=np.int64)


def curve(*points: tuple[float, float]) -> FrontierTable:
    """A table of one cell with these points (memory, time)."""
    memory, time = np.array(points, dtype=float).T
    return FrontierTable(np.array([0, len(points)]), memory, time)


def points_of(table: FrontierTable) -> list[tuple[float, float]]:
    return list(zip(table.memory.tolist(), table.time.tolist(), strict=True))


def test_a_product_is_reduced() -> None:
    one, other = curve((1, 9), (2, 5)), curve((1, 4), (2, 3), (4, 1))
    # (2, 13), (3, 12), (3, 9), (4, 8), (5, 10), (6, 6) without what is dominated.
    assert points_of(Joiner().join(one, other, HERE, HERE)) == [(2, 13), (3, 9), (4, 8), (6, 6)]


def test_a_union_over_strategies_remembers_which_one_it_took() -> None:
    choices = FrontierTable.of(np.array([5.0, np.inf, 2.0]), np.array([1.0, 0.0, 3.0]))
    joined = Joiner().join(choices, UNIT, np.arange(3), np.zeros(3, dtype=np.int64), 3, decided=0)
    assert points_of(joined) == [(1, 5), (3, 2)]
    assignments = np.zeros((2, 1), dtype=np.int64)
    unroll(joined, assignments)
    assert assignments.tolist() == [[0], [2]]


def test_of_points_closer_than_the_tolerance_the_leaner_one_stays() -> None:
    joiner = Joiner(budget=1.0, joins=1)
    points = curve((1, 10), (2, 9.6), (3, 9.5), (4, 7), (5, 6.9), (6, 6.8))
    thinned = joiner.join(points, UNIT, HERE, HERE, decided=0)
    assert points_of(thinned) == [(1, 10), (2, 9.6), (4, 7), (6, 6.8)]
    assert joiner.spent == max(9.6 - 9.5, 7 - 6.9)


def test_a_long_join_is_cut_in_stretches_without_a_trace() -> None:
    random = np.random.default_rng(0)
    cells, points = 800, 40
    counts = np.full(cells, points)
    memory = np.sort(random.random((cells, points)), 1).ravel()
    time = -np.sort(-random.random((cells, points)), 1).ravel()
    table = FrontierTable(np.append(0, np.cumsum(counts)), memory, time)
    every = np.arange(cells)
    whole = Joiner().join(table, table, every, every)
    for cell in (0, cells // 2, cells - 1):
        one = Joiner().join(table, table, every[cell : cell + 1], every[cell : cell + 1])
        stretch = slice(whole.starts[cell], whole.starts[cell + 1])
        assert whole.memory[stretch].tolist() == one.memory.tolist()
        assert whole.time[stretch].tolist() == one.time.tolist()
