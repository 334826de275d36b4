"""Batches split into microbatches, other calls than the example, and the weights of microbatches in a mean."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import InputError, PipelineError, PlanError
from autoshard.pipeline.graph.microbatch import BatchCall, loss_shares, target_count
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from tests import models
from tests.pipeline.pipelines import assert_equal, model, pipeline_of, plan_by_hand, train_model_alone, train_pipeline
from tests.training import loss_of, outputs_of
from tests.workers import Workers


class _Model(nn.Module):
    def forward(self, x: torch.Tensor, batch: dict[str, Any], *, scale: float = 1.0) -> torch.Tensor:
        raise AssertionError("splitting runs nothing")


def test_tensors_are_split_along_the_batch() -> None:
    x, y, table = torch.randn(6, 2), torch.randn(3, 6), torch.randn(4)
    call = ((x, {"y": y, "table": table, "step": torch.tensor(1)}), {"scale": 2.0})
    parts = BatchCall(_Model(), *call, {"batch['y']": 1, "batch['table']": None}).split(3)
    assert len(parts) == 3
    assert torch.equal(torch.cat([part.args[0] for part in parts]), x)
    assert torch.equal(torch.cat([part.args[1]["y"] for part in parts], 1), y)
    for part in parts:
        assert part.args[1]["table"] is table
        assert part.args[1]["step"].item() == 1
        assert part.kwargs == {"scale": 2.0}


def test_meta_tensors_are_split() -> None:
    first, *others = BatchCall(_Model(), (torch.empty(8, 2, device="meta"), {}), {}).split(4)
    assert first.args[0].shape == (2, 2)
    assert first.args[0].is_meta
    assert len(others) == 3


@pytest.mark.parametrize(
    ("sizes", "number", "dims", "said"),
    [
        ((12, 12), 5, {}, r"12 samples cannot be split into 5 .*: use 1, 2, 3, 4, 6 or 12"),
        ((12, 7), 3, {}, r"x has 12 samples \(dim 0\), batch\['y'\] has 7 .*\{\"batch\['y'\]\": None\}"),
        ((12, 12), 0, {}, "0 is no number of microbatches"),
        ((12, 12), 2, {"z": 0}, r"batch_dims names 'z', .*: x, batch\['y'\]"),
        ((12, 12), 2, {"x": 1}, r"batch_dims\['x'\] is 1, and the tensor has 1 dims"),
        ((12, 12), 2, {"x": None, "batch['y']": None}, "no tensor with a batch to split in 2"),
    ],
)
def test_what_cannot_be_split_is_refused(
    sizes: tuple[int, int], number: int, dims: dict[str, int | None], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        BatchCall(_Model(), (torch.zeros(sizes[0]), {"y": torch.zeros(sizes[1])}), {}, dims).split(number)


OPTIONS: dict[str, Any] = {"layers": 1, "dropout": 0.25}


def small() -> models.Model:
    return model("gpt", **OPTIONS)


def taken(inputs: dict[str, Any], batch: int) -> dict[str, Any]:
    return {name: torch.cat([tensor] * 3)[:batch] for name, tensor in inputs.items()}


@pytest.mark.slow
def test_other_batches_and_modes(two: Workers) -> None:
    plan = plan_by_hand(*small(), {"pp": 2}, schedule("1F1B", 2, 2))
    two.run(differing_calls, plan)


def differing_calls(plan: PipelinePlan) -> None:
    module, inputs = small()
    alone, _ = small()
    alone.eval()
    pipeline = pipeline_of(module, inputs, plan)
    dropped = {pipeline.train_step(**inputs).item() for _ in range(2)}
    assert len(dropped) == 2
    pipeline.eval()
    expected = outputs_of(alone(**inputs))
    found = pipeline.eval_step(**inputs)
    torch.testing.assert_close(found.loss, expected["loss"].detach(), rtol=1e-9, atol=0.0)
    assert (found.outputs is None) == (dist.get_rank() == 0)
    if found.outputs is not None:
        torch.testing.assert_close(found.outputs[0], expected["output[0]"].detach(), rtol=1e-9, atol=1e-12)
    pipeline.zero_grad()
    larger = taken(inputs, 6)
    loss = loss_of(outputs_of(alone(**larger)))
    loss.backward()
    torch.testing.assert_close(pipeline.train_step(**larger), loss.detach(), rtol=1e-9, atol=0.0)
    for name, parameter in pipeline.named_parameters():
        ours, theirs = parameter.grad.full_tensor(), alone.get_parameter(name).grad
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)


def test_what_is_refused(two: Workers) -> None:
    plan = plan_by_hand(*small(), {"pp": 2}, schedule("GPipe", 2, 2))
    two.run(refused, plan)


def refused(plan: PipelinePlan) -> None:
    module, inputs = small()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(PlanError, match="a pipeline can not have the option output_placements"):
        autoshard.parallelize(module, mesh, (), inputs, plan=plan, output_placements="planned")
    pipeline = pipeline_of(module, inputs, plan)
    with pytest.raises(InputError, match="3 samples cannot be split into 2 equal microbatches"):
        pipeline.train_step(**taken(inputs, 3))
    with pytest.raises(PipelineError, match="train_step"):
        pipeline(**inputs)
    with torch.no_grad(), pytest.raises(PipelineError, match="eval_step"):
        pipeline.train_step(**inputs)
    with pytest.raises(InputError, match="x requires a gradient"):
        pipeline_of(*with_gradients())


def with_gradients() -> Any:
    module, inputs = model("mlp")
    plan = plan_by_hand(module, inputs, {"pp": 2}, schedule("GPipe", 2, 2))
    return module, {"x": inputs["x"].requires_grad_(), "target": inputs["target"]}, plan


def test_parameters_of_other_ranks_are_freed(two: Workers) -> None:
    plan = plan_by_hand(*small(), {"pp": 2}, schedule("GPipe", 2, 2))
    first, last = two.run(freed, plan)
    assert first.isdisjoint(last)
    assert first | last == set(small()[0].state_dict())


def freed(plan: PipelinePlan) -> set[str]:
    module, inputs = small()
    before = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    pipeline = pipeline_of(module, inputs, plan)
    assert all(parameter.is_meta for parameter in module.parameters())
    gc.collect()
    assert [name for name, parameter in before.items() if parameter() is not None] == []
    return set(pipeline.state_dict())


def test_a_model_without_a_loss(two: Workers) -> None:
    two.run(without_loss)


def without_loss() -> None:
    module, inputs = model("mlp")
    inputs.pop("target")
    expected = module(**inputs).detach()
    pipeline = pipeline_of(module, inputs, plan_by_hand(module, inputs, {"pp": 2}, schedule("GPipe", 2, 2)))
    with pytest.raises(PipelineError, match="Mlp returns no loss"):
        pipeline.train_step(**inputs)
    found = pipeline.eval_step(**inputs)
    assert found.loss is None
    if dist.get_rank() == 1:
        torch.testing.assert_close(found.outputs, expected, rtol=1e-9, atol=1e-12)


def test_a_model_from_the_meta_device(two: Workers) -> None:
    """Tied parameters on one rank, in two stages, and a state dict of the whole model."""
    options = {"layers": 1, "tied": True}
    plan = plan_by_hand(*model("gpt", **options), {"pp": 2}, schedule("ZBVZeroBubble", 2, 2, 2))
    assert_equal(two.run(loaded, plan, options), train_model_alone("gpt", 2, **options))


def loaded(plan: PipelinePlan, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    module, inputs = model("gpt", **options)
    state = module.state_dict()
    module.to("meta")
    module.head.weight = module.tokens.weight  # `to` made a parameter of each name
    pipeline = pipeline_of(module, inputs, plan)
    assert all(parameter.to_local().is_meta for parameter in pipeline.parameters())
    pipeline.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        pipeline.load_state_dict({**state, "other": torch.zeros(1)})
    return train_pipeline(pipeline, inputs)


class Masks(nn.Module):
    """Two masks of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.bias = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = nn.functional.dropout(x * self.weight, 0.5)
        return first, nn.functional.dropout(x + self.bias, 0.5)


def test_every_stage_draws_numbers_of_its_own(two: Workers) -> None:
    two.run(masks)


def masks() -> None:
    module, inputs = Masks(), {"x": torch.ones(4, 64)}
    plan = plan_by_hand(
        module, inputs, {"pp": 2}, schedule("GPipe", 2, 2), lambda node: int(node in ("add", "dropout_1"))
    )
    torch.manual_seed(0)  # on both ranks
    found = pipeline_of(module, inputs, plan).eval_step(**inputs).outputs
    if found is not None:
        first, second = (mask != 0 for mask in found)
        assert (first != second).float().mean() > 0.3
        assert (first[:2] != first[2:]).float().mean() > 0.3


class TwoLosses(nn.Module):
    """Returns two scalars, and says of neither that it is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y.mean(), y.square().mean()


def test_several_losses_are_refused(two: Workers) -> None:
    messages = two.run(two_losses)
    assert "TwoLosses returns 2 floating tensors without dims: output[0], output[1]" in messages[0]


def two_losses() -> str:
    module, inputs = TwoLosses(), {"x": torch.randn(4, 4)}
    plan = plan_by_hand(module, inputs, {"pp": 2}, schedule("GPipe", 2, 2))
    with pytest.raises(PipelineError) as caught:
        pipeline_of(module, inputs, plan)
    assert not any(parameter.is_meta for parameter in module.parameters())
    return str(caught.value)


def test_a_plan_of_another_mesh(two: Workers) -> None:
    two.run(other_mesh)


def other_mesh() -> None:
    module, inputs = model("mlp")
    plan = plan_by_hand(module, inputs, {"pp": 2}, schedule("GPipe", 2, 2))
    with pytest.raises(PlanError, match="made for the mesh pp=2; this mesh is pp=1, tp=2"):
        pipeline_of(module, inputs, plan, {"pp": 1, "tp": 2})


class Classifier(nn.Module):
    def __init__(self, weight: Tensor | None = None, aside: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.weight = weight
        self.aside = aside

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.linear(x).flatten(0, 1), targets[:, 1:].flatten(), self.weight, ignore_index=-1)
        return loss + self.aside if self.aside else loss


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 5, (6, 4), generator=generator)
    targets[0], targets[2, 2:] = -1, -1
    return torch.randn(6, 3, 4, generator=generator), targets


def _shares(module: nn.Module, batch: dict[str, Tensor], parts: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    size = len(next(iter(batch.values()))) // parts
    cut = [
        {name: tensor[place * size : (place + 1) * size] for name, tensor in batch.items()} for place in range(parts)
    ]
    step = capture_microbatch(module, (), cut[0])
    return loss_shares(target_count(step.exported, step.exported.outputs[0]), cut), cut


def test_what_is_ignored_does_not_count() -> None:
    module = Classifier().double()
    x, targets = _batch()
    batch = {"x": x.double(), "targets": targets}
    weights, parts = _shares(module, batch, 3)
    assert weights.sum() == 1
    assert not torch.allclose(weights, weights.mean())
    torch.testing.assert_close(
        sum(weight * module(**part) for weight, part in zip(weights, parts, strict=True)), module(**batch)
    )


def test_losses_that_are_no_such_mean_count_alike() -> None:
    x, targets = _batch()
    for module in (Classifier(torch.arange(5.0)), Classifier(aside=1.0)):
        weights, _ = _shares(module, {"x": x, "targets": targets}, 2)
        assert weights.tolist() == [0.5, 0.5]


def test_shifted_labels_of_hugging_face() -> None:
    module, inputs = models.hf_llama(dtype=torch.float64, batch=4)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][0, 2:] = -100
    weights, parts = _shares(module, inputs, 2)
    with torch.no_grad():
        whole = module(**inputs).loss
        torch.testing.assert_close(
            sum(weight * module(**part).loss for weight, part in zip(weights, parts, strict=True)).to(whole.dtype),
            whole,
        )
