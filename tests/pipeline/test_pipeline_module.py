"""Pipelines in real processes over gloo, against one device.

Norms of gradients in parts, against whole ones; that pipelines clip as one device does is in every comparison.

Pipelines through the front door: `plan` and `parallelize` of a mesh with a pipeline axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import autoshard
from autoshard.errors import HintError, InputError, MeshError, PipelineError, PlanError
from autoshard.pipeline._torch import SENDS_ALL_GRADIENTS
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import total_norm
from autoshard.pipeline.schedule.actions import SCHEDULES, schedule
from autoshard.runtime.shards import replace_parameters
from autoshard.specs.spec import Spec
from tests.models.common import fixed_seed
from tests.pipeline.pipelines import (
    assert_equal,
    held_by,
    pipeline_of,
    plan_by_hand,
    train_alone,
    train_model_alone,
    train_pipeline,
)
from tests.pipeline.planned_cases import OURS, Case
from tests.pipeline.small_pipelines import Tower, tied
from tests.training import TOLERANCE, fast_links
from tests.workers import Workers

SMALL = {"layers": 1}
DATA = {"pp": 2, "dp": 2}
MANY = {"batch": 32}
# Kinds of models; the page of numerics has all of them on all meshes.
CASES = [
    Case("hf_t5", {"pp": 4}, "1F1B", 4),
    Case("unet", {"pp": 2, "dp": 2}, "GPipe", 2),
    Case("hf_mixtral", {"pp": 2, "tp": 2}, "GPipe", 2),
    Case("gpt", {"pp": 2, "dp": 2}, "Interleaved1F1B", 2, shards=True, options=SMALL),
]


def check(case: Case, workers: Workers) -> None:
    plan = case.plan()
    placed = [row for stage in plan.stages[:-1] for row in stage.output_placements.values()]
    assert any(not placement.is_replicate() for row in placed for placement in row) == case.shards
    assert_equal(case.run(workers, plan), train_model_alone(case.model, 1, **(case.options or {})))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_on_four_ranks(four: Workers, case: Case) -> None:
    check(case, four)


@pytest.mark.slow
def test_three_axes() -> None:
    with Workers(8, timeout=100.0) as eight:
        check(Case("mlp", {"pp": 2, "dp": 2, "tp": 2}, "1F1B", 2), eight)


@pytest.mark.parametrize("name", [*SCHEDULES, OURS])
def test_every_schedule(two: Workers, name: str) -> None:
    """With tied parameters: on two ranks, or on one where stages lie there and back."""
    module, inputs = tied()
    plan = plan_by_hand(module, inputs, {"pp": 2}, Case("tied", {"pp": 2}, name, 4).order)
    assert_equal(two.run(trained_tied, plan), train_alone(module, inputs, 1))


def trained_tied(plan: PipelinePlan) -> dict[str, torch.Tensor]:
    module, inputs = tied()
    return train_pipeline(pipeline_of(module, inputs, plan), inputs)


class Counting(nn.Module):
    """Begins and ends without parameters: whole numbers and truth values go from stage to stage first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.up = nn.Linear(6, 6)

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = numbers.cumsum(1) % 9
        even = counts % 2 == 0
        x = self.up(self.table(counts))
        scale = x.square().mean()  # a scalar that crosses
        y = torch.where(even[..., None], x, x.tanh() * scale)
        return {"counts": counts, "y": y, "loss": (y * y).mean()}


def counting() -> tuple[nn.Module, dict[str, Any]]:
    with fixed_seed(torch.float64, 0):
        return Counting(), {"numbers": torch.randint(0, 9, (4, 3))}


STAGES = {"cumsum": 0, "remainder": 0, "remainder_1": 0, "eq": 0, "embedding": 1, "linear": 1, "square": 1, "mean": 1}
"""The rest runs on stages without parameters."""


@pytest.mark.parametrize("name", ["Interleaved1F1B", "DualPipeV"])
def test_stages_without_parameters(two: Workers, name: str) -> None:
    module, inputs = counting()
    order = schedule(name, 2, 4, 2)
    plan = plan_by_hand(module, inputs, {"pp": 2}, order, lambda node: STAGES.get(node, 3 if node == "mean_1" else 2))
    held = [len(stage.placements) for stage in plan.stages]
    assert held == [0, 3, 0, 0]
    if SENDS_ALL_GRADIENTS:
        with pytest.raises(AssertionError, match=r"PipelineError: torch .* a stage receives .*int64.* without a gradi"):
            two.run(counted, plan)
        return
    assert_equal(two.run(counted, plan), train_alone(module, inputs, 4))


def counted(plan: PipelinePlan) -> dict[str, torch.Tensor]:
    module, inputs = counting()
    return train_pipeline(pipeline_of(module, inputs, plan), inputs)


class Counted(Tower):
    """A tower with a factor, that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = 1.0, 0

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, target) * self.factor


def _state_of_a_pipeline() -> tuple[list[float], int, str]:
    torch.manual_seed(0)
    model = Counted()
    inputs = {"x": torch.randn(4, 32), "target": torch.randn(4, 32)}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = autoshard.parallelize(
        model, mesh, example_kwargs=inputs, pipeline=autoshard.Pipeline(axis="pp", microbatches=2)
    )
    losses = []
    for factor in (1.0, 3.0, 1.0):
        model.factor = factor
        losses.append(pipeline.train_step(**inputs).item())
    model.layers[0] = nn.Linear(32, 32)
    with pytest.raises(PipelineError) as raised:
        pipeline.train_step(**inputs)
    return losses, model.calls, str(raised.value)


def test_a_change_of_state_is_seen(two: Workers) -> None:
    for losses, calls, said in two.run(_state_of_a_pipeline):
        assert losses[1] == pytest.approx(3 * losses[0])
        assert losses[2] == pytest.approx(losses[0])
        assert calls == 3
        assert "layers.0.weight was put into Counted after the pipeline" in said


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    """As sharpness-aware minimisation does."""
    held = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.add_(parameter.grad, alpha=0.05)
        parameter[3].zero_()
    for name, parameter in module.named_parameters():
        parameter.data = held[name]


@torch.no_grad()
def _average(module: nn.Module) -> None:
    average = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        average[name].lerp_(parameter + 1, 0.1)
        parameter.copy_(average[name])


@torch.no_grad()
def _zero_rows(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter[3].zero_()
        parameter.grad[:2] = 0


CHANGES: list[Callable[[nn.Module], object]] = [
    _perturb,
    _average,
    _zero_rows,
    lambda module: vector_to_parameters(parameters_to_vector(module.parameters()).detach() * 0.5, module.parameters()),
    lambda module: [nn.init.constant_(parameter, 0.1) for parameter in module.parameters()],
    lambda module: [nn.init.eye_(parameter) for parameter in module.parameters() if parameter.ndim > 1],
]


def _train_with_changes(module: nn.Module, step: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    losses = {}
    for place, change in enumerate(CHANGES):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.zero_grad()
        losses[f"loss {place}"] = step().detach()
        change(module)
        optimizer.step()
    return losses | held_by(module)


def changed_alone() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with fixed_seed(torch.float64, 0):
        return Tower(), {"x": torch.randn(4, 32), "target": torch.randn(4, 32)}


def change_a_pipeline() -> dict[str, torch.Tensor]:
    module, inputs = changed_alone()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = autoshard.parallelize(
        module,
        mesh,
        (),
        inputs,
        pipeline=autoshard.Pipeline(microbatches=2),
        search=autoshard.Search(effort="fast"),
        cluster=fast_links(),
    )
    found = _train_with_changes(pipeline, lambda: pipeline.train_step(**inputs))
    # What each rank would do for its own parameters, otherwise than one device, or not at all.
    weight = next(parameter for parameter in pipeline.parameters() if parameter.ndim > 1)
    for draw in (nn.init.xavier_normal_, torch.randn_like, lambda weight: weight.data[2:].uniform_()):
        with pytest.raises(InputError, match=r"draws random numbers for .* of a pipeline"):
            draw(weight)
    with pytest.raises(InputError, match="draws random numbers"):
        torch.rand_like(weight.grad)
    with pytest.raises(PipelineError, match="neither the types nor the methods"):
        pipeline.apply(lambda part: None)
    for part in pipeline.modules():
        if part._parameters.get("weight") is not None:
            prune.l1_unstructured(part, "weight", 0.4)
    with pytest.raises(PipelineError, match=r"weight was deleted after the pipeline was made"):
        pipeline.train_step(**inputs)
    return found


def test_parameters_are_changed_between_steps(two: Workers) -> None:
    module, inputs = changed_alone()

    def step() -> torch.Tensor:
        loss = module(**inputs)
        loss.backward()
        return loss

    expected = _train_with_changes(module, step)
    for found in two.run(change_a_pipeline):
        torch.testing.assert_close(found, {key: expected[key] for key in found}, rtol=TOLERANCE, atol=1e-12)


SPECS = {"strided": "S(0,f=2)", "uneven": "S(0)", "replicated": "R", "of one row": "S(0)"}
"""Two pipeline ranks have two of these each."""
ORDERS = (0.0, 1.0, 2.0, 3.0, math.inf)


def parameters() -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    shapes = {"strided": (8, 6), "uneven": (5,), "replicated": (4, 3), "of one row": (1, 3)}
    return nn.ParameterDict(
        {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    )


def norms() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    places = {name: place for place, name in enumerate(SPECS)}
    held = parameters()
    for name in list(held):
        if places[name] // 2 != mesh.get_local_rank("pp"):
            del held[name]
    replace_parameters(held, {name: Spec.parse(SPECS[name]) for name in held}, mesh["tp"])
    gradients = {places[name]: parameter.detach() for name, parameter in held.items()}
    with pytest.raises(InputError, match=r"norm_type=-1\.0"):
        total_norm(gradients, len(SPECS), mesh, -1.0, torch.float64)
    return [total_norm(gradients, len(SPECS), mesh, order, torch.float64) for order in ORDERS]


def test_norms_are_those_of_whole_gradients(four: Workers) -> None:
    whole = [parameter.detach() for parameter in parameters().values()]
    expected = [nn.utils.get_total_norm(whole, order) for order in ORDERS]
    for found in four.run(norms):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


MESH = {"pp": 2, "dp": 2}
IGNORED = -1


class Tagger(nn.Module):
    """Labels every word; some are not to be labelled."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 5)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.down(functional.gelu(self.up(self.words(words))))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def tagger() -> tuple[Tagger, dict[str, torch.Tensor]]:
    """The model, and a batch of which the first half counts for much less than the second."""
    with fixed_seed(torch.float64, 0):
        module = Tagger()
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 11, (8, 6), generator=generator)
    labels = torch.randint(0, 5, (8, 6), generator=generator)
    labels[:3] = IGNORED
    labels[3, 1:] = IGNORED
    return module, {"words": words, "labels": labels}


def planned(
    mesh: dict[str, int] = MESH,
    *,
    hints: dict[str, Any] | None = None,
    dynamic: dict[str, Any] | None = None,
    **pipeline: Any,
) -> autoshard.PipelinePlan:
    module, batch = tagger()
    found = autoshard.plan(
        module,
        mesh,
        (),
        batch,
        cluster=fast_links(),
        hints=hints,
        dynamic=dynamic,
        pipeline=autoshard.Pipeline(**pipeline),
    )
    assert isinstance(found, autoshard.PipelinePlan)
    return found


def _train_with_regions(plan: PipelinePlan) -> dict[str, torch.Tensor]:
    module, inputs = tied()
    return train_pipeline(pipeline_of(module, inputs, plan), inputs)


def test_stages_run_regions_again(two: Workers) -> None:
    module, inputs = tied()
    names = [name for name, part in module.named_children() if not isinstance(part, nn.Embedding)]
    hints = {name: autoshard.recompute() for name in names}
    options = autoshard.Pipeline(schedule="1F1B", microbatches=4)
    plan = autoshard.plan(module, {"pp": 2}, (), inputs, cluster=fast_links(), hints=hints, pipeline=options)
    assert isinstance(plan, PipelinePlan)
    assert any(stage.recomputed for stage in plan.stages)
    assert all(stage.hints == dict.fromkeys(names, "recompute()") for stage in plan.stages)
    assert_equal(two.run(_train_with_regions, plan), train_alone(module, inputs, 1))


def test_an_axis_named_pp_is_a_pipeline() -> None:
    plan = planned(schedule="1F1B", microbatches=4)
    assert (plan.axis, plan.schedule.name, plan.microbatches, plan.virtual) == ("pp", "1F1B", 4, 1)
    assert planned(mesh={"stage": 2}, axis="stage", schedule="GPipe").axis == "stage"


def test_what_is_said_of_a_pipeline_that_there_is_not() -> None:
    module, batch = tagger()
    with pytest.raises(PlanError, match="schedule='1F1B' is an option of a pipeline, and the mesh x=2 has none"):
        autoshard.plan(module, {"x": 2}, (), batch, pipeline=autoshard.Pipeline(schedule="1F1B"))
    with pytest.raises(PlanError, match=r"batch_dims=\{'words': 1\} is an option of a pipeline"):
        autoshard.plan(module, {"x": 2}, (), batch, pipeline=autoshard.Pipeline(batch_dims={"words": 1}))
    with pytest.raises(
        MeshError, match=r"pipeline axis 'pq': the mesh pp=2, dp=2 has no such axis\. Close ones are pp, dp"
    ):
        autoshard.plan(module, MESH, (), batch, pipeline=autoshard.Pipeline(axis="pq"))
    with pytest.raises(InputError, match="pass an example call with a whole batch"):
        autoshard.plan(module, MESH)


def test_bad_input_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"no schedule '1F2B'\. Close ones are 1F1B"):
        planned(schedule="1F2B")
    with pytest.raises(PipelineError, match="a batch of 8 can't be divided into 3 microbatches"):
        planned(microbatches=3)
    with pytest.raises(PlanError, match="a pipeline can not have the option dynamic"):
        planned(dynamic={"words": {0: "batch"}, "labels": {0: "batch"}})
    with pytest.raises(HintError, match="nowhere"):
        planned(hints={"nowhere.weight": {"dp": Shard(0)}})
    with pytest.raises(InputError, match="batch_dims names 'nothing', which is no tensor of the call: words, labels"):
        planned(batch_dims={"nothing": 1})


@pytest.fixture(scope="module")
def alone() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch on one device."""
    module, batch = tagger()
    loss = module(**batch)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def test_the_whole_batch_weighs_what_counts(four: Workers, alone: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    loss, gradients = alone
    found: dict[str, torch.Tensor] = {}
    for trained, evaluated, mine in four.run(stepped):
        for value in (trained, evaluated):
            torch.testing.assert_close(value, loss, rtol=TOLERANCE, atol=0)
        found |= mine
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=TOLERANCE, atol=1e-14)


def stepped() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a step and of an evaluation, and the whole gradients of this rank's parameters."""
    module, batch = tagger()
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    pipeline = autoshard.parallelize(
        module,
        mesh,
        (),
        batch,
        cluster=fast_links(),
        search=autoshard.Search(time_limit=20.0),
        pipeline=autoshard.Pipeline(microbatches=4, virtual=2),
    )
    assert isinstance(pipeline, autoshard.PipelineModule)
    loss = pipeline.train_step(**batch)
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    whole = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    evaluated = pipeline.eval_step(**batch).loss
    assert evaluated is not None
    return loss, evaluated, whole


def test_the_mesh_of_a_job_is_found(two: Workers, alone: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    for loss in two.run(on_any_mesh):
        torch.testing.assert_close(loss, alone[0], rtol=TOLERANCE, atol=0)


def on_any_mesh() -> torch.Tensor:
    module, batch = tagger()
    found = autoshard.parallelize(
        module, "auto", (), batch, cluster=fast_links(), search=autoshard.Search(effort="fast", time_limit=30.0)
    )
    if isinstance(found, autoshard.PipelineModule):
        return found.train_step(**batch)
    loss = found(**batch)
    loss.backward()
    return loss.detach()
