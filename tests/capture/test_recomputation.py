"""Layers that the backward half runs again: the same numbers, and less that it reads of the forward half."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

from autoshard.capture import JointGraph, capture
from autoshard.capture.nodes import is_view
from autoshard.capture.recomputation import RECOMPUTES, layers, recomputable, recompute_layers, repeated_modules
from autoshard.errors import PlanError
from autoshard.patterns.registry import op_call
from tests import models
from tests.capture.interpret import run_joint

aten = torch.ops.aten


def _all(graph: JointGraph) -> list[str]:
    return [layer.name for layer in recomputable(graph)]


def _read(graph: JointGraph) -> set[fx.Node]:
    """Forward operators whose results, or views of them, the backward half reads."""
    found = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and graph.phase(node) == "forward":
            users = [user for user in node.users if user.op != "output" and graph.phase(user) == "backward"]
            while is_view(node):
                node = node.all_input_nodes[0]
            if users and node.op == "call_function":
                found.add(node)
    return found


def _forward_users(graph: JointGraph, node: fx.Node) -> set[fx.Node]:
    """What reads a result or a view of it in the forward half."""
    users = {user for user in node.users if user.op == "output" or graph.phase(user) == "forward"}
    return users.union(*(_forward_users(graph, user) for user in users if user.op != "output" and is_view(user)))


class Normed(nn.Module):
    """Convolutions with batch norm, whose running statistics the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 1), nn.GELU())
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Counted(nn.Module):
    """Layers that add a number, which the step then changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.up:
            x = (layer(x).sigmoid() + self.scale).tanh().sin()
        self.scale.mul_(2.0)
        return x.square().mean()


CASES: dict[str, tuple[nn.Module, Mapping[str, Any]]] = {
    "mlp": models.mlp(dtype=torch.float64),
    "gpt": models.gpt(dtype=torch.float64),
    "batch norm": (Normed().double(), {"x": torch.randn(2, 3, 6, 6, dtype=torch.float64)}),
    "counted": (Counted().double(), {"x": torch.randn(4, 12, dtype=torch.float64)}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_state_are_the_same(name: str) -> None:
    module, inputs = CASES[name]
    graph = capture(module, (), inputs)
    again = recompute_layers(graph, _all(graph))
    assert again.recomputed == tuple(_all(graph))
    assert any(RECOMPUTES in node.meta for node in again.graph.nodes)
    ours, theirs = (run_joint(each, module, (), inputs) for each in (again, graph))
    assert ours.gradients.keys() == theirs.gradients.keys()
    for kind in ("gradients", "mutations"):
        for key, value in getattr(theirs, kind).items():
            assert torch.equal(getattr(ours, kind)[key], value), key


@pytest.mark.parametrize("name", ["gpt", "batch norm"])
def test_the_backward_half_reads_what_crosses_layers_and_nothing_inside_them(name: str) -> None:
    module, inputs = CASES[name]
    graph = capture(module, (), inputs)
    again = recompute_layers(graph, _all(graph))
    inside = {node.name: layer.name for layer in layers(graph) for node in layer.nodes}
    new_statistics = {output.node for output in again.outputs if output.kind == "mutation"}
    for node in _read(again) - new_statistics:
        users = _forward_users(again, node)
        assert node.name not in inside or any(inside.get(user.name) != inside[node.name] for user in users), node
    assert len(_read(again)) < len(_read(graph)) / 2


def test_the_captured_graph_stays_as_it_is_and_names_are_kept() -> None:
    module, inputs = CASES["gpt"]
    graph = capture(module, (), inputs)
    before = str(graph.graph)
    again = recompute_layers(graph, ["layers.1"])
    assert str(graph.graph) == before
    assert graph.recomputed == ()
    assert again.recomputed == ("layers.1",)
    assert again.fingerprint == graph.fingerprint
    assert [source.node.name for source in again.inputs] == [source.node.name for source in graph.inputs]
    copies = [node for node in again.graph.nodes if RECOMPUTES in node.meta]
    assert all(again.phase(node) == "backward" and node.name == f"{node.meta[RECOMPUTES]}_again" for node in copies)
    assert {again.module_path(node).split(".")[1] for node in copies} == {"1"}
    known = {node.name for node in graph.graph.nodes}
    assert {node.name for node in again.graph.nodes} - {node.name for node in copies} <= known


def test_layers_are_run_again_just_before_they_are_needed() -> None:
    module, inputs = models.gpt(layers=3)
    graph = capture(module, (), inputs)
    again = recompute_layers(graph, _all(graph))
    order = [
        (again.module_path(node).split(".")[1], RECOMPUTES in node.meta)
        for node in again.graph.nodes
        if node.op == "call_function" and again.phase(node) == "backward" and "layers" in again.module_path(node)
    ]
    first = {layer: min(place for place, (name, copy) in enumerate(order) if copy and name == layer) for layer in "012"}
    last = {layer: max(place for place, (name, _) in enumerate(order) if name == layer) for layer in "012"}
    assert last["2"] < first["1"]
    assert last["1"] < first["0"]


def test_what_reads_state_that_the_step_changes_is_kept() -> None:
    module, inputs = CASES["counted"]
    graph = capture(module, (), inputs)
    again = recompute_layers(graph, _all(graph))
    (scale,) = (source.node for source in again.inputs if source.name == "scale")
    assert all(RECOMPUTES not in user.meta for user in scale.users)


class Largest(nn.Module):
    """Layers that find the gradient of a maximum where the input equals it, or compare two tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.up:
            y = layer(x).sigmoid()
            x = (y * (y >= y.sort(-1).values[:, 2:3])).sin() + y.amax(0).exp()
        return x.square().mean()


def test_what_is_compared_is_not_made_again() -> None:
    graph = capture(Largest(), (), {"x": torch.randn(4, 12)})
    again = recompute_layers(graph, _all(graph))
    compared = [node for node in again.graph.nodes if node.target in (aten.eq.Tensor, aten.ge.Tensor)]
    assert {again.phase(node) for node in compared} == {"forward", "backward"}
    assert all(RECOMPUTES not in node.meta for node in compared)
    assert all(RECOMPUTES not in source.meta for node in compared for source in node.all_input_nodes)
    assert any(RECOMPUTES in node.meta for node in again.graph.nodes)


def test_without_layers_or_gradients_nothing_is_rewritten() -> None:
    module, inputs = CASES["gpt"]
    graph = capture(module, (), inputs)
    assert recompute_layers(graph, ()) is graph
    assert recomputable(capture(module, (), inputs, grad=False)) == ()


def test_an_unknown_layer_is_an_error() -> None:
    module, inputs = CASES["gpt"]
    with pytest.raises(PlanError, match=r"recomputes 'layers\.7', which is no layer of this model"):
        recompute_layers(capture(module, (), inputs), ["layers.7"])


def _names(module: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> list[str]:
    return [layer.name for layer in layers(capture(module, args, kwargs))]


class Stack(nn.Module):
    """Blocks one after the other, perhaps the same one again and again, perhaps below a wrapper."""

    def __init__(self, blocks: int, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(24, 2, "view", 0.0) for _ in range(blocks))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


X = torch.randn(2, 12, 24)


def test_the_elements_of_a_list_are_layers() -> None:
    assert _names(Stack(3), X) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_wrapper_around_all_is_no_layer() -> None:
    assert _names(nn.Sequential(Stack(3)), X) == ["0.blocks.0", "0.blocks.1", "0.blocks.2"]


def test_a_layer_that_is_called_many_times_is_cut_in_parts() -> None:
    names = _names(Stack(1, times=4), X)
    assert names == [f"part {number}" for number in range(len(names))]
    assert len(names) > 3


def test_a_sequence_of_single_operators_is_cut_in_parts() -> None:
    parts = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(9)]
    modules = [module for part in parts for module in part]
    graph = capture(nn.Sequential(*modules), (X,), {})
    found = layers(graph)
    assert [layer.name for layer in found] == [f"part {number}" for number in range(4)]
    forward = [n for n in graph.graph.nodes if n.op == "call_function" and graph.phase(n) == "forward"]
    assert [node for layer in found for node in layer.nodes] == forward


def test_every_operator_is_in_one_layer_at_most_and_its_results_are_with_it() -> None:
    module, inputs = models.gpt()
    graph = capture(module, (), inputs)
    found = layers(graph)
    nodes = [node for layer in found for node in layer.nodes]
    assert len(nodes) == len(set(nodes))
    assert all(graph.phase(node) == "forward" for node in nodes)
    for layer in found:
        members = set(layer.nodes)
        for node in graph.graph.nodes:
            if "getitem" in node.name and graph.phase(node) == "forward":
                assert (node in members) == (node.all_input_nodes[0] in members)


def test_views_make_no_tensor() -> None:
    module, inputs = models.gpt()
    nodes = {node.name: node for node in capture(module, (), inputs).graph.nodes}
    assert is_view(nodes["view"])
    assert is_view(nodes["getitem"])
    assert not is_view(nodes["addmm"])


def _work(graph: JointGraph) -> dict[fx.Node, Hashable]:
    calls = [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {node: (op_call(node), graph.phase(node)) for node in calls}


def test_layers_repeat_and_correspond() -> None:
    module, kwargs = models.gpt(layers=3)
    graph = capture(module, (), kwargs)
    work = _work(graph)
    layers = repeated_modules(graph, work)[0]
    assert layers.pattern == "layers.*"
    assert layers.paths == ("layers.0", "layers.1", "layers.2")
    for nodes in zip(*layers.nodes, strict=True):
        assert len({(work[node], node.target, graph.phase(node)) for node in nodes}) == 1
    assert {graph.phase(node) for node in layers.nodes[0]} == {"forward", "backward"}


def test_layers_of_other_widths_do_not_repeat() -> None:
    class Widths(torch.nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            pairs = itertools.pairwise(widths)
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().sum()

    graph = capture(Widths(8, 8, 8, 8, 16), (torch.rand(2, 8),), {})
    [layers] = repeated_modules(graph, _work(graph))
    assert layers.pattern == "layers.*"
    assert layers.paths == ("layers.1", "layers.2")  # the first hands back no gradient of its input, the last is wider
