"""`benchmarks/checkmate.py`: the program's optimum is that of all schedules of small graphs; a step is made a graph."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NODES = 5


@pytest.fixture(scope="module")
def checkmate() -> Iterator[Any]:
    """The module of the benchmark, which imports others as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("checkmate")


def schedules() -> Iterator[tuple[tuple[int, ...], ...]]:
    """All sets of earlier nodes that run again before each node."""
    earlier = [
        [again for count in range(node + 1) for again in itertools.combinations(range(node), count)]
        for node in range(NODES)
    ]
    for chosen in itertools.product(*earlier):
        yield tuple((*again, node) for node, again in enumerate(chosen))


def random_graph(checkmate: Any, seed: int) -> Any:
    """Each node reads the one before and perhaps others; the last but one is returned."""
    random = np.random.default_rng(seed)
    operators = []
    for node in range(NODES):
        reads = {node - 1} if node else set()
        reads |= {int(one) for one in np.flatnonzero(random.random(node) < 0.4)}
        cost, held = float(random.integers(1, 9)), int(random.integers(1, 9))
        working = int(random.integers(0, 5))
        operators.append(checkmate.Operator(cost, held, tuple(sorted(reads)), node == NODES - 2, working))
    return checkmate.Checkmate(operators)


def seconds(program: Any, schedule: Sequence[Sequence[int]]) -> float:
    return sum(program.operators[one].seconds for stage in schedule for one in stage[:-1])


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_all_schedules(checkmate: Any, seed: int) -> None:
    program = random_graph(checkmate, seed)
    known = [(max(program.held(schedule)), seconds(program, schedule)) for schedule in schedules()]
    assert program.plain_peak == known[0][0]
    smallest = min(peak for peak, _ in known)
    for limit in range(smallest - 1, program.plain_peak + 1):
        best = min((cost for peak, cost in known if peak <= limit), default=None)
        found = program.solve(limit, 60.0)
        assert found.seconds == (None if best is None else pytest.approx(best)), limit
        assert found.proved == (best is not None)
        if best is not None:
            assert max(program.held(found.schedule)) <= limit
            assert seconds(program, found.schedule) == pytest.approx(best)
    assert program.solve(0, 1.0) == checkmate.Optimum(None, math.inf)


def test_every_schedule_is_an_answer_to_the_program(checkmate: Any) -> None:
    """But for those that make again what is held to the end."""
    program = random_graph(checkmate, 5)
    sensible = (schedule for schedule in schedules() if not any(NODES - 2 in stage[:-1] for stage in schedule))
    for schedule in itertools.islice(sensible, 0, None, 37):
        peak = max(program.held(schedule))
        stages = checkmate._Stages(program, peak)
        values = stages.values_of(schedule)
        assert stages.schedule(values) == tuple(tuple(sorted(stage)) for stage in schedule)
        for variables, coefficients, least, most in stages.program.rows:
            assert least - 1e-9 <= np.dot(coefficients, values[variables]) <= most + 1e-9
        assert np.all(values <= 1 + 1e-9)
        assert program.solve(peak, 60.0, schedule).seconds <= seconds(program, schedule) + 1e-9


def test_a_chain_runs_again_what_is_cheap(checkmate: Any) -> None:
    """Of two large results that the end reads, the one that takes less time is made twice."""
    operator = checkmate.Operator
    program = checkmate.Checkmate(
        [operator(1.0, 1, ()), operator(5.0, 4, (0,)), operator(2.0, 4, (0,)), operator(1.0, 5, (0,)),
         operator(1.0, 1, (3,)), operator(1.0, 1, (1, 4)), operator(1.0, 1, (2, 5))]
    )  # fmt: skip
    assert program.solve(program.plain_peak, 60.0).seconds == 0.0
    tight = program.solve(program.plain_peak - 1, 60.0)
    assert tight.seconds == pytest.approx(2.0)
    assert sum(2 in stage for stage in tight.schedule) == 2


def test_a_step_is_a_graph_with_the_peak_of_its_plan(checkmate: Any) -> None:
    module, inputs = checkmate._example(
        lambda: checkmate.Repeated(lambda: checkmate.nn.Sequential(checkmate.nn.Linear(8, 8), checkmate.nn.GELU()), 2),
        256,
        8,
    )
    planner = checkmate.planning_of(module, inputs, "h100").planner()
    step = checkmate.graph_of(planner)
    plan = planner.solve(planner.constraints)
    assert sum(one.seconds for one in step.operators) == pytest.approx(plan.cost)
    program = checkmate.Checkmate(step.operators)
    assert checkmate.at_rest(plan.memory) + program.plain_peak == plan.memory.peak
    layers = checkmate.recomputable(planner.graph)
    schedule = step.schedule_of(layers)
    again = sum(len(stage) - 1 for stage in schedule)
    assert again == len({step.number[node] for layer in layers for node in layer.rerun if node in step.number}) > 0
