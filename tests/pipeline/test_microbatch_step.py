"""The step of a microbatch, ready to be cut; its stage graph: seconds, saved bytes, and what can be computed anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.capture.step_marks import GRADIENT_OF, tensor_name
from autoshard.errors import CaptureError
from autoshard.memory.optimizer import optimizer_memory
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, capture_microbatch
from autoshard.pipeline.graph.operator_costs import read_stage_graph
from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from tests import models
from tests.models.basic import mlp
from tests.pipeline.chain import balance_stages
from tests.pipeline.exporting import cost_model, export_call
from tests.pipeline.test_stage_slices import check
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
def step() -> MicrobatchStep:
    return capture_microbatch(_Model(), (torch.randn(2, 4),), {})


def test_changes_in_place_of_what_forward_makes_keep_nothing_together(step: MicrobatchStep) -> None:
    assert not step.together
    names = [each.name for each in step.operators]
    assert {"zeros", "cos", "linear", "dropout", "split", "cat"} <= {*names}
    assert "exp" not in names  # nothing reads it


def test_every_node_of_the_step_belongs_to_an_operator_or_adds_up_gradients(step: MicrobatchStep) -> None:
    for node in step.joint.graph.nodes:
        if node.op == "call_function" and step.joint.phase(node) == "backward":
            assert (node in step.owners) == (node.target is not GRADIENT_OF and node not in step.sums)
    by_name = {each.name: each for each in step.operators}
    assert {str(node.target).split(".")[1] for node in by_name["dropout"].backward} == {"native_dropout_backward"}
    assert not by_name["cos"].backward


def test_gradients_and_chance_are_known(step: MicrobatchStep) -> None:
    assert step.random == {"dropout"}
    differentiated = {tensor_name(node) for node in step.gradients if node.op == "call_function"}
    assert {"linear", "dropout", "cat"} <= differentiated
    assert not {"zeros", "cos"} & differentiated
    without = capture_microbatch(step.module, (torch.randn(2, 4),), {}, grad=False)
    assert not without.gradients
    assert [each.name for each in without.operators] == [each.name for each in step.operators]


def test_inputs_and_outputs_have_the_names_of_the_module(step: MicrobatchStep) -> None:
    assert {(source.kind, source.name) for source in step.sources.values()} >= {
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
        ("input", "x"),
    }
    assert step.joint.result.names == ("y", "early")
    assert step.joint.result.unflatten([1, 2]) == {"y": 1, "early": 2, "number": 3}


def test_real_weights_are_not_touched() -> None:
    module, inputs = models.resnet18(batch=2)
    before = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    capture_microbatch(module, (), inputs)
    after = module.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, copy) for name, (tensor, copy) in before.items())


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_captured_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_microbatch_step.py:\d+ \(return x if x.sum"):
        capture_microbatch(_Branching(), (torch.randn(2, 4),), {})


class _Mapping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * row.sum())(super().forward(x))


class _Tangent(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(super().forward, (x,), (x,))[1]


@pytest.mark.parametrize("kind", [_Mapping, _Tangent])
def test_transforms_are_cut(kind: type[nn.Module]) -> None:
    if kind is _Tangent:
        skip_without("export of torch.func.jvp")
    torch.manual_seed(0)
    module, x = _Around(kind(4, 4)).double(), torch.randn(2, 4, dtype=torch.float64)
    step = capture_microbatch(module, (), {"x": x})
    check(step, {"x": x}, balance_stages(step, 2), 2)


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x).tanh())).square().mean()


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
    with pytest.raises(CaptureError, match=r"microbatch_step.py:\d+ \(self.first.mean = .*tensor \(self.first.mean\)"):
        capture_microbatch(_Noting(), (torch.randn(2, 4),), {})


def test_tensors_kept_in_containers_are_refused_with_the_line() -> None:
    with pytest.raises(
        CaptureError, match=r"test_microbatch_step.py:\d+ \(self.kept = .*keeps a tensor \(self.kept\['mean'\]\)"
    ):
        capture_microbatch(_Keeping(4, 4), (torch.randn(2, 4),), {})


def test_recurrent_layers_are_captured() -> None:
    layer = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 8))
    step = capture_microbatch(layer, (torch.randn(5, 2, 4),), {})
    assert list(step.joint.result.names) == ["output[0]", "output[1][0]", "output[1][1]"]


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


def test_what_changes_a_buffer_stays_with_what_reads_it() -> None:
    graph = read_stage_graph(export_call(InPlace(), {"x": torch.randn(6, 4)}), cost_model())
    assert "sin" not in _of(graph, "exp").members
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
