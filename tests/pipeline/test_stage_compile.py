"""Compiled stages of a pipeline: what one device finds."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import autoshard
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from autoshard.runtime.shards import gather_full_tensor
from tests.pipeline.pipelines import model, plan_by_hand
from tests.workers import Workers

MESH = {"pp": 2, "dp": 2}
BATCH = 24


def compiled(plan: PipelinePlan) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """How many graphs this rank compiles for a step, the loss, and the whole gradients of its parameters."""
    module, inputs = model("mlp", batch=BATCH)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    pipeline = autoshard.parallelize(module, mesh, (), inputs, plan=plan, compile=True)
    counters.clear()
    loss = pipeline.train_step(**inputs)
    gradients = {name: gather_full_tensor(parameter.grad) for name, parameter in pipeline.named_parameters()}
    return counters["stats"]["unique_graphs"], loss, gradients


def check(workers: Workers, plan: PipelinePlan) -> list[int]:
    """Compares a compiled step with one device's; how many graphs each rank compiled."""
    alone, inputs = model("mlp", batch=BATCH)
    loss = alone(**inputs)
    loss.backward()
    found = workers.run(compiled, plan)
    for _, one, gradients in found:
        torch.testing.assert_close(one, loss.detach(), rtol=1e-9, atol=0.0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone.get_parameter(name).grad, rtol=1e-9, atol=1e-12, msg=name)
    assert set().union(*(gradients for *_, gradients in found)) == dict(alone.named_parameters()).keys()
    return [graphs for graphs, *_ in found]


@pytest.mark.slow
def test_stages(four: Workers) -> None:
    """The first stage has all parameters, whose gradients are reduced at the end of a step: a graph of its own."""
    plan = plan_by_hand(*model("mlp", batch=BATCH), MESH, schedule("1F1B", 2, 2), hints={"*": Replicate()})
    assert check(four, plan) == [3, 3, 2, 2], "forward, backward, and the last backward"
