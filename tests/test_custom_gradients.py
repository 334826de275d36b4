"""Functions with their own backward, hooks and gradients inside of `forward`: training on meshes against one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.capture.joint import capture
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from autoshard.specs.axes import MeshShape
from tests.models.gradients import BETWEEN, Small, gradients, is_possible
from tests.option_groups import grouped
from tests.pipeline.pipelines import assert_equal, pipeline_of, plan_by_hand, train_alone, train_pipeline
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh
from tests.training import (
    PLANNING_SECONDS,
    TOLERANCE,
    Beside,
    Trace,
    captured_as,
    compare,
    fast_links,
    train,
    worst_by_name,
)
from tests.workers import Workers

Builder = Callable[[], tuple[nn.Module, dict[str, Tensor]]]

OFTEN = ("straight-through", "lean linear", "hooks set late")
GROUPS = [[*BETWEEN][first::3] for first in range(3)]


def several(names: Sequence[str]) -> tuple[nn.Module, dict[str, Tensor]]:
    """The models of these names beside one another, and their inputs."""
    return Beside(gradients(name)[0] for name in names), gradients(names[0])[1]


def _on_mesh(build: Builder, mesh: tuple[int, ...], **options: Any) -> Trace:
    module, inputs = build()
    with simulated_mesh(**{f"axis{place}": size for place, size in enumerate(mesh)}) as device_mesh:
        asked = {"cluster": fast_links(), "time_limit": PLANNING_SECONDS, "effort": "fast", **options}
        autoshard.parallelize(module, device_mesh, (), inputs, **grouped(asked))
        return train(module, inputs)


def _under_random_plan(build: Builder, sizes: tuple[int, ...]) -> Trace:
    """Whatever is split how: no search, which takes long for many models at once."""
    module, inputs = build()
    graph, mesh = capture(module, (), inputs), {f"axis{place}": size for place, size in enumerate(sizes)}
    plan = random_plan(graph, MeshShape.of(mesh), seed=0, forced=0.3)
    with simulated_mesh(**mesh) as device_mesh, captured_as(graph):
        autoshard.parallelize(module, device_mesh, (), inputs, plan=plan)
        return train(module, inputs, 1)


def _check(build: Builder, mesh: tuple[int, ...], **options: Any) -> None:
    trace = _on_mesh(build, mesh, **options)
    assert compare(trace, train(*build())).worst < TOLERANCE


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_training_agrees_with_one_device(names: Sequence[str]) -> None:
    names = list(filter(is_possible, names))
    trace, reference = _under_random_plan(lambda: several(names), (2,)), train(*several(names), 1)
    assert worst_by_name(names, trace, reference) == {}


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
def test_planned_training_agrees_with_one_device(mesh: tuple[int, ...]) -> None:
    assert worst_by_name(OFTEN, _on_mesh(lambda: several(OFTEN), mesh), train(*several(OFTEN))) == {}


@pytest.mark.parametrize("name", ["hooks set late", "gradient inside", "non-differentiable"])
def test_whole_layers_are_run_again(name: str) -> None:
    _check(lambda: gradients(name, layers=3), (2, 2), recompute="full")


def test_sizes_may_change() -> None:
    names = ["hooks set late", "gradient inside", "context apart", "non-differentiable"]
    module, inputs = several(names)
    reference, _ = several(names)
    others = {key: tensor.repeat(2, 1)[:18] for key, tensor in inputs.items()}
    dims = {key: {0: "batch"} for key in inputs}
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(
            module,
            mesh,
            (),
            inputs,
            cluster=fast_links(),
            search=autoshard.Search(time_limit=PLANNING_SECONDS, effort="fast"),
            dynamic=dims,
        )
        train(module, inputs, 1)
        trace = train(module, others, 1)
    train(reference, inputs, 1)
    assert worst_by_name(names, trace, train(reference, others, 1)) == {}


@torch.library.custom_op("test_gradients::exponential", mutates_args=())
def exponential(x: Tensor) -> Tensor:
    """A kernel that reads memory, as those of Triton do."""
    return torch.from_numpy(np.exp(x.detach().numpy()))


@torch.library.custom_op("test_gradients::exponential_backward", mutates_args=())
def exponential_backward(gradient: Tensor, result: Tensor) -> Tensor:
    """Its derivative, doubled."""
    return torch.from_numpy(2 * gradient.numpy() * result.numpy())


@torch.library.custom_op("test_gradients::softened", mutates_args=())
def softened(x: Tensor) -> Tensor:
    """A kernel with a derivative of its own, and with a rule."""
    return torch.from_numpy(np.tanh(x.detach().numpy()))


@torch.library.custom_op("test_gradients::softened_backward", mutates_args=())
def softened_backward(gradient: Tensor, result: Tensor) -> Tensor:
    """Three times the gradient."""
    return torch.from_numpy(3 * gradient.numpy())


@torch.library.custom_op("test_gradients::bent", mutates_args=())
def bent(x: Tensor) -> Tensor:
    """A kernel with a derivative of its own, and without a rule."""
    return torch.from_numpy(np.tanh(x.detach().numpy()))


for _operator in (exponential, exponential_backward, softened, softened_backward, bent):
    _operator.register_fake(lambda x, *others: torch.empty_like(x))

softened.register_autograd(
    lambda ctx, gradient: softened_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
bent.register_autograd(
    lambda ctx, gradient: gradient * (2 - ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
autoshard.register_rule("test_gradients::softened", "... -> ...")
autoshard.register_rule("test_gradients::softened_backward", "..., ... -> ...", linear="0")


class Exponential(Function):
    """A function around kernels that no rule is for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = exponential(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return exponential_backward(gradient.contiguous(), *ctx.saved_tensors)


def _kernels(between: Callable[[Small, Tensor], Tensor]) -> Builder:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        module, inputs = gradients("straight-through")
        type(module).between = between  # type: ignore[attr-defined]
        return module, inputs

    return build


def test_kernels_without_rules_are_run_whole_with_one_warning() -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        _check(_kernels(lambda model, x: Exponential.apply(0.1 * x)), (2, 2))
    told = [str(one.message) for one in raised if "no sharding rule" in str(one.message)]
    assert sum("exponential.default" in text for text in told) == 1
    assert sum("exponential_backward.default" in text for text in told) == 1


def test_a_kernel_without_a_rule_keeps_the_derivative_that_is_registered() -> None:
    with pytest.warns(UserWarning, match="no sharding rule.*bent"):
        _check(_kernels(lambda model, x: bent(x)), (2, 2))


def test_kernels_with_rules_are_sharded() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no sharding rule")
        _check(_kernels(lambda model, x: softened(x)), (2, 2))


def test_mixed_precision_casts_around_functions() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    trace = _on_mesh(lambda: gradients("lean linear"), (2, 2), mp_policy=policy)
    assert 0 < compare(trace, train(*gradients("lean linear"))).worst < 1e-5


def _deep(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A deeper model, with gradients large enough to be clipped."""
    module, inputs = gradients(name, layers=4)
    return module, inputs | {"target": 10 * inputs["target"]}


def _on_pipeline(name: str, plan: PipelinePlan) -> dict[str, Tensor]:
    module, inputs = _deep(name)
    return train_pipeline(pipeline_of(module, inputs, plan), inputs)


@pytest.mark.parametrize("name", ["lean linear", "hooks set late", "gradient inside"])
def test_pipelines_agree_with_one_device(two: Workers, name: str) -> None:
    plan = plan_by_hand(*_deep(name), {"pp": 2}, schedule("1F1B", 2, 2))
    assert_equal(two.run(_on_pipeline, name, plan), train_alone(*_deep(name), 2))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_the_whole_module_run_once() -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        module, inputs = gradients("reversal")
        module.register_full_backward_pre_hook(lambda module, taken: (3 * taken[0],))
        return module, inputs

    _check(build, (2,))
