from __future__ import annotations

from autoshard.plans.candidate_chart import CandidateRow, candidates_chart
from autoshard.report import Plot

BEST = CandidateRow("a", 1.0, 0.5, 10, 20, "chosen", True)
CLOSE = CandidateRow("b", 1.1, 0.5, 12, 20, "10% slower", False)
LARGE = CandidateRow("c", 0.9, 0.5, 30, 20, "holds too much", False)
BOUND = CandidateRow("d", None, 0.95, None, 20, "takes at least 0.95 s", False)
ESTIMATE = CandidateRow("f", 0.8, None, 10, 20, "estimated, not planned", False, is_estimate=True)
UNKNOWN = CandidateRow("e", None, None, None, 20, "refused", False)


def plot_of(*rows: CandidateRow, view: int = 0) -> Plot:
    """Return a view of the chart of candidates."""
    (chart,) = candidates_chart(rows)
    plot = chart.views[view]
    assert isinstance(plot, Plot)
    return plot


def test_every_candidate_is_a_bar_of_its_fate() -> None:
    plot = plot_of(UNKNOWN, BOUND, ESTIMATE, LARGE, CLOSE, BEST)
    assert {one.name: dict(zip(one.y, one.x, strict=True)) for one in plot.series} == {
        "chosen": {"a": 1.0},
        "not chosen": {"b": 1.1},
        "holds too much": {"c": 0.9},
        "estimated, not planned": {"f": 0.8},
        "lower bound": {"d": 0.95},
    }
    assert plot.y.categories == ("a", "c", "b", "f", "d")


def test_the_memory_of_planned_candidates_is_drawn_beside_the_limit() -> None:
    plot = plot_of(BEST, CLOSE, LARGE, BOUND, view=1)
    assert sorted(x for one in plot.series for x in one.x) == [10, 12, 30]
    assert [mark.place for mark in plot.marks] == [20]


def test_only_the_fastest_of_many_are_drawn() -> None:
    many = [CandidateRow(f"n{index}", 1.0 + index, None, 10, 0, "slower", False) for index in range(50)]
    (chart,) = candidates_chart([*reversed(many), BEST])
    assert plot_of(*reversed(many), BEST).y.categories == ("a", *(f"n{index}" for index in range(29)))
    assert "30 of 51 candidates" in chart.caption


def test_candidates_without_times_have_no_chart() -> None:
    assert list(candidates_chart([UNKNOWN])) == []
