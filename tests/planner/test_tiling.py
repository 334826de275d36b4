"""Repeated layers: tied, they cost what all of them cost; what is proved at full depth is true of all plans."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.capture.joint import capture
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.solving import CLOSE, SolveOptions, solve_by_messages
from autoshard.planner.tiling import Tiling, layers_of
from autoshard.solver import solve
from autoshard.solver.reduced_problem import ReducedProblem, untie_messages
from autoshard.solver.solver_budget import Budget
from autoshard.solver.trws import Messages
from tests.planner.steps import links, planner_of


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, width), nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


@functools.cache
def stack_planner(depth: int) -> Planner:
    graph = capture(Stack(depth), (torch.empty(32, 16),), {}, grad=True)
    return planner_of(graph, {"a": 2, "b": 4}, cluster=links(4e9, 1e-6))


@functools.cache
def built(depth: int) -> BuiltProblem:
    return stack_planner(depth).builder.build(frozenset({0, 1}))


def tiling_of(depth: int) -> Tiling:
    found = Tiling.of(built(depth), stack_planner(depth).layers)
    assert found is not None
    return found


def test_all_operators_of_repeated_layers_are_placed() -> None:
    placed = layers_of(stack_planner(8).rules)
    assert {layer[1] for layer, _ in placed.values()} == set(range(8))
    per_layer = {number: sum(layer[1] == number for layer, _ in placed.values()) for number in range(8)}
    assert len(set(per_layer.values())) == 1


def test_ends_of_runs_are_tied_where_only_those_of_families_are_free() -> None:
    tiling = Tiling.of(built(8), stack_planner(8).layers, free="families")
    assert tiling is not None
    assert {tiling.follows.count(place) for place in tiling.follows} == {1, 6}


def test_only_layers_between_the_first_and_the_last_are_tied() -> None:
    problem, tiling = built(8), tiling_of(8)
    tied = {tiling.leaders[place] for place in tiling.follows if tiling.follows.count(place) > 1}
    counts = {tiling.follows.count(place) for place in tiling.follows}
    assert counts == {1, 4}  # of eight: what the first and the last one join differs, and the run has ends of its own
    names = {problem.variables[variable].key for variable in tied}
    placed = stack_planner(8).layers
    assert {placed[name][0][1] for name in names if name in placed} == {2}
    rests = [variable for variable in tied if problem.variables[variable].kind == "rest"]
    assert len(rests) == 6  # weights and biases of one layer


def test_few_layers_are_left_alone() -> None:
    assert Tiling.of(built(3), stack_planner(3).layers) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_folded_assignment_costs_what_it_costs_spread(seed: int) -> None:
    problem, tiling = built(8).problem, tiling_of(8)
    tied = tiling.tie(ReducedProblem.of(problem, built(8).program_positions))
    folded = tied.problem
    random = np.random.default_rng(seed)
    assignment = [int(random.integers(len(vector))) for vector in folded.costs]
    assert folded.cost(assignment) == pytest.approx(problem.cost(tied.solution(assignment)), rel=1e-9)


def test_the_tied_plan_is_certified_at_full_depth() -> None:
    whole = built(8)
    optimum = solve(whole.problem, time_limit=300)
    assert optimum.status == "optimal"
    problem = ReducedProblem.of(whole.problem, whole.program_positions)
    answer = solve_by_messages(problem, tiling_of(8).tie(problem), SolveOptions("auto", Budget()))
    assert answer.lower_bound <= optimum.cost * (1 + 1e-9)
    assert answer.cost >= optimum.cost * (1 - 1e-9)
    assert answer.gap <= CLOSE
    assert whole.problem.cost(answer.assignment) == pytest.approx(answer.cost, rel=1e-12)


def test_messages_laid_along_all_layers_begin_near_their_bound() -> None:
    whole, tiling = built(8), tiling_of(8)
    order = whole.program_positions
    tied = tiling.tie(ReducedProblem.of(whole.problem, order))
    folded = Messages(tied.problem, tied.order)
    reached = folded.run(60).bound
    spread = Messages(whole.problem, order)
    cold = spread.run(1).bound
    warm = Messages(whole.problem, order)
    warm.start_from(*untie_messages(whole.problem, tiling.follows, folded.along, folded.against))
    assert warm.run(1).bound > (cold + reached) / 2


def test_planning_hardly_grows_with_depth() -> None:
    assert len(tiling_of(12).leaders) == len(tiling_of(8).leaders)
