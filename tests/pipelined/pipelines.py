"""Pipelines of the shared models: plans made by hand, and training on processes beside training on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import autoshard
from autoshard.arguments import check_examples
from autoshard.partition.shards import whole
from autoshard.pipeline.actions import Schedule
from autoshard.pipeline.costs import StageCosts
from autoshard.pipeline.cut import cut
from autoshard.pipeline.exported import exported
from autoshard.pipeline.microbatch import microbatches
from autoshard.pipelined.module import PipelineModule, pipelined
from autoshard.pipelined.places import forward_fingerprint
from autoshard.pipelined.plan import PipelinePlan
from autoshard.specs.axes import MeshShape
from tests import models
from tests.options import options
from tests.pipeline.chain import balanced
from tests.training import LEARNING_RATE, MOMENTUM, STEPS, fast_links, loss_of, outputs_of
from tests.widen import Widened, doubles

Sizes = Mapping[str, int]

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # every rank has optimizer state of its own parameters


def model(name: str, **options: Any) -> models.Model:
    """One of the shared models, small, in double precision."""
    with Widened():
        return models.ZOO[name](dtype=torch.float64, batch=4, **options)


def plan_by_hand(
    module: nn.Module,
    inputs: Mapping[str, Any],
    mesh: Sizes,
    order: Schedule,
    stage: Callable[[str], int] | None = None,
    shards: bool = False,
) -> PipelinePlan:
    """Equally many operators per stage, or as `stage` has it, each as the planner shards it.

    Tied parameters lie as on their first stage. Where `shards` cross, a stage takes what it receives as it comes out.
    """
    shape = MeshShape.of(mesh)
    rest = {name: size for name, size in mesh.items() if name != "pp"} or {"x": 1}
    with Widened():
        graph = exported(module, *microbatches(module, (), inputs, order.microbatches)[0])
        stage_of = {node.name: stage(node.name) for node in graph.operators} if stage else balanced(graph, order.stages)
        plans: list[Any] = []
        for part in cut(graph, stage_of, order.stages):
            pins = {name: plans[held[0]].placements[name] for name, held in part.shared.items() if held[0] < part.index}
            asked: dict[str, Any] = {}
            if shards and part.passed:
                asked["output_placements"] = "planned"
            if shards and part.received:
                whole = (Replicate(),) * len(rest)
                taken = [plans[-1].output_placements[f"output[{place}]"] for place in range(len(part.received))]
                names = [node.target for node in part.module.graph.find_nodes(op="placeholder")]
                placed = dict(zip(names, [*taken, *[whole] * (len(names) - len(taken))], strict=True))
                asked |= {"inputs": "local", "input_placements": placed}
            plans.append(autoshard.plan(part.module, rest, *part.example, cluster=fast_links(), hints=pins, **asked))
    return PipelinePlan(
        mesh=shape,
        axis="pp",
        stage_of=stage_of,
        recomputed={},
        schedule=order,
        stages=tuple(plans),
        costs=(StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0),)
        * order.stages,
        fingerprint=forward_fingerprint(graph),
    )


def pipeline_of(
    module: nn.Module, inputs: Mapping[str, Any], plan: PipelinePlan, sizes: Sizes | None = None
) -> PipelineModule:
    """The module on the processes, on the plan's mesh or one of these sizes."""
    shape = plan.mesh if sizes is None else MeshShape.of(sizes)
    mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    with Widened():
        return pipelined(module, mesh, *check_examples((), inputs), plan=plan, options=options("cpu", time_limit=10.0))


def trained_alone(name: str, parts: int, **options: Any) -> dict[str, torch.Tensor]:
    """What `train_alone` finds of a shared model."""
    return train_alone(*model(name, **options), parts)


def train_alone(module: nn.Module, inputs: Mapping[str, Any], parts: int) -> dict[str, torch.Tensor]:
    """Losses and parameters of training on one device, gradients of `parts` microbatches added up."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    found: dict[str, torch.Tensor] = {}
    with Widened():
        for step in range(STEPS):
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for args, kwargs in microbatches(module, (), inputs, parts):
                loss = loss_of(outputs_of(module(*args, **kwargs))) / parts
                loss.backward()
                total += loss.detach()
            optimizer.step()
            found[f"step {step}"] = total
    return found | {key: value.detach() for key, value in module.state_dict().items()}


def trained(pipeline: PipelineModule, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same of a pipeline: losses, and what this rank holds, whole."""
    group = {"params": list(pipeline.parameters())}  # there may be none, which torch takes only so
    optimizer = torch.optim.SGD([group], lr=LEARNING_RATE, momentum=MOMENTUM)
    found: dict[str, torch.Tensor] = {}
    with doubles():
        for step in range(STEPS):
            optimizer.zero_grad()
            found[f"step {step}"] = pipeline.train_step(**inputs)
            optimizer.step()
    return found | held_by(pipeline)


def held_by(pipeline: PipelineModule) -> dict[str, torch.Tensor]:
    """What this rank holds, whole."""
    held = pipeline.state_dict()
    return {key: whole(value) if isinstance(value, DTensor) else value for key, value in held.items()}


def on_pipeline(name: str, plan: PipelinePlan, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What `trained` finds on this process."""
    module, inputs = model(name, **options)
    return trained(pipeline_of(module, inputs, plan), inputs)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer, as they are saved and loaded."""
    return {
        "model": get_model_state_dict(module),
        "optimizer": autoshard.checkpointable(get_optimizer_state_dict(module, optimizer, options=FLAT)),
    }


def resume(module: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load both as they were saved."""
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=FLAT)


def assert_equal(held: list[dict[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> None:
    """All ranks together hold what one device has; each has the losses."""
    names = set().union(*held)
    assert names == expected.keys()
    for found in held:
        assert {f"step {step}" for step in range(STEPS)} <= found.keys()
        for key, value in found.items():
            torch.testing.assert_close(
                value, expected[key], rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}"
            )
