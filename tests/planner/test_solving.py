"""Searches: the same twice, told as they go, and of use when they are interrupted."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

from autoshard.capture.joint import capture
from autoshard.planner import solving
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import OverlapSearch, Planner
from autoshard.planner.progress_line import Progress, progress_text
from autoshard.planner.solving import SolveOptions, SolveResult, better_result, solve_problem
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.solver import Problem, Solution, solve
from autoshard.solver.solver_budget import Budget
from tests.planner.steps import joint_graph, links, planner_of
from tests.planner.test_tiling import Stack, built, stack_planner, tiling_of
from tests.workers import Workers


def _plan_of_a_large_stack() -> tuple[int, str]:
    """The hash of a text in this process, and a plan."""
    with mock.patch.object(solving, "LARGE", 0):
        graph = capture(Stack(7), (torch.empty(32, 16),), {}, grad=True)
        plan = planner_of(graph, {"a": 2, "b": 4}, cluster=links(4e9, 1e-6)).plan()
    return hash("text"), dataclasses.replace(plan, timings={}).to_json()


def test_the_same_input_gives_the_same_plan_in_every_process(two: Workers) -> None:
    (first, plan), (second, other) = two.run(_plan_of_a_large_stack)
    assert first != second
    assert plan == other


def test_places_follow_the_program() -> None:
    problem = built(8)
    place = problem.program_positions
    operators = [number for number, variable in enumerate(problem.variables) if variable.kind == "operator"]
    assert [place[number] for number in operators] == sorted(place[number] for number in operators)
    for edge in problem.problem.edges:
        if problem.variables[edge.source].kind == "rest":
            assert place[edge.source] < place[edge.target]


def test_a_search_may_leave_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[float] = []

    def seen(problem: Problem, *, gap: float, **options: Any) -> Solution:
        gaps.append(gap)
        return solve(problem, gap=gap, **options)

    monkeypatch.setattr(solving, "solve", seen)
    solve_problem(built(8), tiling_of(8), SolveOptions("auto", Budget()))
    assert set(gaps) == {1e-3}


def test_large_and_small_problems_are_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    search = SolveOptions("auto", Budget())
    exact = solve_problem(built(8), tiling_of(8), search)
    monkeypatch.setattr(solving, "LARGE", 0)
    told: list[tuple[str, float, float]] = []
    found = solve_problem(built(8), tiling_of(8), dataclasses.replace(search, report=lambda *one: told.append(one)))
    assert found.cost == pytest.approx(exact.cost, rel=solving.CLOSE)
    assert found.lower_bound <= exact.cost * (1 + 1e-9)
    assert told[0][0] == "messages"
    assert all(bound <= exact.cost * (1 + 1e-9) for _, _, bound in told[-1:])


def test_the_better_of_two_answers_has_the_higher_bound_of_both() -> None:
    first = SolveResult((0,), 2.0, 1.0, "one", "feasible")
    second = SolveResult((1,), 3.0, 1.5, "other", "feasible")
    both = better_result(first, second)
    assert (both.assignment, both.cost, both.lower_bound) == ((0,), 2.0, 1.5)
    assert better_result(first, SolveResult((), math.inf, 2.5, "none", "unknown")).lower_bound == 2.0


def _planner() -> Planner:
    return planner_of(joint_graph("gpt", batch=8), {"x": 4}, cluster=links(4e9, 1e-6))


def test_an_interrupted_search_hands_back_the_best_plan_met() -> None:
    planner = _planner()
    plain = planner.solve(planner.constraints)
    interrupted = _planner()
    solve = interrupted.solve_block
    calls = []

    def stopping(*arguments: object) -> object:
        if calls:
            raise KeyboardInterrupt
        calls.append(arguments)
        return solve(*arguments)  # type: ignore[arg-type]

    interrupted.solve_block = stopping  # type: ignore[method-assign, assignment]
    with pytest.warns(UserWarning, match="the search was interrupted after .* best plan met"):
        plan = interrupted.plan()
    assert isinstance(plan, ShardingPlan)
    assert plan.cost == plain.cost
    assert plan.lower_bound <= plan.cost


def test_ctrl_c_hands_back_the_best_plan_met(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = threading.Event()

    def long(search: OverlapSearch) -> CandidatePlan:
        searching.set()
        for _ in range(6000):  # a signal that another thread takes does not wake this one
            time.sleep(0.01)
        return search.first

    def press() -> None:
        searching.wait()
        os.kill(os.getpid(), signal.SIGINT)

    planner = _planner()
    monkeypatch.setattr(OverlapSearch, "run", long)
    pressing = threading.Thread(target=press)
    pressing.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.warns(UserWarning, match="the search was interrupted after .* best plan met"):
            plan = planner.plan()
    finally:
        pressing.join()
        signal.signal(signal.SIGINT, before)
    assert plan.cost == _planner().solve(planner.constraints).cost


def test_an_interruption_before_there_is_a_plan_goes_on() -> None:
    planner = _planner()

    def stopped(*arguments: object) -> object:
        raise KeyboardInterrupt

    planner.solve_block = stopped  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        planner.plan()


def test_interrupted_messages_keep_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "LARGE", 0)
    reports = []

    def stopping(*report: object) -> None:
        reports.append(report)
        if len(reports) > 1:
            raise KeyboardInterrupt

    budget = Budget()
    found = solve_problem(built(8), None, SolveOptions("auto", budget, report=stopping))
    assert budget.interrupted
    assert found.cost == pytest.approx(built(8).problem.cost(found.assignment))
    assert found.lower_bound <= found.cost


def test_fast_effort_solves_one_problem_and_says_how_near_it_is() -> None:
    planner = stack_planner(8)
    full = planner.plan()
    fast = planner_of(planner.graph, {"a": 2, "b": 4}, cluster=links(4e9, 1e-6), effort="fast").plan()
    assert fast.step_seconds >= full.step_seconds * (1 - 1e-3)
    assert fast.lower_bound <= full.cost * (1 + 1e-9)


@pytest.mark.parametrize("tied", [True, False])
def test_fast_effort_takes_segments_where_messages_leave_a_gap(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    problem, tiling = built(8), tiling_of(8) if tied else None
    exact = solve_problem(problem, tiling, SolveOptions("auto", Budget()))
    monkeypatch.setattr(solving, "LARGE", 0)
    monkeypatch.setattr(solving, "ITERATIONS", 1)
    monkeypatch.setattr(solving, "REPAIR_ITERATIONS", 1)
    fast = solve_problem(problem, tiling, SolveOptions("auto", Budget(), fast=True))
    assert fast.method.startswith("segments")
    assert fast.cost == pytest.approx(exact.cost, rel=1e-3)
    assert fast.lower_bound <= exact.cost * (1 + 1e-9)
    assert fast.cost == pytest.approx(problem.problem.cost(fast.assignment))


def test_interrupted_segments_keep_what_messages_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(solving, "LARGE", 0)
    monkeypatch.setattr(solving, "CLOSE", -1.0)
    monkeypatch.setattr(solving, "ENOUGH", -1.0)
    monkeypatch.setattr(solving, "PROVED", -1.0)
    monkeypatch.setattr(solving, "solve_in_segments", stopped)
    budget = Budget()
    found = solve_problem(built(8), tiling_of(8), SolveOptions("auto", budget))
    assert budget.interrupted
    assert found.cost == pytest.approx(built(8).problem.cost(found.assignment))


def test_a_report_reads_as_a_line() -> None:
    text = progress_text(Progress("messages", 0.1885, 0.1884, 3.12))
    assert text == "messages: 0.1885 s per step, at least 0.1884 (gap 0.05%), after 3.1 s"
    assert progress_text(Progress("search", math.inf, -math.inf, 0.0)) == "search: after 0.0 s"
