"""The forward graph of a module, ready to be cut."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.pipeline.graph.forward_export import ExportedModule, export_forward
from tests import models


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
