"""Pipelines through the front door: `plan` and `parallelize` of a mesh with a pipeline axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.errors import HintError, InputError, MeshError, PipelineError, PlanError
from tests.models.common import fixed_seed
from tests.training import TOLERANCE, fast_links
from tests.workers import Workers

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
