from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.experimental import control_flow
from torch import nn
from torch._higher_order_ops import scan
from torch.utils import _pytree as pytree

from autoshard.capture import JointGraph, capture
from autoshard.errors import CaptureError, InputError
from tests import models
from tests.capture.interpret import run_joint

F64 = torch.float64

CASES = {
    "mlp": lambda: models.mlp(dtype=F64),
    "gpt-view": lambda: models.gpt(dtype=F64, split="view", layers=1),
    "gpt-chunk": lambda: models.gpt(dtype=F64, split="chunk", layers=1),
    "gpt-split-tied": lambda: models.gpt(dtype=F64, split="split", tied=True, layers=1),
    "hf_gpt2": lambda: models.hf_gpt2(dtype=F64, layers=1),
    "hf_llama": lambda: models.hf_llama(dtype=F64),
    "hf_bert": lambda: models.hf_bert(dtype=F64, layers=1),
    "hf_bert-masked": lambda: models.hf_bert(dtype=F64, layers=1, task="masked"),
    "hf_vit": lambda: models.hf_vit(dtype=F64, layers=1),
    "wide_resnet": lambda: models.ZOO["wide_resnet"](dtype=F64),
}


@functools.cache
def captured(case: str) -> JointGraph:
    """The graph of a case, which tests only read."""
    module, kwargs = CASES[case]()
    return capture(module, (), kwargs)


class Small(nn.Module):
    """A linear layer and a bare weight; each test gives its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0, dtype=F64).reshape(4, 4) / 16)
        self.linear = nn.Linear(4, 4, dtype=F64)


def small_input() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=F64).reshape(3, 4)


def loss_of(output: Any) -> torch.Tensor:
    scalars = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.ndim == 0]
    assert len(scalars) == 1
    return scalars[0]


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def assert_same_step(graph: JointGraph, module: nn.Module, kwargs: dict[str, Any]) -> None:
    """The graph gives the module's output, every gradient and every mutated buffer."""
    step = run_joint(graph, module, (), kwargs)
    module.zero_grad()
    output = module(**kwargs)
    assert type(step.output) is type(output)
    assert_close(pytree.tree_leaves(step.output), pytree.tree_leaves(output))
    loss_of(output).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert step.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient is None) == (step.gradients[name] is None), name
        if gradient is not None:
            assert_close(step.gradients[name], gradient)
    buffers = dict(module.named_buffers())
    for name, value in step.mutations.items():
        assert_close(value, buffers[name])


@pytest.mark.parametrize("case", CASES)
def test_joint_graph_computes_what_the_module_computes(case: str) -> None:
    module, kwargs = CASES[case]()
    graph = captured(case)
    assert graph.tangent_outputs == tuple(output.name for output in graph.outputs if output.tangent)
    assert len(graph.tangent_outputs) == 1
    assert_same_step(graph, module, kwargs)


def test_batch_norm_buffers_are_mutations() -> None:
    module, _ = CASES["wide_resnet"]()
    mutated = {output.name for output in captured("wide_resnet").outputs if output.kind == "mutation"}
    assert mutated == {name for name, _ in module.named_buffers()}


class Normalised(Small):
    """A linear layer and a batch norm: the smallest module that behaves differently in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def test_evaluation_and_no_grad() -> None:
    module, kwargs = Normalised(), {"x": small_input()}
    module.eval()
    graph = capture(module, (), kwargs, grad=False)
    assert {output.kind for output in graph.outputs} == {"output"}
    assert all(graph.phase(node) == "forward" for node in graph.graph.nodes)
    with torch.no_grad():
        assert_close(run_joint(graph, module, (), kwargs).output, module(**kwargs))


def test_capture_under_no_grad_still_has_gradients() -> None:
    module, kwargs = CASES["mlp"]()
    expected = captured("mlp").fingerprint
    with torch.no_grad():
        assert capture(module, (), kwargs).fingerprint == expected
    with torch.inference_mode():
        assert capture(module, (), kwargs).fingerprint == expected


def test_capture_leaves_module_and_random_state_alone() -> None:
    module, kwargs = Normalised(), {"x": small_input()}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    capture(module, (), kwargs)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_only_the_loss_is_differentiated_unless_asked() -> None:
    module, kwargs = CASES["gpt-view"]()
    loss = captured("gpt-view")
    everything = capture(module, (), kwargs, tangents="all")
    assert loss.tangent_outputs == ("output[1]",)
    assert everything.tangent_outputs == ("output[0]", "output[1]")
    assert len(loss.graph.nodes) < len(everything.graph.nodes)
    logits, value = module(**kwargs)
    tangents = {"output[0]": torch.linspace(-1, 1, logits.numel(), dtype=F64).reshape(logits.shape)}
    step = run_joint(everything, module, (), kwargs, tangents)
    torch.autograd.backward((logits, value), (tangents["output[0]"], torch.ones((), dtype=F64)))
    for name, parameter in module.named_parameters():
        assert_close(step.gradients[name], parameter.grad)


def test_without_a_scalar_every_output_is_differentiated() -> None:
    class Two(Small):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), x @ self.weight

    assert capture(Two(), (small_input(),), {}).tangent_outputs == ("output[0]", "output[1]")


def test_a_scalar_without_gradient_is_no_loss() -> None:
    class Metric(Small):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.linear(x)
            return {"accuracy": y.argmax(-1).double().mean(), "y": y}

    graph = capture(Metric(), (small_input(),), {})
    assert graph.tangent_outputs == ("y",)
    assert {output.name for output in graph.outputs if output.node is not None} >= {"linear.weight", "linear.bias"}


def test_tied_parameters_appear_once() -> None:
    module, _ = CASES["gpt-split-tied"]()
    graph = captured("gpt-split-tied")
    names = [item.name for item in graph.inputs if item.kind == "parameter"]
    assert names == [name for name, _ in module.named_parameters()]
    assert graph.aliases["tokens.weight"] == ("tokens.weight", "head.weight")
    assert graph.aliases["positions.weight"] == ("positions.weight",)


def test_frozen_parameters_have_no_gradient_output() -> None:
    module, kwargs = models.gpt(dtype=F64, layers=1)
    module.tokens.requires_grad_(False)
    graph = capture(module, (), kwargs)
    gradients = {output.name for output in graph.outputs if output.kind == "gradient"}
    assert "tokens.weight" not in gradients
    assert "head.weight" in gradients
    assert_same_step(graph, module, kwargs)


def test_all_frozen_is_forward_only() -> None:
    module, kwargs = models.gpt(dtype=F64, layers=1)
    graph = capture(module.requires_grad_(False), (), kwargs)
    assert graph.tangent_outputs == ()
    assert {output.kind for output in graph.outputs} == {"output"}


def test_unused_parameters_have_gradient_none() -> None:
    class Unused(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.weight.sum()
            return (x * scale).sum() * self.linear(x).sum()

    module = Unused()
    graph = capture(module, (small_input(),), {})
    gradients = {output.name: output.node for output in graph.outputs if output.kind == "gradient"}
    assert gradients.keys() == {"weight", "linear.weight", "linear.bias"}
    assert gradients["weight"] is None
    assert gradients["linear.weight"] is not None


def test_input_gradient() -> None:
    module, _ = models.mlp(dtype=F64)
    x = torch.randn(12, 24, dtype=F64, requires_grad=True)
    graph = capture(module, (x,), {})
    step = run_joint(graph, module, (x,))
    module(x).backward(torch.ones(12, 24, dtype=F64))
    assert_close(step.gradients["x"], x.grad)


def test_meta_module_gives_the_same_graph() -> None:
    module, kwargs = models.hf_llama(layers=1)
    expected = capture(module, (), kwargs)
    inputs = {name: tensor.to("meta") for name, tensor in kwargs.items()}
    with torch.device("meta"):  # capture does not follow the default device
        meta = type(module)(module.config).train()
        graph = capture(meta, (), inputs)
    assert graph.fingerprint == expected.fingerprint
    assert graph.signature == expected.signature


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    weight: float


pytree.register_dataclass(Batch)


class Structured(Small):
    def forward(self, batch: Batch, *others: Any, scale: int = 1, kind: str | None = None) -> dict[str, Any]:
        y = batch.x @ self.weight * batch.weight * scale + others[0]["bias"][0]
        return {"loss": y.sum(), "nested": (y, [kind, scale]), "input": batch.x, "weight": self.weight, "none": None}


def test_structured_inputs_and_outputs() -> None:
    module = Structured()
    args = (Batch(small_input(), 2.0), {"bias": [torch.ones(4, dtype=F64)]})
    kwargs = {"scale": 3, "kind": "odd"}
    graph = capture(module, args, kwargs)
    assert [item.name for item in graph.inputs if item.kind == "input"] == ["batch.x", "args[1]['bias'][0]"]
    assert graph.result.names == ("loss", "nested[0]", "input", "weight")
    output = run_joint(graph, module, args, {"kind": "odd", "scale": 3}).output
    expected = module(*args, **kwargs)
    assert output.keys() == expected.keys()
    assert_close([output["loss"], output["nested"][0]], [expected["loss"], expected["nested"][0]])
    assert output["nested"][1] == ["odd", 3]
    assert output["none"] is None
    assert_close(output["input"], args[0].x)
    assert_close(output["weight"], module.weight)


def test_flatten_inputs_refuses_another_structure() -> None:
    args = (Batch(small_input(), 2.0), {"bias": [torch.ones(4, dtype=F64)]})
    graph = capture(Structured(), args, {"scale": 3})
    with pytest.raises(InputError, match=r"captured with keyword arguments scale, called with scale, kind"):
        graph.call.flatten(args, {"scale": 3, "kind": "odd"})
    with pytest.raises(InputError, match="was 3 when captured, and is 4"):
        graph.call.flatten(args, {"scale": 4})
    with pytest.raises(InputError, match=r"\['bias'\]\[0\] was a tensor when captured, and is None"):
        graph.call.flatten((args[0], {"bias": [None]}), {"scale": 3})
    with pytest.raises(InputError, match="captured with arguments nested as"):
        graph.call.flatten((args[0], {"bias": []}), {"scale": 3})


def test_the_same_tensor_twice_is_two_inputs() -> None:
    module, kwargs = CASES["gpt-view"]()
    tokens = kwargs["input_ids"]
    graph = capture(module, (), {"input_ids": tokens, "labels": tokens})
    assert [item.name for item in graph.inputs if item.kind == "input"] == ["input_ids", "labels"]
    assert graph.fingerprint == captured("gpt-view").fingerprint


def test_constants_keep_their_values() -> None:
    class Constant(Small):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(3.0, dtype=F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.scale).sum() + torch.tensor([1.0, 2.0], dtype=F64)[1]

    module = Constant()
    graph = capture(module, (small_input(),), {})
    assert {item.value.sum().item() for item in graph.inputs if item.kind == "constant"} == {3.0}
    assert_close(run_joint(graph, module, (small_input(),)).output, module(small_input()))


def test_input_mutation() -> None:
    class InPlace(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.linear(x).sum()

    module = InPlace()
    graph = capture(module, (small_input(),), {})
    step = run_joint(graph, module, (small_input(),))
    assert_close(step.mutations, {"x": small_input() + 1})


def test_a_copy_made_for_the_user_stays_a_copy() -> None:
    class Copy(Small):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.clone(), self.linear(x).clone()

    graph = capture(Copy(), (small_input(),), {})
    copies = [output.node.target for output in graph.outputs if output.kind == "output"]
    assert copies == [torch.ops.aten.clone.default] * 2


def test_dropout_stays_random_and_is_not_merged() -> None:
    module, kwargs = models.gpt(dropout=0.5, layers=1)
    graph = capture(module, (), kwargs)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.aten.native_dropout.default) == 2
    assert targets.count(torch.ops.autoshard.attention.default) == 1  # drops weights by a seed that is drawn anew
    torch.manual_seed(0)
    first = run_joint(graph, module, (), kwargs).output[1]
    second = run_joint(graph, module, (), kwargs).output[1]
    assert first != second


def test_autocast_is_captured() -> None:
    module, kwargs = models.mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(module, (), kwargs)
        expected = module(**kwargs)
    assert graph.signature != capture(module, (), kwargs).signature
    step = run_joint(graph, module, (), kwargs)
    expected.backward()
    assert torch.equal(step.output, expected)
    for name, parameter in module.named_parameters():
        assert torch.equal(step.gradients[name], parameter.grad)


def test_module_paths_and_phases() -> None:
    module, _ = CASES["gpt-view"]()
    graph = captured("gpt-view")
    phases = [graph.phase(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    linear = [node for node in graph.graph.nodes if graph.module_path(node) == "layers.0.mlp.0"]
    assert {graph.phase(node) for node in linear} == {"forward", "backward"}
    assert [node.target for node in linear].count(torch.ops.aten.mm.default) == 2
    known = {name for name, _ in module.named_modules()}
    assert {graph.module_path(node) for node in graph.graph.nodes} <= known


class Branch(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight.sum()
        if x.sum() > 0:
            return self.linear(x).sum()
        return (x @ self.weight).sum()


def test_control_flow_error_names_the_line_and_the_way_out() -> None:
    with pytest.raises(CaptureError, match=r"test_joint\.py:\d+ \(if x\.sum\(\) > 0:\).*torch\.where") as caught:
        capture(Branch(), (small_input(),), {})
    assert str(caught.value).startswith("Branch could not be captured as one graph at ")


def test_sizes_that_depend_on_numbers_are_refused() -> None:
    class Select(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y[y > 0].sum()

    with pytest.raises(
        CaptureError, match=r"in the root module has a size or value that depends on numbers that forward computes"
    ) as info:
        capture(Select(), (small_input(),), {})
    assert "y[y > 0].sum()" in str(info.value)


LOOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)),
    "map_impl": lambda x: control_flow.map(lambda y: y.sin(), x),
    "while_loop": lambda x: torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))[
        1
    ],
    "scan": lambda x: scan(lambda c, y: (c + y, c * y), torch.zeros_like(x[0]), x)[1],
}


@pytest.mark.parametrize("name", LOOPS)
def test_branches_and_loops_with_graphs_of_their_own_are_refused(name: str) -> None:
    class Loop(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(LOOPS[name](x)).sum()

    with pytest.raises(CaptureError, match=rf"test_joint.py:\d+ \(.*\): {name} in the root .* is a branch"):
        capture(Loop(), (small_input(),), {})


def test_a_generator_is_refused() -> None:
    class Drawing(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * torch.rand(4, generator=torch.Generator().manual_seed(7))).sum()

    place = r"(rand.generator in the root module|a call at .*test_joint.py:\d+ \(.*\))"
    with pytest.raises(CaptureError, match=rf"{place} takes an object such as a torch.Generator"):
        capture(Drawing(), (small_input(),), {})


class Mapped(nn.Module):
    """A map over dims that are not the first, which torch.export can not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = torch.vmap(torch.matmul, in_dims=(2, 0), out_dims=2)(x, self.weight)
        return mapped.flatten(2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_tensor_that_export_did_not_see_being_made_is_refused_by_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_joint\.py:\d+ \(mapped: .* = torch\.vmap.*movedim"):
        capture(Mapped(), (torch.randn(2, 6, 3, 4),), {})


def test_differentiable_buffer_update_is_refused() -> None:
    class Update(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4, dtype=F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.copy_((x @ self.weight)[0])
            return (self.state * self.linear(x)).sum()

    with pytest.raises(CaptureError, match="state is updated in place with a value that requires a gradient"):
        capture(Update(), (small_input(),), {})


def test_wrong_arguments() -> None:
    with pytest.raises(CaptureError, match="Branch could not be captured as one graph: TypeError: missing a required"):
        capture(Branch(), (), {})


def test_unknown_output_type_names_the_way_out() -> None:
    class Odd:
        pass

    class ReturnsOdd(Small):
        def forward(self, x: torch.Tensor) -> Odd:
            return Odd()

    with pytest.raises(CaptureError, match=r"use_cache=False.*register_pytree_node"):
        capture(ReturnsOdd(), (small_input(),), {})
