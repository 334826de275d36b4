"""`parallelize` and `plan` from the user's side, on all ranks of a mesh in this process."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import BudgetError, InputError, PlanError
from autoshard.runtime.shards import distribute, local_of
from autoshard.specs.spec import Spec
from tests import models
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, captured_as, fast_links, held_by_ranks, outputs_of, relative_difference

Inputs = dict[str, Any]
Usage = Callable[[nn.Module, Inputs], Mapping[str, torch.Tensor]]
"""What a user does with a module; returns what is to be compared."""
MESH = {"dp": 2, "tp": 2}
FAST = autoshard.Search(effort="fast")


def gpt(**options: Any) -> models.Model:
    return models.gpt(dtype=torch.float64, layers=1, **options)


@functools.cache
def graph_of_gpt() -> JointGraph:
    """For the tests in which the step of the example alone runs."""
    module, inputs = gpt()
    return capture(module, (), inputs)


@functools.cache
def plan_of_gpt() -> autoshard.ShardingPlan:
    """For the tests of what is done with a plan, whatever it is."""
    module, inputs = gpt()
    with captured_as(graph_of_gpt()):
        return autoshard.plan(module, MESH, (), inputs, cluster=fast_links(), search=FAST)


def mlp() -> models.Model:
    return models.mlp(dtype=torch.float64)


def alone(usage: Usage, module: nn.Module, inputs: Inputs) -> dict[str, list[torch.Tensor]]:
    """The usage on one device, on a copy of the module: its results and the parameters and gradients at its end."""
    module = copy.deepcopy(module)
    return _results(usage(module, inputs), module)


def _results(results: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, list[torch.Tensor]]:
    held = dict(results)
    for name, parameter in module.named_parameters():
        held[name] = parameter.detach()
        if parameter.grad is not None:
            held[f"gradient of {name}"] = parameter.grad
    return {name: held_by_ranks(tensor.detach()) for name, tensor in held.items()}


def check(usage: Usage, module: nn.Module, inputs: Inputs, **options: Any) -> nn.Module:
    """The usage gives on a mesh what it gives on one device."""
    expected = alone(usage, module, inputs)
    with simulated_mesh(**MESH) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=FAST, **options)
        assert relative_difference(_results(usage(module, inputs), module), expected) <= TOLERANCE
    return module


def step(module: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """One training step on the model's own loss."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    loss = outputs_of(module(**inputs))["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def cut(inputs: Inputs, size: int) -> Inputs:
    """The first examples of a batch."""
    return {name: tensor[:size] for name, tensor in inputs.items()}


def test_the_module_stays_the_same_object_with_the_same_names() -> None:
    module, inputs = gpt()
    names, kind = list(module.state_dict()), type(module)
    with simulated_mesh(dp=2, tp=2) as mesh:
        assert autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=FAST) is module
        assert type(module) is kind
        assert list(module.state_dict()) == names
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
        for name, parameter in module.named_parameters():
            assert tuple(parameter.placements) == module.sharding_plan.placements[name]
        with pytest.raises(PlanError, match="parallelised already"):
            autoshard.parallelize(module, mesh, (), inputs)


def test_without_examples_an_optimizer_made_before_the_first_call_trains_the_right_parameters() -> None:
    module, inputs = gpt()

    def train(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return {f"loss {index}": step(module, inputs, optimizer) for index in range(3)}

    expected = alone(train, module, inputs)
    with simulated_mesh(dp=2, tp=2) as mesh:
        with pytest.raises(InputError, match="is not parallelised"):
            autoshard.plan_of(module)
        autoshard.parallelize(module, mesh, cluster=fast_links(), search=FAST)
        assert all(placement == Replicate() for p in module.parameters() for placement in p.placements)
        with pytest.raises(InputError, match="it is planned at its first call"):
            autoshard.plan_of(module)
        assert relative_difference(_results(train(module, inputs), module), expected) <= TOLERANCE
        assert autoshard.plan_of(module) is module.sharding_plan
        assert any(placement != Replicate() for p in module.parameters() for placement in p.placements)


def test_other_batch_sizes_evaluation_and_other_keywords_are_served() -> None:
    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        results = {"first": step(module, inputs), "second": step(module, cut(inputs, 7))}
        with torch.no_grad():
            results["logits"] = module(inputs["input_ids"][:3])
        module.eval()
        results["evaluated"] = module(**{name: tensor[:6, :5] for name, tensor in inputs.items()})[1]
        module.train()
        results["again"] = step(module, inputs)
        return results

    check(usage, *gpt(), plan=plan_of_gpt())


def test_evaluation_without_gradients_needs_no_backward() -> None:
    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            logits, loss = module(**inputs)
        assert not loss.requires_grad
        return {"logits": logits, "loss": loss}

    check(usage, *gpt(), plan=plan_of_gpt())


def test_gradients_accumulate_over_several_calls() -> None:
    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        for size in (12, 4, 12):
            module(**cut(inputs, size)).backward()
        return {}

    check(usage, *mlp())


def test_frozen_parameters_stay_and_tied_ones_stay_tied() -> None:
    module, inputs = gpt(tied=True)
    module.layers[0].attention.qkv.weight.requires_grad_(False)
    before = module.layers[0].attention.qkv.weight.detach().clone()
    check(lambda module, inputs: {"loss": step(module, inputs), "then": step(module, inputs)}, module, inputs)
    assert module.head.weight is module.tokens.weight
    frozen = module.layers[0].attention.qkv.weight
    assert frozen.grad is None
    assert not frozen.requires_grad
    with simulated_mesh(dp=2, tp=2):
        assert all(torch.equal(value, before) for value in held_by_ranks(frozen.detach()))


def test_freezing_after_parallelize_is_served() -> None:
    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        loss = step(module, inputs)
        module.up.weight.requires_grad_(False)
        module.up.weight.grad = None
        return {"loss": loss, "frozen": step(module, inputs)}

    check(usage, *mlp())


def test_a_loss_that_the_user_makes_of_the_logits() -> None:
    """The model returns a loss too, which the first program alone differentiates."""

    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        logits, _ = module(**inputs)
        functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), label_smoothing=0.1).backward()
        logits, loss = module(**inputs)
        (loss + logits.square().mean()).backward()
        return {"logits": logits, "loss": loss}

    check(usage, *gpt(), plan=plan_of_gpt())


def test_a_loss_of_the_logits_of_a_model_with_buffers() -> None:
    """The second program starts from the buffers as they were before the first one changed them."""

    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        for _ in range(2):
            module(**inputs)["logits"].square().mean().backward()
        return dict(module.named_buffers())

    _, inputs = models.resnet18(dtype=torch.float64, size=16)
    check(usage, models.ResNet((12,), 12).double(), inputs)


def test_planned_outputs_are_dtensors_as_they_lie() -> None:
    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        logits, loss = module(**inputs)
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        return {"logits": logits, "loss": loss}

    with captured_as(graph_of_gpt()):
        module = check(usage, *gpt(), output_placements="planned")
    assert any(placement != Replicate() for placement in module.sharding_plan.output_placements["output[0]"])


def test_outputs_are_handed_back_as_asked() -> None:
    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        logits, loss = module(**inputs)
        assert not isinstance(logits, DTensor) or tuple(logits.placements) == (Shard(0), Shard(2))
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        return {"logits": logits}

    with captured_as(graph_of_gpt()):
        check(usage, *gpt(), output_placements={"output[0]": (Shard(0), Shard(2))})


def local_inputs(inputs: Inputs, mesh: DeviceMesh) -> Inputs:
    """Every rank's shard of the batch, split over the first mesh axis."""
    spec = Spec.of(Shard(0), Replicate())
    return {name: local_of(distribute(tensor, mesh, spec)) for name, tensor in inputs.items()}


def test_local_inputs() -> None:
    module, inputs = gpt()

    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"loss": step(module, inputs), "then": step(module, inputs)}

    expected = alone(usage, module, inputs)
    with simulated_mesh(dp=2, tp=2) as mesh:
        placements = dict.fromkeys(inputs, (Shard(0), Replicate()))
        autoshard.parallelize(
            module, mesh, (), inputs, cluster=fast_links(), search=FAST, inputs="local", input_placements=placements
        )
        assert module.sharding_plan.input_placements == placements
        shards = local_inputs(inputs, mesh)
        assert relative_difference(_results(usage(module, shards), module), expected) <= TOLERANCE


class Scored(nn.Module):
    """A loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y if labels is None else (y - labels).square().mean()


def test_a_call_may_leave_out_labels_that_have_a_placement() -> None:
    module = Scored()
    expected = copy.deepcopy(module)
    x, labels = torch.randn(2, 4, 8, dtype=torch.float64)
    with simulated_mesh(dp=2) as mesh:
        placements = {"x": (Shard(0),), "labels": (Shard(0),)}
        autoshard.parallelize(
            module, mesh, (x, labels), cluster=fast_links(), inputs="local", input_placements=placements
        )
        shards = [local_of(distribute(one, mesh, Spec.of(Shard(0)))) for one in (x, labels)]
        for given, whole in ((shards, (x, labels)), (shards[:1], (x,))):
            ours, theirs = held_by_ranks(module(*given).detach()), [expected(*whole).detach()]
            assert relative_difference({"": ours}, {"": theirs}) <= TOLERANCE
            module.eval()


def rows(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Every rank's rows, of which the ranks along `dp` have different ones."""
    return local_of(distribute(tensor, mesh, Spec.of(Shard(0), Replicate())))


def test_local_inputs_need_no_placements_and_no_global_example() -> None:
    module, inputs = gpt()
    expected = alone(lambda module, inputs: {"loss": step(module, inputs)}, module, inputs)
    with simulated_mesh(dp=2, tp=2) as mesh:
        example = {
            name: torch.empty(tensor.shape[0] // 2, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
            for name, tensor in inputs.items()
        }
        autoshard.parallelize(
            module, mesh, (), example, cluster=fast_links(), search=FAST, inputs="local", example_inputs="local"
        )
        assert module.sharding_plan.input_placements == dict.fromkeys(inputs, (Shard(0), Replicate()))
        results = _results({"loss": step(module, {name: rows(one, mesh) for name, one in inputs.items()})}, module)
        assert relative_difference(results, expected) <= TOLERANCE


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """On every rank, of what may differ from rank to rank."""
    for one, other in zip(held_by_ranks(ours.detach()), itertools.cycle(held_by_ranks(theirs.detach())), strict=False):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


class Embedded(nn.Module):
    """Rows of the batch under names, a number, and what has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        rows = self.linear(x) * scale
        loss = {} if y is None else {"loss": (rows - y).square().mean()}
        return {"rows": rows, "flat": rows.reshape(-1), "columns": rows.sum(0), **loss}


def test_local_outputs_are_rows_and_their_gradients_those_of_the_mean() -> None:
    """The first call is lazy, and the second, of fewer rows, leaves out what the first one had."""
    module = Embedded()
    expected = copy.deepcopy(module)
    x, y, scale = torch.randn(8, 8), torch.randn(8, 6), torch.randn(6)
    x, y, scale = x.double(), y.double(), scale.double()
    with simulated_mesh(dp=2, tp=2) as mesh:
        autoshard.parallelize(
            module,
            mesh,
            cluster=fast_links(),
            search=FAST,
            inputs="local",
            outputs="local",
            output_placements={"los*": {"dp": Replicate(), "tp": Replicate()}},
        )
        ours, theirs = module(rows(x, mesh), scale, y=rows(y, mesh)), expected(x, scale, y)
        for name, split in (("rows", True), ("flat", True), ("columns", False)):
            assert_equal(ours[name], rows(theirs[name], mesh) if split else theirs[name])
        ((ours["rows"] - rows(y, mesh)).square().mean() + ours["loss"]).backward()
        (2 * theirs["loss"]).backward()
        assert relative_difference(_results({}, module), _results({}, expected)) <= TOLERANCE
        module.eval()
        with torch.no_grad():
            ours, theirs = module(rows(x[:6], mesh), scale), expected(x[:6], scale)
        assert_equal(ours["rows"], rows(theirs["rows"], mesh))


def test_dtensor_inputs_may_lie_anyhow() -> None:
    module, inputs = gpt()
    expected = alone(lambda module, inputs: {"loss": step(module, inputs)}, module, inputs)
    with simulated_mesh(dp=2, tp=2) as mesh:
        with captured_as(graph_of_gpt()):
            autoshard.parallelize(module, mesh, (), inputs, plan=plan_of_gpt())
        placed = {name: distribute(tensor, mesh, Spec.of(Shard(1), Shard(0))) for name, tensor in inputs.items()}
        results = _results({"loss": step(module, placed)}, module)
        assert relative_difference(results, expected) <= TOLERANCE


def test_gradients_flow_to_inputs() -> None:
    module, inputs = mlp()

    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        x = inputs["x"].clone().requires_grad_()
        module(x, target=inputs["target"]).backward()
        assert x.grad is not None
        return {"gradient of x": x.grad}

    check(usage, module, inputs)


def test_an_uneven_hint_trains_right() -> None:
    """48 rows over 5 ranks: shards of 10 and 8."""
    module, inputs = mlp()

    def usage(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        losses = {}
        for index in range(3):
            losses[f"loss {index}"] = loss = module(**inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    expected = alone(usage, module, inputs)
    with simulated_mesh(dp=5) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, hints={"*.weight": Shard(0), "up.bias": Shard(0)})
        assert tuple(module.up.weight.placements) == (Shard(0),)
        assert relative_difference(_results(usage(module, inputs), module), expected) <= TOLERANCE


def test_a_budget_that_cannot_be_met_changes_nothing() -> None:
    module, inputs = mlp()
    parameters = list(module.parameters())
    with simulated_mesh(dp=2, tp=2) as mesh, pytest.raises(BudgetError, match="smallest"):
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), memory_limit=1000)
    assert all(before is now for before, now in zip(parameters, module.parameters(), strict=True))
    assert "forward" not in module.__dict__


def test_a_parameter_changed_between_forward_and_backward_is_an_error() -> None:
    """As on one device: the gradient would be of other numbers."""
    module, inputs = gpt()
    with simulated_mesh(dp=2, tp=2) as mesh:
        with captured_as(graph_of_gpt()):
            autoshard.parallelize(module, mesh, (), inputs, plan=plan_of_gpt())
        logits, loss = module(**inputs)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)
        with pytest.raises(InputError, match="modified by an inplace operation"):
            logits.sum().backward()
