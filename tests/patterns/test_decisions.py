"""Decisions as data, and the way of every tensor under them."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Shard

from autoshard.errors import PlanError
from autoshard.patterns.decisions import Decisions, Flow, StrategySpecs, phase_of
from autoshard.patterns.graph_rules import Value
from autoshard.patterns.strategy import operand_spec, result_spec
from autoshard.planner.planning_problem import Constraints
from autoshard.specs.spec import Spec
from tests.planner.steps import every_parameter, flow_of, joint_graph, planner_of, regather_all

DECISIONS = Decisions(
    choices={"mm": (0, -1), "add": (-2, 1)},
    rest={"primals_1": Spec.parse("S(0,f=3) R")},
    outputs={"loss": Spec.parse("R R")},
    hubs={"primals_1@forward": Spec.parse("R P(sum)")},
)


def _flow(forced: bool = False, again: bool = False) -> Flow:
    graph = joint_graph("gpt")
    planner = planner_of(graph, {"x": 2}, Constraints(forced=every_parameter(graph) if forced else frozenset()))
    plan = planner.plan()
    return flow_of(planner, regather_all(planner, plan) if again else plan)


def test_decisions_are_data() -> None:
    data = DECISIONS.to_data()
    assert data["choices"]["mm"] == [0, -1]
    assert data["rest"] == {"primals_1": "S(0,f=3) R"}
    assert Decisions.from_data(data) == DECISIONS


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data.pop("hubs"),
        lambda data: data.update(rest={"primals_1": "S(zero)"}),
        lambda data: data.update(choices=[1, 2]),
        lambda data: data.update(choices={"mm": 3}),
        lambda data: data.update(outputs=None),
    ],
)
def test_data_of_another_form_is_refused(harm: object) -> None:
    data = DECISIONS.to_data()
    harm(data)  # type: ignore[operator]
    with pytest.raises(PlanError, match="decisions cannot be read"):
        Decisions.from_data(data)


def test_gradients_are_made_in_the_backward_half() -> None:
    kinds = {output.kind: phase_of(output) for output in joint_graph("gpt").outputs}
    assert kinds == {"output": "forward", "gradient": "backward"}


def test_flows_may_share_the_specs_of_strategies() -> None:
    flow = _flow()
    rules, choices, mesh = flow.rules, flow.decisions.choices, flow.mesh
    specs = StrategySpecs(mesh)
    for each in (Flow(rules, flow.decisions, mesh, specs), Flow(rules, flow.decisions, mesh, specs)):
        for node in rules.operators:
            strategy = rules.rules[node], choices[node.name], mesh
            assert each.consumed_specs(node) == tuple(
                operand_spec(*strategy, index) for index in range(len(rules.operands[node]))
            )
            for index in range(len(rules.calls[node].results)):
                assert each.produced_spec(Value(node, index)) is result_spec(*strategy, index)


def test_legs_lead_from_where_a_value_is_made_to_where_it_is_wanted() -> None:
    flow = _flow()
    for value, uses in flow.rules.uses.items():
        for use in uses:
            target = flow.consumed_spec(use.node, use.operand)
            spec = flow.produced_spec(value)
            for _, source, reached in flow.reshards(value, flow.graph.phase(use.node), target):
                assert source is spec
                spec = reached
            assert spec is target


def test_uses_that_share_a_hub_share_its_copy() -> None:
    flow = _flow()
    moved = 0
    for value, uses in flow.rules.uses.items():
        hub = flow.hub(value, "forward")
        if hub is None or hub[1] is flow.produced_spec(value):
            continue
        firsts = {
            next(iter(flow.reshards(value, flow.graph.phase(use.node), flow.consumed_spec(use.node, use.operand))))[0]
            for use in uses
        }
        assert firsts == {f"{hub[0]} {hub[1]}"}
        moved += 1
    assert moved


def test_what_is_gathered_again_has_copies_of_its_own() -> None:
    flow = _flow(forced=True, again=True)
    weight = Value(next(s.node for s in flow.graph.inputs if s.name == "layers.0.mlp.2.weight"))
    hubs = [flow.hub(weight, phase) for phase in ("forward", "backward")]
    assert all(hub is not None for hub in hubs)
    assert [hub[0] for hub in hubs if hub] == [f"{weight.name}@forward", f"{weight.name}@backward"]
    target = Spec.all_replicated(1)
    copies = [{key for key, _, _ in flow.reshards(weight, phase, target)} for phase in ("forward", "backward")]
    assert not copies[0] & copies[1]


def test_gradients_are_delivered_as_their_parameters_lie() -> None:
    flow = _flow(forced=True)
    rest = {
        source.name: flow.produced_spec(Value(source.node))
        for source in flow.graph.inputs
        if source.kind == "parameter"
    }
    gradients = [output for output in flow.graph.outputs if output.kind == "gradient" and output.node is not None]
    assert gradients
    assert all(flow.output_spec(output) is rest[output.name] for output in gradients)
    assert any(Shard(0) in spec.placements for spec in rest.values())
