"""The problem of a step: its cost is the sum of the plan's parts, and its decisions encode and decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture.joint import capture
from autoshard.capture.recomputation import recomputable, recompute_layers
from autoshard.memory.optimizer import optimizer_memory
from autoshard.planner.planning_problem import BuiltProblem, Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.solver import solve
from autoshard.specs.spec import Spec
from tests.planner.steps import PlainPlanner, every_parameter, joint_graph, planner_of


def _built(name: str, mesh: dict[str, int], constraints: Constraints | None = None) -> BuiltProblem:
    planner = planner_of(joint_graph(name), mesh, constraints)
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    return builder.build(frozenset(range(len(mesh))))


def _options(built: BuiltProblem, kind: str, key: str) -> list[Spec]:
    (variable,) = (one for one in built.variables if (one.kind, one.key) == (kind, key))
    return list(variable.options)  # type: ignore[arg-type]


def _node(name: str, source: str) -> str:
    return next(item.node.name for item in joint_graph(name).inputs if item.name == source and item.kind != "tangent")


def test_variables_agree_with_the_problem() -> None:
    built = _built("mlp", {"x": 2, "y": 2})
    problem = built.problem
    assert [len(variable.options) for variable in built.variables] == [len(costs) for costs in problem.costs]
    assert problem.components is not None
    assert all(labels.shape[1] == 2 for labels in problem.components)
    for edge in problem.edges:
        sizes = len(built.variables[edge.source].options), len(built.variables[edge.target].options)
        assert edge.costs.shape == sizes
        assert (edge.costs >= 0).all()


def test_decisions_read_back_as_the_assignment() -> None:
    built = _built("mlp", {"x": 2})
    solution = solve(built.problem)
    decisions = built.decode(solution.assignment)
    for variable, option in zip(built.variables, solution.assignment, strict=True):
        table = {
            "operator": decisions.choices,
            "rest": decisions.rest,
            "output": decisions.outputs,
            "hub": decisions.hubs,
        }[variable.kind]
        assert table[variable.key] == variable.options[option]


def test_axes_that_are_not_open_keep_what_they_have() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 2, "y": 2})
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    first = builder.build(frozenset({0}))
    decisions = first.decode(solve(first.problem).assignment)
    assert all(choices[1] == -1 for choices in decisions.choices.values())
    assert all(spec[1] == Replicate() for spec in decisions.rest.values())
    second = builder.build(frozenset({1}), decisions)
    better = second.decode(solve(second.problem).assignment)
    assert all(choices[0] == decisions.choices[name][0] for name, choices in better.choices.items())
    assert solve(second.problem).cost <= solve(first.problem).cost


def test_a_value_with_several_users_has_one_hub() -> None:
    built = _built("gpt", {"x": 2})
    keys = [variable.key for variable in built.variables if variable.kind == "hub"]
    assert keys
    assert len(set(keys)) == len(keys)
    assert not any("@" in key for key in keys)


def test_a_forced_parameter_is_not_whole_at_rest() -> None:
    built = _built("gpt", {"x": 2}, Constraints(forced=every_parameter(joint_graph("gpt"))))
    assert all(spec.shard_axes for spec in _options(built, "rest", _node("gpt", "layers.0.mlp.2.weight")))


def test_a_forced_parameter_that_no_axis_divides_is_sharded_unevenly() -> None:
    built = _built("mlp", {"x": 5}, Constraints(forced=frozenset({"up.bias", "down.weight"})))
    assert _options(built, "rest", _node("mlp", "up.bias")) == [Spec.of(Shard(0))]
    assert _options(built, "rest", _node("mlp", "down.weight")) == [Spec.of(Shard(0)), Spec.of(Shard(1))]


@pytest.mark.parametrize("pin", [(Shard(1), None), (None, Replicate()), (Shard(0), Shard(0))], ids=str)
def test_pinned_axes_have_one_placement(pin: tuple[Shard | Replicate | None, ...]) -> None:
    built = _built("mlp", {"x": 2, "y": 2}, Constraints(pinned={"up.weight": pin}))
    options = _options(built, "rest", _node("mlp", "up.weight"))
    assert options
    for spec in options:
        assert all(want is None or want == have for want, have in zip(pin, spec, strict=True))


def test_global_inputs_are_whole() -> None:
    assert _options(_built("mlp", {"x": 2, "y": 3}), "rest", _node("mlp", "x")) == [Spec.all_replicated(2)]


def test_memory_of_parameters_counts_gradients_and_optimizer_state() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 2})
    built = planner.builder.build(frozenset({0}), reuse="inputs")
    (variable,) = (one for one in built.variables if one.key == _node("mlp", "up.weight"))
    assert variable.usage is not None
    whole = 24 * 48 * 4
    held = dict(zip(map(str, variable.options), variable.usage.tolist(), strict=True))
    assert held["R"] == 4 * whole + 4  # parameter, gradient, two moments, and a count of steps
    assert held["S(0)"] == held["S(1)"] == 2 * whole + 4
    assert variable.life == (0, len(planner.rules.operators) + 1)
    assert planner.builder.build(frozenset({0})).problem.usages is None  # where memory does not count


def test_what_a_reshard_costs_is_found_on_the_edge() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 2})
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    value = next(iter(planner.rules.values()))
    specs = [Spec.parse(text) for text in ("R", "S(0)", "P(sum)", "S(0)")]
    listed = builder.intern_specs(specs)
    assert builder.intern_specs(specs) is listed
    table = builder.edge_tables.reshard_seconds(value.meta, listed, listed)
    assert np.array_equal(table[1], table[3])
    for row, source in enumerate(specs):
        for column, target in enumerate(specs):
            path = planner.resharder.path(value.meta.shape, value.meta.dtype.itemsize, source, target)
            assert table[row, column] == pytest.approx(path.seconds)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd", "adafactor"])
def test_a_parameter_at_rest_holds_its_gradient_and_what_its_optimizer_keeps_in_its_dtype(optimizer: str) -> None:
    module = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    graph = capture(module, (), {"input": torch.randn(8, 64, dtype=torch.bfloat16)})
    planner = planner_of(graph, {"x": 2}, optimizer=optimizer_memory(optimizer, None, foreach=True))
    built = planner.builder.build(frozenset({0}), reuse="inputs")
    (name,) = (source.node.name for source in graph.inputs if source.kind == "parameter")
    (rest,) = (one for one in built.variables if one.key == name)
    assert rest.usage is not None
    for spec, usage in zip(rest.options, rest.usage, strict=True):
        local = (64 * 32) // (2 if spec.shard_axes else 1)  # type: ignore[union-attr]
        state = planner.settings.optimizer.state_bytes((32, 64), (local,), 2)
        assert usage == 2 * (2 * local) + state


def test_a_price_of_memory_adds_bytes_times_seconds_per_byte() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2}, Constraints(forced=every_parameter(joint_graph("gpt"))))
    built = planner.builder.build(frozenset({0}), reuse="all")
    moments = len(planner.rules.operators) + 1
    assignment = solve(built.problem).assignment
    held = planner.evaluate(built.decode(assignment), 0.0, 0.0, "solved").held_bytes

    def added(prices: np.ndarray) -> float:
        return built.with_memory_prices(prices).problem.cost(assignment) - built.problem.cost(assignment)

    at_rest, last = (added(np.eye(moments)[moment]) for moment in (0, moments - 1))
    assert at_rest == pytest.approx(held[0], rel=0.01)
    assert last == pytest.approx(held[-1], rel=0.1)  # the optimizer's temporaries are the account's alone
    early, late = np.arange(moments) < moments // 3, np.arange(moments) >= moments // 3
    assert added(early * 2.0 + late * 3.0) == pytest.approx(2.0 * added(early * 1.0) + 3.0 * added(late * 1.0))
    assert added(np.ones(moments)) > 0.9 * held.sum()
    assert added(np.zeros(moments)) == 0.0


def test_equal_edges_share_what_they_are_made_of_at_any_price() -> None:
    planner = planner_of(joint_graph("gpt", layers=4), {"x": 2})
    built = planner.builder.build(frozenset({0}), reuse="all")
    prices = np.linspace(1.0, 2.0, len(planner.rules.operators) + 1)
    parts = {id(table) for edge in built.with_memory_prices(prices).problem.edges for _, table in edge.parts}
    tables = {id(edge.costs) for edge in built.problem.edges}
    rents = {id(rent.bytes) for rents in built.edge_live_ranges.values() for rent in rents}
    assert parts <= tables | rents
    assert len(tables) < len(built.problem.edges) / 2
    assert built.with_memory_prices(prices).program_positions is built.program_positions


def test_a_graph_like_another_takes_its_tables() -> None:
    graph = joint_graph("gpt", layers=4)
    planner = planner_of(graph, {"x": 2})
    layers = [layer.name for layer in recomputable(graph)]
    again = recompute_layers(graph, layers)
    own = planner_of(again, {"x": 2})
    other = PlainPlanner(again, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
    known = set(map(id, planner.rules.rules.values()))
    assert all(id(rule) in known for rule in other.rules.rules.values())
    assert other.plan().to_json() != planner.plan().to_json()
    first, second = own.plan(), other.plan()
    assert (first.decisions, first.step_seconds, first.memory) == (second.decisions, second.step_seconds, second.memory)
