"""A copy that both halves use is kept or made again, depending on the price of memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

import autoshard
from autoshard.capture.joint import capture
from autoshard.capture.nodes import is_view
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.regather import (
    Origin,
    RegatherChoice,
    hubs_from_choices,
    regather_choices,
    regather_edge,
    tie_costs,
)
from autoshard.solver import solve
from autoshard.specs.spec import Spec
from tests.planner.steps import every_parameter, joint_graph, planner_of

WHOLE, SHARDED = Spec.parse("R"), Spec.parse("S(0)")


def test_what_is_kept_is_what_the_forward_half_made() -> None:
    specs = (WHOLE, SHARDED)
    options = regather_choices(specs)
    costs = tie_costs(len(specs))
    for row, made in enumerate(specs):
        for column, option in enumerate(options):
            assert costs[row, column] == (np.inf if option.kept and option.spec is not made else 0.0)


def _at_prices(copied_from: np.ndarray, lying: np.ndarray, between: float, after: float) -> list[list[float]]:
    """Costs of the edge from where a tensor lies, for bytes of copies, and bytes of the tensor itself."""
    seconds = np.array([[0.0, 3.0], [2.0, 0.0]])
    tables = regather_edge(seconds, copied_from, lying)
    costs: list[list[float]] = (tables.seconds + between * tables.between + after * tables.after).tolist()
    return costs


def test_making_again_costs_a_reshard_and_keeping_the_memory_in_between() -> None:
    costs = _at_prices(np.array([[0.0, 10.0], [20.0, 0.0]]), np.zeros(2), between=0.25, after=0.5)
    assert costs == [[0.0, 3.0 + 5.0, 0.0, 7.5], [2.0 + 10.0, 0.0, 15.0, 0.0]]


def test_an_activation_is_itself_held_until_it_is_read_for_the_last_time() -> None:
    costs = _at_prices(np.array([[0.0, 10.0], [20.0, 0.0]]), np.array([20.0, 10.0]), between=0.25, after=0.5)
    # It is read itself, or a copy is made of it again; or it is read itself, or a copy was kept instead of it.
    assert costs == [[15.0, 3.0 + 5.0 + 5.0, 15.0, 7.5], [2.0 + 10.0 + 2.5, 7.5, 15.0, 7.5]]


def test_decisions_have_one_hub_where_a_copy_is_kept_and_two_where_it_is_made_again() -> None:
    hubs = {"x@forward": WHOLE, "y@forward": SHARDED, "z": WHOLE}
    found = hubs_from_choices(hubs, {"x": RegatherChoice(WHOLE, "kept"), "y": RegatherChoice(WHOLE, "gathered")})
    assert found == {"x": WHOLE, "y@forward": SHARDED, "y@backward": WHOLE, "z": WHOLE}


# In a problem


@cache
def _planner() -> Planner:
    graph = joint_graph("gpt", batch=96)
    return planner_of(graph, {"x": 4}, Constraints(forced=every_parameter(graph), planned_outputs=True))


@cache
def _priced(strength: float) -> CandidatePlan:
    """Return the plan at an equal price of memory at every moment; all of its memory costs `strength` steps."""
    return _at_price(_planner(), strength)


def _at_price(planner: Planner, strength: float) -> CandidatePlan:
    free = planner.solve(planner.constraints)
    moments = len(planner.rules.operators) + 1
    return planner.solve(
        planner.constraints, prices=np.full(moments, strength * free.cost / free.memory.peak / moments)
    )


def _gathered(found: CandidatePlan) -> dict[str, str]:
    return dict(_planner().account(found.decisions).gathered_parameters())


def test_without_a_price_of_memory_what_is_gathered_is_kept() -> None:
    planner = _planner()
    found = planner.solve(planner.constraints)
    assert set(_gathered(found).values()) == {"once"}
    assert not any("@" in key for key in found.decisions.hubs)


def test_where_memory_is_dear_parameters_are_gathered_again() -> None:
    planner = _planner()
    kept, again = planner.solve(planner.constraints), _priced(10.0)
    assert "again" in _gathered(again).values()
    assert again.memory.peak < kept.memory.peak
    assert again.cost > kept.cost
    legs = planner.account(again.decisions).reshards
    copies = {leg.key for leg in legs if leg.value.node.op == "placeholder" and not leg.gradient}
    assert any(key.replace("@backward", "@forward") in copies for key in copies if "@backward" in key)


class Sequence(nn.Module):
    """A sequence that lies in shards between two products with weights that lie in shards, as Megatron has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(24, 480), nn.Linear(480, 960), nn.Linear(960, 480)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = autoshard.shard(self.embed(x).tanh(), Shard(1))
        return self.down(self.up(y).square().tanh()).square().mean()


def _is_pinned(node: fx.Node) -> bool:
    """Return True if a node is the pinned activation, or a view of it."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.name == "pin"


@pytest.mark.parametrize(("strength", "phases"), [(0.0, {"forward"}), (1.0, {"forward", "backward"})])
def test_activations_too_may_be_gathered_again(strength: float, phases: set[str]) -> None:
    graph = capture(Sequence(), (torch.randn(1, 24, 24),), {})
    pinned = {"up.weight": (Shard(0),), "up.bias": (Shard(0),), "down.weight": (Shard(1),)}
    planner = planner_of(graph, {"x": 2}, Constraints(pinned=pinned))
    found = _at_price(planner, strength)
    legs = [leg for leg in planner.account(found.decisions).reshards if _is_pinned(leg.value.node)]
    assert {leg.phase for leg in legs if leg.path.steps[0].kind == "all_gather"} == phases


def test_the_edge_of_a_moved_value_holds_nothing_between() -> None:
    seconds, copied, held = np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[0.0, 3.0], [5.0, 0.0]]), np.array([7.0, 8.0])
    origins: tuple[Origin, ...] = ("gathered", "kept", "moved", "absent")
    edge = regather_edge(seconds, copied, held, origins, np.array([10.0, 20.0]))
    assert edge.seconds[:, 4:].tolist() == [[10.0, 11.0, 0.0], [22.0, 20.0, 0.0]]
    assert edge.between[:, 4:].tolist() == [[0.0, 0.0, 0.0]] * 2
    # What comes back takes the memory of what is read of it.
    assert edge.after[:, 4:].tolist() == [[7.0, 3.0, 0.0], [5.0, 8.0, 0.0]]
    hubs = hubs_from_choices(
        {"x@forward": Spec.all_replicated(1)}, {"x": RegatherChoice(Spec.all_replicated(1), "moved")}
    )
    assert set(hubs) == {"x@forward", "x@moved"}


def test_a_parameter_that_is_whole_or_used_in_one_half_has_nothing_to_choose() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 2}, Constraints(pinned={"down.weight": (WHOLE[0],)}))
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    built = builder.build(frozenset({0}), reuse="all")
    parameters = {source.node.name for source in planner.graph.inputs if source.kind == "parameter"}
    # The gradient of the first layer's input is not wanted, and biases are used in the forward half alone.
    assert not parameters & {variable.key for variable in built.variables if variable.kind == "regather"}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "again"])
def test_an_assignment_costs_what_the_account_says_of_it(kept: bool) -> None:
    """The assignments are the best with every copy of a parameter kept, and with every copy made again."""
    planner = _planner()
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    built = builder.build(frozenset({0}), reuse="all")
    parameters = {source.node.name: source for source in planner.graph.inputs if source.kind == "parameter"}
    costs = list(built.problem.costs)
    for number, variable in enumerate(built.variables):
        if variable.kind == "regather":
            chosen = [option.kept is kept for option in variable.options]  # type: ignore[union-attr]
            costs[number] = np.where(chosen, costs[number], np.inf)
    solution = solve(replace(built.problem, costs=tuple(costs)))
    account = planner.account(built.decode(solution.assignment))
    seconds = sum(account.seconds(node) for node in planner.rules.operators)
    seconds += sum(leg.path.seconds for leg in account.reshards)
    launches = sum(
        built.variables[number].seconds[option]
        for number, option in enumerate(solution.assignment)
        if built.variables[number].kind == "rest" and built.variables[number].key in parameters
    )
    assert seconds + launches == pytest.approx(solution.cost, rel=1e-9)
