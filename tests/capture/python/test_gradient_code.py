"""What `forward` does to gradients: kept in the joint graph, or refused by its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from autoshard.capture import capture
from autoshard.errors import CaptureError
from tests.capture.test_joint import assert_same_step
from tests.models.gradients import BETWEEN, Reverse, Round, Small, gradients, skip_between_layers

Between = Callable[[Small, Tensor], Tensor]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", BETWEEN)
def test_joint_graph_has_the_gradients_that_forward_says(name: str) -> None:
    skip_between_layers(name)
    module, kwargs = gradients(name)
    assert_same_step(capture(module, (), kwargs), module, kwargs)


def _small(between: Between) -> tuple[nn.Module, dict[str, Tensor]]:
    module, kwargs = gradients("straight-through")
    type(module).between = between  # type: ignore[attr-defined]
    return module, kwargs


def test_tensors_kept_on_the_cpu_change_nothing() -> None:
    def between(model: Small, x: Tensor) -> Tensor:
        with save_on_cpu():
            return x.square()

    module, kwargs = _small(between)
    assert_same_step(capture(module, (), kwargs), module, kwargs)


class _Backward(Function):
    """Adds to the gradients of a layer unseen, as checkpoints of other libraries do."""

    @staticmethod
    def forward(ctx: object, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        ctx.layer = layer  # type: ignore[attr-defined]
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor | None, None]:
        (x,) = (one.detach().requires_grad_() for one in ctx.saved_tensors)  # type: ignore[attr-defined]
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)  # type: ignore[attr-defined]
        return x.grad, None


class _Accumulating(Function):
    """Sets the gradient of a parameter itself."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight  # type: ignore[attr-defined]
        return x * weight.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.weight.grad = gradient.sum(0)  # type: ignore[attr-defined]
        return gradient, None


class _Counting(Function):
    """Changes a tensor in place without a word."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class _Kernel(Function):
    """Reads the memory of its argument, as kernels do."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(x.detach().numpy()))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class _KernelBackward(Function):
    """Reads the memory of its gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return torch.from_numpy(2 * gradient.numpy())


def _runs_backward(model: Small, x: Tensor) -> Tensor:
    x.sum().backward(retain_graph=True)
    return x


def _hooks_an_operator(model: Small, x: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda made, taken: made)
    return x


def _hooks_accumulation(model: Small, x: Tensor) -> Tensor:
    model.scale.register_post_accumulate_grad_hook(lambda parameter: None)
    return x


def _hooks_several(mode: str) -> Between:
    def between(model: Small, x: Tensor) -> Tensor:
        register_multi_grad_hook([x, model.scale], lambda gradients: None, mode=mode)
        return x

    return between


def _saves_otherwise(model: Small, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.double()):
        return x.square()


def _sets_numbers(model: Small, x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x


def _changes_numbers(model: Small, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x


def _changes_a_weight(model: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.scale.clamp_(-1, 1)
    return x * model.scale


def _freezes(model: Small, x: Tensor) -> Tensor:
    model.scale.requires_grad_(False)
    return x * model.scale


def _sets_gradient(model: Small, x: Tensor) -> Tensor:
    model.scale.grad = torch.ones_like(model.scale)
    return x


def _transforms(model: Small, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (y.exp() * model.scale).sum())(x)  # type: ignore[no-any-return]


def _functionalizes(model: Small, x: Tensor) -> Tensor:
    return torch.func.functionalize(lambda y: (y * model.scale).add_(1))(x)  # type: ignore[no-any-return]


def _calls_in_a_branch(model: Small, x: Tensor) -> Tensor:
    branches = (lambda y: Round.apply(y) * 2, lambda y: y.cos())
    return torch.cond(x.sum() > 0, *branches, (x,))  # type: ignore[no-any-return]


def _reads_a_view_of_its_argument(model: Small, x: Tensor) -> Tensor:
    class Masked(Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * view

    view = x.detach().view(-1)[: x.shape[1]]
    return Masked.apply(x)  # type: ignore[no-any-return]


REFUSED: dict[Between, str] = {
    _runs_backward: r"test_gradient_code.py:\d+ \(x.sum\(\).backward\(.* runs backward inside of forward",
    (lambda model, x: _Backward.apply(x, model.second)): r"\(ctx.layer\(x\).backward\(gradient\).* runs backward",
    (lambda model, x: _Accumulating.apply(x, model.scale)): r"\(ctx.weight.grad = .* sets the gradient",
    (lambda model, x: _Counting.apply(x)): "_Counting changes a tensor in place at .*mark_dirty",
    (lambda model, x: _Kernel.apply(x)): r"\(return torch.from_numpy\(np.exp.*Wrap it in torch.library.custom_op",
    (lambda model, x: _KernelBackward.apply(x)): r"\(return torch.from_numpy\(2 .*Wrap it in torch.library.custom_op",
    _hooks_an_operator: r"\(x.grad_fn.register_hook.* sets a hook on AddmmBackward0",
    _hooks_accumulation: r"\(model.scale.register_post_accumulate_grad_hook.* where every call would set another",
    _hooks_several("all"): r"\(register_multi_grad_hook.* sets one hook for the gradients of several tensors",
    _hooks_several("any"): r"\(register_multi_grad_hook.* sets one hook for the gradients of several tensors",
    _saves_otherwise: r"\(with saved_tensors_hooks.* sets hooks for the tensors that backward reads",
    _sets_numbers: r"\(x.data = .* by setting its data",
    _changes_numbers: r"\(x.data.mul_.* changes the numbers of a tensor that has a gradient",
    _freezes: r"\(model.scale.requires_grad_.* sets requires_grad of a parameter",
    _sets_gradient: r"\(model.scale.grad = .* sets the gradient of a tensor in forward",
    _transforms: r"\(return torch.func.grad.* inside of a transform of torch.func",
    _functionalizes: r"\(return torch.func.functionalize.* inside of torch.func.functionalize",
    _calls_in_a_branch: r"\(return torch.cond.* runs a torch.autograd.Function inside of torch.cond",
    _reads_a_view_of_its_argument: "reads a tensor of forward that it was not given",
}


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("between", REFUSED, ids=lambda between: between.__name__)
def test_what_no_graph_can_hold_is_refused_by_its_line(between: Between) -> None:
    module, kwargs = _small(between)
    apply, enter = vars(torch.autograd.function._SingleLevelFunction), saved_tensors_hooks.__enter__
    engine, before = torch.autograd._engine_run_backward, dict(apply)
    with pytest.raises(CaptureError, match=REFUSED[between]):
        capture(module, (), kwargs)
    assert dict(vars(torch.autograd.function._SingleLevelFunction)) == before
    assert (saved_tensors_hooks.__enter__, torch.autograd._engine_run_backward) == (enter, engine)


def test_hooks_that_only_look_are_told_of() -> None:
    def between(model: Small, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: None)
        return x

    module, kwargs = _small(between)
    with pytest.warns(UserWarning, match=r"\(x.register_hook\(lambda gradient: None\)\) returns None"):
        capture(module, (), kwargs)


SEEN: list[object] = []
LOOKS: dict[Callable[[Any, Tensor], object], str] = {
    lambda model, gradient: SEEN.append(gradient): "changes .*SEEN",
    lambda model, gradient: SEEN.append(1): "changes .*SEEN",
    lambda model, gradient: setattr(model, "last", gradient): r"changes self.*\.last",
    lambda model, gradient: SEEN.append(gradient.norm().item()): "asks for the numbers in a tensor in a hook",
}


@pytest.mark.parametrize("look", LOOKS)
def test_hooks_that_keep_what_they_see_are_refused_by_their_line(look: Callable[[Any, Tensor], object]) -> None:
    def between(model: Small, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: look(model, gradient))
        return x

    module, kwargs = _small(between)
    with pytest.raises(CaptureError, match=rf"test_gradient_code.py:\d+ \(.*{LOOKS[look]}"):
        capture(module, (), kwargs)
    assert not SEEN


def test_kept_gradients_are_told_of() -> None:
    def between(model: Small, x: Tensor) -> Tensor:
        x.retain_grad()
        return x

    module, kwargs = _small(between)
    with pytest.warns(UserWarning, match=r"\(x.retain_grad\(\)\): the parallelised module keeps no gradient"):
        graph = capture(module, (), kwargs)
    assert_same_step(graph, module, kwargs)


class _Checkpointed(nn.Module):
    """Two layers, in checkpoints as they are told."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.outer, self.inner = outer, inner

    def run(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: self.first(y).relu(), x, use_reentrant=self.inner)
        return self.second(hidden)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=self.outer).square().sum()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("outer", "inner"), [(False, False), (False, True)])
def test_checkpoints_in_checkpoints_have_gradients(outer: bool, inner: bool) -> None:
    module, kwargs = _Checkpointed(outer, inner), {"x": torch.randn(4, 8, dtype=torch.float64)}
    assert_same_step(capture(module, (), kwargs), module, kwargs)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_that_takes_all_gradients_is_refused() -> None:
    module, x = _Checkpointed(True, True), torch.randn(4, 8, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"\(return checkpoint\(self.run.* reentrant .* Pass use_reentrant=False"):
        capture(module, (x,), {})
    with torch.no_grad():
        capture(module, (x,), {}, grad=False)


def test_without_gradients_functions_are_captured_all_the_same() -> None:
    module, kwargs = gradients("reversal")
    graph = capture(module, (), kwargs, grad=False)
    assert not graph.tangent_outputs


def test_without_gradients_weights_may_be_changed_in_place() -> None:
    module, kwargs = _small(_changes_a_weight)
    with torch.no_grad():
        graph = capture(module, (), kwargs, grad=False)
    assert [output.name for output in graph.outputs if output.kind == "mutation"] == ["scale"]


def test_capture_leaves_functions_as_they_were() -> None:
    module, kwargs = gradients("reversal")
    capture(module, (), kwargs)
    x = torch.ones(2, requires_grad=True)
    Reverse.apply(x, 3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-3.0, -3.0]


class _CheckpointedNorm(nn.Module):
    """Batch norm in a checkpoint, whose backward runs it again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Tanh()).double()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        return result.square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_batch_norm_in_a_checkpoint_updates_twice(reentrant: bool) -> None:
    module, kwargs = _CheckpointedNorm(reentrant), {"x": torch.randn(6, 4, dtype=torch.float64)}
    graph = capture(module, (), kwargs)
    assert_same_step(graph, module, kwargs)
    assert module.body[1].num_batches_tracked == 2
    assert sum(output.kind == "mutation" for output in graph.outputs) == 3
