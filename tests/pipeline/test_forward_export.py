"""The forward graph of a module, ready to be cut.

Reading exported graphs: gradients, saved bytes, what cannot be parted, and what can be made once more.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.memory.optimizer import optimizer_memory
from autoshard.pipeline.graph.forward_export import ExportedModule, export_forward, read_stage_graph
from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from tests import models
from tests.models.basic import mlp
from tests.pipeline.exporting import cost_model, export_call
from tests.releases import skip_without


class _Model(nn.Module):
    """A table changed in place before and after it is read, dropout, and a split that is taken whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        table = torch.zeros(4)
        table[0] = 1.0
        early = table.cos()
        table.add_(2)
        y = self.dropout(self.linear(x.float() + table))
        unused = y.exp()
        del unused
        return {"y": torch.cat(y.split(2, -1), -1), "early": early, "number": 3}


@pytest.fixture(scope="module")
def graph() -> ExportedModule:
    return export_forward(_Model(), (torch.randn(2, 4),), {})


def test_what_is_changed_in_place_stays_together_up_to_its_last_change(graph: ExportedModule) -> None:
    (group,) = graph.together
    targets = {node.name: str(node.target) for node in graph.operators}
    assert [targets[name].split(".")[1] for name in group] == ["zeros", "select", "copy_", "cos", "add_"]


def test_only_live_operators_that_compute_are_left(graph: ExportedModule) -> None:
    targets = {str(node.target) for node in graph.operators}
    assert not targets & {"aten.exp.default", "aten._assert_tensor_metadata.default"}


def test_no_operator_takes_a_result_of_several_tensors_whole(graph: ExportedModule) -> None:
    for node in graph.operators:
        if not isinstance(node.meta["val"], torch.Tensor):
            assert {user.target for user in node.users} == {operator.getitem}
    (joined,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert {one.name for one in joined.all_input_nodes} <= graph.differentiable


def test_gradients_and_chance_are_known(graph: ExportedModule) -> None:
    assert graph.random == {"dropout"}
    assert {"linear", "dropout", "cat"} <= graph.differentiable
    assert not {"zeros", "cos", "x"} & graph.differentiable
    without = export_forward(graph.module, (torch.randn(2, 4),), {}, grad=False)
    assert not any(node.name in without.differentiable for node in without.operators)


def test_inputs_and_outputs_have_the_names_of_the_module(graph: ExportedModule) -> None:
    assert {(source.kind, source.name) for source in graph.sources.values()} >= {
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
        ("input", "x"),
    }
    assert graph.forward.result.names == ("y", "early")
    assert graph.forward.result.unflatten([1, 2]) == {"y": 1, "early": 2, "number": 3}


def test_real_weights_are_not_touched() -> None:
    module, inputs = models.resnet18(batch=2)
    before = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    export_forward(module, (), inputs)
    after = module.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, copy) for name, (tensor, copy) in before.items())


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_captured_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_forward_export.py:\d+ \(return x if x.sum"):
        export_forward(_Branching(), (torch.randn(2, 4),), {})


class _Mapping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * row.sum())(super().forward(x))


class _Tangent(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(super().forward, (x,), (x,))[1]


@pytest.mark.parametrize("kind", [_Mapping, _Tangent])
def test_transforms_are_refused_with_the_line(kind: type[nn.Module]) -> None:
    if kind is _Tangent:
        skip_without("export of torch.func.jvp")
    with pytest.raises(CaptureError, match=r"test_forward_export.py:\d+ \(return torch.* no pipeline does"):
        export_forward(kind(4, 4), (torch.randn(2, 4),), {})


class _Keeping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = {"mean": x.mean()}
        return super().forward(x)


class _Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.first.mean = hidden.mean()
        return self.second(hidden)


def test_tensors_set_as_attributes_are_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"forward_export.py:\d+ \(self.first.mean = .*tensor \(self.first.mean\)"):
        export_forward(_Noting(), (torch.randn(2, 4),), {})


def test_tensors_kept_in_containers_are_refused_with_the_line() -> None:
    with pytest.raises(
        CaptureError, match=r"test_forward_export.py:\d+ \(self.kept = .*keeps a tensor \(self.kept\['mean'\]\)"
    ):
        export_forward(_Keeping(4, 4), (torch.randn(2, 4),), {})


def test_recurrent_layers_are_exported() -> None:
    layer = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 8))
    graph = export_forward(layer, (torch.randn(5, 2, 4),), {})
    assert list(graph.forward.result.names) == ["output[0]", "output[1][0]", "output[1][1]"]


class Tied(nn.Module):
    """An embedding tied to the head, a frozen projection, and a table that needs inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = torch.arange(ids.shape[1], dtype=torch.float32).cos()[:, None]
        hidden = self.tokens(ids) * table
        hidden = self.frozen(hidden).relu() + torch.rand(8)
        return self.head(hidden * table)


class InPlace(nn.Module):
    """Writes into a tensor that it reads before and after, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x + 1
        before = shifted.exp()
        shifted[:, 0] = 0
        return self.norm(shifted.sin()) + before


def _of(graph: StageGraph, name: str) -> StageNode:
    return next(node for node in graph.nodes if name in node.members)


def test_tied_frozen_and_constant() -> None:
    graph = read_stage_graph(export_call(Tied(), {"ids": torch.zeros(2, 4, dtype=torch.long)}), cost_model())
    readers = [node.name for node in graph.nodes if "tokens.weight" in node.at_rest]
    assert readers == ["embedding", "linear_1"]
    state = optimizer_memory(None, None, foreach=False).state_bytes((16, 8), (16, 8), 4)
    assert graph.at_rest == {"tokens.weight": 2 * 16 * 8 * 4 + state, "frozen.weight": 8 * 8 * 4}
    values = {value.name: value for value in graph.values}
    assert values["unsqueeze"].recompute_seconds is not None
    assert values["unsqueeze"].gradient_bytes == 0
    assert values["rand"].recompute_seconds is None
    assert values["embedding"].recompute_seconds is None
    assert values["embedding"].gradient_bytes == values["embedding"].bytes == 2 * 4 * 8 * 4
    assert values["linear_1"].output
    assert _of(graph, "linear").backward_seconds < _of(graph, "linear_1").backward_seconds


def test_what_is_changed_in_place_stays_together_up_to_the_change() -> None:
    graph = read_stage_graph(export_call(InPlace(), {"x": torch.randn(6, 4)}), cost_model())
    changed = next(node for node in graph.nodes if any("_" in name and len(node.members) > 2 for name in node.members))
    assert {"add", "exp"} <= set(changed.members)
    assert "sin" not in changed.members
    norm = next(node for node in graph.nodes if "norm.running_mean" in node.at_rest)
    assert "norm.num_batches_tracked" in norm.at_rest


def test_saved_bytes_are_those_of_autograd() -> None:
    module, inputs = mlp()
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**inputs)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *inputs.values())}
    expected = sum(size for key, size in saved.items() if key not in given)
    graph = read_stage_graph(export_call(module, inputs), cost_model())
    assert sum(node.saved_bytes for node in graph.nodes) == expected


def test_nodes_must_be_in_order() -> None:
    node = StageNode("n", 1.0, 1.0, 0, (), ("n",))
    with pytest.raises(ValueError, match="topological order"):
        StageGraph((node, node), (StageValue("n", 1, (0,), 1),), {})
