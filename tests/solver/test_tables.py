"""Rows and columns that are alike are found; passes over tables that have them tell the same as over all entries."""

import itertools

import numpy as np
import pytest

from autoshard.solver import Edge, Problem
from autoshard.solver.problem import Array
from autoshard.solver.tables import equal_rows_and_columns
from autoshard.solver.trws import Messages


def _repeated(rng: np.random.Generator, rows: int, columns: int, kinds: int) -> Array:
    """A table of few kinds of rows and columns, some entries of which are forbidden."""
    few = rng.integers(0, 50, size=(kinds, kinds)).astype(float)
    few[rng.random(few.shape) < 0.1] = np.inf
    few[0] = few[:, 0] = 60.0  # something is always allowed
    return few[np.ix_(np.sort(rng.integers(0, kinds, rows)), rng.integers(0, kinds, columns))]


def test_classes_make_the_table_again() -> None:
    table = _repeated(np.random.default_rng(0), 120, 90, 25)
    result = equal_rows_and_columns(table)
    assert result is not None
    rows, columns = result
    assert len(rows.first) <= 25
    assert len(columns.first) <= 25
    again = table[np.ix_(rows.first, columns.first)][np.ix_(rows.number, columns.number)]
    assert np.array_equal(again, table)


@pytest.mark.parametrize("shape", [(120, 90), (20, 20)])
def test_nothing_is_said_of_tables_that_differ_or_are_small(shape: tuple[int, int]) -> None:
    differ = np.random.default_rng(0).random(shape)
    assert equal_rows_and_columns(differ) is None
    assert equal_rows_and_columns(np.zeros((20, 20))) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_passes_over_classes_bound_a_chain_exactly(order: tuple[int, ...]) -> None:
    """On a chain the bound is the optimum, which a sum over all entries tells; the ends of edges lie either way."""
    rng = np.random.default_rng(sum(place * 3**index for index, place in enumerate(order)))
    sizes = (100, 110, 95)
    costs = tuple(rng.integers(0, 40, size).astype(float) for size in sizes)
    first, second = _repeated(rng, 100, 110, 12), _repeated(rng, 95, 110, 9)
    assert equal_rows_and_columns(first) is not None
    assert equal_rows_and_columns(second) is not None
    problem = Problem(costs, (Edge(0, 1, first), Edge(2, 1, second)))
    least = (costs[0][:, None] + first).min(axis=0) + costs[1] + (costs[2][:, None] + second).min(axis=0)
    relaxed = Messages(problem, [float(place) for place in order]).run(3)
    assert relaxed.bound == pytest.approx(least.min(), rel=1e-9)
    assert relaxed.cost == least.min()
    assert problem.cost(relaxed.assignment) == least.min()
