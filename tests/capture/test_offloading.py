"""Values that are moved to the host between the halves: the same numbers, and nothing of them that the halves share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import JointGraph, capture
from autoshard.capture.host_copies import TO_DEVICE, TO_HOST
from autoshard.capture.marks import marked_regions
from autoshard.capture.nodes import is_view
from autoshard.capture.offloading import base_in_memory, movable_values, offload_values, values_of_modules
from autoshard.capture.recomputation import graph_of_plan, layers, recomputable, recompute_layers, rerunnable
from autoshard.errors import PlanError
from tests import models
from tests.capture.interpret import run_joint
from tests.capture.test_recomputation import CASES


def _captured(name: str) -> tuple[nn.Module, JointGraph, dict[str, Any]]:
    module, inputs = CASES[name]
    return module, capture(module, (), dict(inputs)), dict(inputs)


def _crossing(graph: JointGraph) -> set[str]:
    """Names of the forward operators whose memory the backward half reads, itself or through views."""
    backward = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "backward"]
    read = {base_in_memory(source) for node in backward for source in node.all_input_nodes}
    return {node.name for node in read if node.op == "call_function" and graph.phase(node) == "forward"}


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_with_moves_and_reruns_is_the_same_step(name: str) -> None:
    module, graph, inputs = _captured(name)
    expected = run_joint(graph, module, (), inputs)
    values = list(movable_values(graph))
    moved = offload_values(graph, values[::2])
    again = recompute_layers(moved, [layer.name for layer in recomputable(moved)][1:])
    for other in (moved, again):
        step = run_joint(other, module, (), inputs)
        torch.testing.assert_close(step.output, expected.output, rtol=0.0, atol=0.0)
        torch.testing.assert_close(step.gradients, expected.gradients, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(step.mutations, expected.mutations, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", list(CASES))
def test_the_backward_half_reads_what_is_moved_from_the_host(name: str) -> None:
    _, graph, _ = _captured(name)
    values = list(movable_values(graph))
    assert set(values) <= _crossing(graph)
    moved = offload_values(graph, values)
    hosts = [node for node in moved.graph.nodes if node.target is TO_HOST]
    assert _crossing(moved) == _crossing(graph) - set(values) | {node.name for node in hosts}
    for host in hosts:
        (copy,) = host.users
        assert copy.target is TO_DEVICE
        assert (moved.phase(host), moved.phase(copy)) == ("forward", "backward")
        # It begins once the value exists, and is back just before it is read.
        assert host.prev is host.args[0] or host.prev.target is TO_HOST
        assert copy.next in copy.users or copy.next.target is TO_DEVICE
    # The same layers by the same names can run again.
    assert [layer.name for layer in layers(moved)] == [layer.name for layer in layers(graph)]
    assert rerunnable(moved).keys() <= rerunnable(graph).keys()


def test_values_that_are_moved_are_not_computed_again() -> None:
    _, graph, _ = _captured("gpt")
    name = next(layer.name for layer in recomputable(graph))
    inside = {node.name for layer in layers(graph) if layer.name == name for node in layer.nodes}
    values = [value for value in movable_values(graph) if value in inside]
    again = recompute_layers(offload_values(graph, values), [name])
    reruns = {node.name for node in again.graph.nodes if node.name.endswith("_again") and not is_view(node)}
    assert not {f"{value}_again" for value in values} & reruns
    # In the other order, and as a plan names both, it is the same graph.
    for other in (
        offload_values(recompute_layers(graph, [name], kept=values), values),
        graph_of_plan(graph, [name], values),
        graph_of_plan(offload_values(graph, values[:1]), [name], values),
    ):
        assert [node.name for node in other.graph.nodes] == [node.name for node in again.graph.nodes]
        assert (other.recomputed, other.offloaded) == (again.recomputed, again.offloaded)
    assert graph_of_plan(again, again.recomputed, again.offloaded) is again


def test_what_a_step_returns_or_is_given_stays() -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.first(x).tanh()
            return self.second(hidden).tanh().sum(), hidden.view(-1)

    graph = capture(Returned(), (torch.randn(4, 8),), {})
    assert [node.target for node in movable_values(graph).values()] == [torch.ops.aten.tanh.default]
    with pytest.raises(PlanError, match="moves 'tanh' to the host, which is no value of this model"):
        offload_values(graph, ["tanh"])
    assert offload_values(graph, ()) is graph


class Marked(nn.Module):
    """Two layers, of which one computes in a region whose tensors are moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autoshard.offload():
            x = self.first(x).sin().exp()
            small = x.mean(-1, keepdim=True).sin()
        return (self.second(x).sin() * small).sum()


def test_a_region_moves_what_it_saves_but_for_what_is_small() -> None:
    graph = capture(Marked(), (torch.randn(4, 8),), {})
    marked = {node for node in graph.graph.nodes if marked_regions(node)}
    assert {graph.module_path(node) for node in marked} == {"", "first"}
    names = values_of_modules(graph, marked)
    sizes = {movable_values(graph)[name].meta["val"].numel() for name in names}
    assert sizes == {4 * 512}
    assert len(names) >= 2
    module, inputs = models.mlp()
    assert values_of_modules(capture(module, (), inputs), ()) == ()
