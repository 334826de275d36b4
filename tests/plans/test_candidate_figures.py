from __future__ import annotations

from autoshard.plans.candidate_figures import CandidateRow, candidates_figure
from tests.plans.test_step_figures import check_figure

BEST = CandidateRow("a", 1.0, 0.5, 10, 20, "chosen", True)
CLOSE = CandidateRow("b", 1.1, 0.5, 12, 20, "10% slower", False)
LARGE = CandidateRow("c", 0.9, 0.5, 30, 20, "holds too much", False)
BOUND = CandidateRow("d", None, 0.95, None, 20, "takes at least 0.95 s", False)
ESTIMATE = CandidateRow("f", 0.8, None, 10, 20, "estimated, not planned", False, is_estimate=True)
UNKNOWN = CandidateRow("e", None, None, None, 20, "refused", False)


def test_every_candidate_is_a_bar_of_its_fate() -> None:
    (figure,) = candidates_figure([UNKNOWN, BOUND, ESTIMATE, LARGE, CLOSE, BEST])
    check_figure(figure)
    bars = {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in figure.views[0].data}
    assert bars == {
        "chosen": {"a": 1.0},
        "not chosen": {"b": 1.1},
        "holds too much": {"c": 0.9},
        "estimated, not planned": {"f": 0.8},
        "lower bound": {"d": 0.95},
    }
    assert figure.views[0].layout["yaxis"]["categoryarray"] == ["a", "c", "b", "f", "d"]


def test_the_memory_of_planned_candidates_is_drawn_beside_the_limit() -> None:
    (figure,) = candidates_figure([BEST, CLOSE, LARGE, BOUND])
    view = figure.views[1]
    assert sorted(x for trace in view.data for x in trace["x"]) == [10, 12, 30]
    assert [line["x0"] for line in view.layout["shapes"]] == [20]


def test_only_the_fastest_of_many_are_drawn() -> None:
    many = [CandidateRow(f"n{index}", 1.0 + index, None, 10, 0, "slower", False) for index in range(50)]
    (figure,) = candidates_figure([*reversed(many), BEST])
    names = figure.views[0].layout["yaxis"]["categoryarray"]
    assert names == ["a", *(f"n{index}" for index in range(29))]
    assert "30 of 51 candidates" in figure.caption


def test_candidates_without_times_have_no_chart() -> None:
    assert list(candidates_figure([UNKNOWN])) == []
