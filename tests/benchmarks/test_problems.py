"""`benchmarks/problems.py` and `same_plans.py`: a file gives back what was recorded; what is worse is told."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.planner.tiling import Tiling
from autoshard.solver import Edge, Problem
from autoshard.solver.problem import Blend

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[SimpleNamespace]:
    """The modules of the benchmarks, which import one another as a script's do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("problem_files", "problems", "same_plans")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_a_file_gives_back_what_was_recorded(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    """Two problems that share vectors and tables, one with blends and a limit: all is equal, and as much is shared."""
    random = np.random.default_rng(0)
    vector, table, held = random.random(3), random.random((3, 3)), random.random((3, 3))
    table[0, 1] = np.inf
    labels = np.array([[0, 1], [2, -1], [1, 1]])
    plain = Problem((vector,) * 4, tuple(Edge(node, node + 1, table) for node in range(3)), components=(labels,) * 4)
    blend = Blend(((1.0, table), (0.25, held)))
    edges = (Edge(0, 1, blend), Edge(1, 2, held), Edge(2, 3, blend))
    limited = Problem((vector,) * 4, edges, (vector * 8,) * 4, ((0, 2), (1, 3), (2, 9), (5, 5)), 7.5)
    record = benchmarks.problem_files.RecordedProblem
    written = {
        "plain": record(plain, [0.0, 1.0, 2.5, 3.0], Tiling((0, 1, 3), (0, 1, 1, 2)), "plain"),
        "limited": record(limited, [0.0, 1.0, 2.5, 3.0], None, "limited"),
    }
    path = tmp_path / "problems.npz"
    benchmarks.problem_files.save(path, written)
    read = benchmarks.problem_files.load(path)
    assert list(read) == list(written)
    for name, recorded in read.items():
        before = written[name]
        assert (recorded.kind, recorded.program_positions) == (before.kind, before.program_positions)
        assert recorded.problem.limit == before.problem.limit
        assert recorded.problem.intervals == before.problem.intervals
        for assignment in np.ndindex(3, 3, 3, 3):
            assert recorded.problem.cost(assignment) == before.problem.cost(assignment)
            assert recorded.problem.peak(assignment) == before.problem.peak(assignment)
    first, second = read["plain"].problem, read["limited"].problem
    assert (read["plain"].tiling.leaders, read["plain"].tiling.follows) == ((0, 1, 3), (0, 1, 1, 2))
    assert all(np.array_equal(one, labels) for one in first.components)
    assert len({id(one) for one in (*first.costs, *second.costs)}) == 1, "shared by nodes and by problems"
    assert second.edges[0].table is second.edges[2].table
    assert second.edges[0].parts[0][1] is first.edges[0].costs
    assert second.edges[0].parts[1][1] is second.edges[1].costs


def test_a_recorded_problem_is_solved_as_the_one_that_was_built(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    problems = benchmarks.problems
    step = problems.STEPS["mlp"]
    planner = problems.planner_of(step)
    plan = planner.solve(planner.constraints)
    built = {name: problems.recorded(planner, name, plan) for name in step.names}
    assert {one.kind for one in built.values()} == {"plain", "limited", "priced", "hidden"}
    benchmarks.problem_files.save(tmp_path / "mlp.npz", built)
    for name, read in benchmarks.problem_files.load(tmp_path / "mlp.npz").items():
        before, now = (problems.figures(one) for one in (built[name], read))
        assert {**now, "seconds": 0.0} == {**before, "seconds": 0.0}
        assert now["cost"] is not None, name
        assert not problems.is_worse(now, before)
    assert problems.figures(built["plain"])["cost"] == pytest.approx(plan.cost)


def test_a_higher_cost_or_a_lower_bound_is_worse(benchmarks: SimpleNamespace) -> None:
    is_worse, before = benchmarks.problems.is_worse, {"cost": 2.0, "bound": 1.0}
    assert not is_worse({"cost": 2.0 + 1e-9, "bound": 1.0}, before)
    assert not is_worse({"cost": 1.5, "bound": 1.2}, before)
    assert not is_worse({"cost": 3.0, "bound": 0.0}, {"cost": None, "bound": None})
    assert is_worse({"cost": 2.1, "bound": 1.0}, before)
    assert is_worse({"cost": None, "bound": 1.0}, before)
    assert is_worse({"cost": 2.0, "bound": None}, before)


def test_worse_answers_are_told_in_words(benchmarks: SimpleNamespace) -> None:
    plans, case = benchmarks.same_plans, benchmarks.same_plans.Case("mlp", {"dp": 8})
    point = {"step": 2.0, "peak": 100, "bound": 1.0}
    refused = {"smallest": 50}
    assert plans.worse(case, {"": point}, {"": point}) == []
    assert plans.worse(case, {"": point | {"peak": 200}}, {"": point}) == [], "a limit is kept, or told in `smallest`"
    assert plans.worse(case, {"": point | {"step": 2.1, "bound": 0.9}}, {"": point}) == ["slower", "has a looser bound"]
    assert plans.worse(case, {}, {"DDP": point}) == ["DDP is missing"]
    assert plans.worse(case, {"": refused}, {"": point}) == ["slower"]
    assert plans.worse(case, {"": point}, {"": refused}) == []
    assert plans.worse(case, {"": {"smallest": 60}}, {"": refused}) == ["needs more"]
    frontier = dataclasses.replace(case, ask="frontier")
    lean = {"step": 3.0, "peak": 50, "bound": 1.0}
    assert plans.worse(frontier, {"0": lean, "1": point}, {"0": point, "1": lean}) == []
    assert len(plans.worse(frontier, {"0": lean}, {"0": lean, "1": point})) == 1


def test_requests_have_names_of_their_own(benchmarks: SimpleNamespace) -> None:
    names = [case.name for case in benchmarks.same_plans.CASES]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("ask", ["frontier", "search", "why", "compare"])
def test_every_kind_of_request_is_answered(benchmarks: SimpleNamespace, ask: str) -> None:
    plans = benchmarks.same_plans
    mesh = {"": 2} if ask == "search" else {"dp": 2}
    options = {"frontier": {"gaps": 0}, "search": {"pipelines": False}}.get(ask, {})
    asked = {"*.weight": {"dp": plans.Shard(0)}} if ask == "why" else {}
    answer = plans.answer(plans.Case("mlp", mesh, options, 0.0, ask, asked))
    assert answer["points"]
    assert all(point["step"] > 0 and point["peak"] > 0 for point in answer["points"].values())


def test_a_limit_of_an_earlier_answer_is_asked_for_again(benchmarks: SimpleNamespace) -> None:
    plans = benchmarks.same_plans
    small = plans.answer(plans.Case("mlp", {"dp": 2}, share=0.2))
    assert small["points"][""]["smallest"] > small["limit"]
    kept = plans.answer(plans.Case("mlp", {"dp": 2}, share=0.2), small["points"][""]["smallest"])
    assert kept["limit"] == small["points"][""]["smallest"] >= kept["points"][""]["peak"]
