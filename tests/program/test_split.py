"""The two halves: what they take and return, and that nothing is done twice."""

from __future__ import annotations

import pytest
from torch import fx

from autoshard.capture import capture
from autoshard.program.split import split
from tests.models.routed import sorted_experts
from tests.planner.steps import KINDS, joint_graph, planner_of, program_of


def _outputs(graph: object) -> list[object]:
    return list(next(iter(graph.find_nodes(op="output"))).args[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_forward_half_saves_what_the_backward_half_takes(name: str) -> None:
    planner = planner_of(joint_graph(name), {"x": 2})
    step = program_of(planner, planner.plan())
    halves = split(step, compile=False)
    assert halves.backward is not None
    placeholders = list(halves.backward.graph.find_nodes(op="placeholder"))
    assert len(_outputs(halves.forward.graph)) == len(step.forward_outputs) + halves.saved
    assert len(placeholders) == halves.saved + len(step.tangents)
    assert all(node.users for node in placeholders)
    assert len(_outputs(halves.backward.graph)) == sum(border.kind == "gradient" for border in step.outputs)
    assert not halves.draws


def test_no_operator_and_no_collective_runs_in_both_halves() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2})
    halves = split(program_of(planner, planner.plan()), compile=False)
    assert halves.backward is not None
    names = [
        {node.name for node in half.graph.nodes if node.op == "call_function" and node.target in KINDS}
        for half in (halves.forward, halves.backward)
    ]
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]


def test_a_forward_pass_has_one_half_and_saves_nothing() -> None:
    planner = planner_of(joint_graph("mlp", grad=False), {"x": 2})
    halves = split(program_of(planner, planner.plan()), compile=False)
    assert halves.backward is None
    assert halves.saved == 0


def test_programs_with_dropout_draw() -> None:
    planner = planner_of(joint_graph("gpt", dropout=0.5), {"x": 2})
    assert split(program_of(planner, planner.plan()), compile=False).draws


def test_a_program_whose_sizes_the_data_decides_is_not_compiled() -> None:
    module, inputs = sorted_experts()
    planner = planner_of(capture(module, (), inputs), {"ep": 2})
    step = program_of(planner, planner.plan())
    with pytest.warns(UserWarning, match="compile=True has no effect"):
        halves = split(step, compile=True)
    assert isinstance(halves.forward, fx.GraphModule)
