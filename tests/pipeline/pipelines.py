"""Pipelines of the shared models: plans made by hand, and training on processes beside training on one device."""

from __future__ import annotations

import fnmatch
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

from autoshard.options import Hints
from autoshard.options.options import collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import StageModule, cut
from autoshard.pipeline.plan.pipeline_devices import PipelineMesh, forward_fingerprint
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.planned_stage import input_names
from autoshard.pipeline.run.pipeline_module import PipelineModule, build_pipeline_module
from autoshard.pipeline.run.stage_planner import StageStepPlanner
from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.reshard.reductions import DeferredReduction
from autoshard.runtime.arguments import check_examples
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.pipeline.chain import balance_stages
from tests.targets import target
from tests.training import LEARNING_RATE, MOMENTUM, STEPS, fast_links, loss_of, outputs_of

Sizes = Mapping[str, int]

MAX_NORM = 0.5
"""Gradients are clipped to this in every step, which is less than they have."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model(name: str, batch: int = 4, **options: Any) -> models.Model:
    """One of the shared models, small, in double precision."""
    with Float64Mode():
        return models.ZOO[name](dtype=torch.float64, batch=batch, **options)


def plan_stage(stage: StageModule, mesh: Sizes, **options: Any) -> ShardingPlan:
    """The plan of a stage as that of a module by itself; options as for `autoshard.plan`."""
    shape = MeshShape.of(mesh)
    planner = StageStepPlanner(stage, shape, Target.of(collect_options("plan", options), None).on_mesh(shape))
    return planner.plan(planner.capture())


def plan_by_hand(
    module: nn.Module,
    inputs: Mapping[str, Any],
    mesh: Sizes,
    order: Schedule,
    stage: Callable[[str], int] | None = None,
    shards: bool = False,
    hints: Hints | None = None,
    reduced: DeferredReduction = "step",
) -> PipelinePlan:
    """Equally many operators per stage, or as `stage` has it, each as the planner shards it under `hints`.

    Tied parameters lie as on their first stage. Where `shards` cross, a stage takes what it receives as it comes out.
    """
    shape = MeshShape.of(mesh)
    rest = {one.name: one.size for one in PipelineMesh.of(shape, "pp").stage(0).axes}
    with Float64Mode():
        part = BatchCall(module, (), inputs).split(order.microbatches)[0]
        graph = capture_microbatch(module, part.args, part.kwargs)
        stage_of = (
            {node.name: stage(node.name) for node in graph.operators} if stage else balance_stages(graph, order.stages)
        )
        plans: list[Any] = []
        for part in cut(graph, stage_of, order.stages):
            tied = {name: plans[held[0]].placements[name] for name, held in part.shared.items() if held[0] < part.index}
            held = [name for name, _ in part.module.named_parameters()]
            pins = {glob: hint for glob, hint in (hints or {}).items() if fnmatch.filter(held, glob)} | tied
            asked: dict[str, Any] = {}
            if shards and part.passed:
                asked["output_placements"] = "planned"
            if shards and part.received:
                whole = (Replicate(),) * len(rest)
                taken = [plans[-1].output_placements[f"output[{place}]"] for place in range(len(part.received))]
                names = input_names(part)
                placed = dict(zip(names, [*taken, *[whole] * (len(names) - len(taken))], strict=True))
                asked |= {"inputs": "local", "input_placements": placed}
            plans.append(plan_stage(part, rest, cluster=fast_links(), hints=pins, **asked))
    return PipelinePlan(
        mesh=shape,
        axis="pp",
        stage_of=stage_of,
        recomputed={},
        schedule=order,
        stages=tuple(plans),
        reduced=(reduced,) * order.stages,
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
    with Float64Mode():
        call = BatchCall(module, *check_examples((), inputs))
        return build_pipeline_module(call, mesh, plan, target("cpu", time_limit=10.0))


def train_model_alone(name: str, parts: int, **options: Any) -> dict[str, torch.Tensor]:
    """What `train_alone` finds of a shared model."""
    return train_alone(*model(name, **options), parts)


def train_alone(module: nn.Module, inputs: Mapping[str, Any], parts: int) -> dict[str, torch.Tensor]:
    """Losses, norms, last gradients, and parameters, on one device; gradients of `parts` microbatches added up."""
    optimizer = optimizer_of(module)
    found: dict[str, torch.Tensor] = {}
    with Float64Mode():
        for step in range(STEPS):
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for part in BatchCall(module, (), inputs).split(parts):
                loss = loss_of(outputs_of(module(*part.args, **part.kwargs))) / parts
                loss.backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
            optimizer.step()
            found |= {f"step {step}": total, f"norm {step}": norm}
    return found | held_by(module)


def train_pipeline(pipeline: PipelineModule, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same of a pipeline: losses, norms, and what this rank holds, whole."""
    optimizer = optimizer_of(pipeline)
    found: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        found |= train_once(pipeline, optimizer, inputs, step)
    return found | held_by(pipeline)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum; of parameters in a group, since there may be none, which torch takes only so."""
    return torch.optim.SGD([{"params": list(module.parameters())}], lr=LEARNING_RATE, momentum=MOMENTUM)


def train_once(
    pipeline: PipelineModule, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any], step: int
) -> dict[str, torch.Tensor]:
    """One step of a pipeline, gradients clipped: its loss and their norm."""
    with default_float64():
        optimizer.zero_grad()
        loss = pipeline.train_step(**inputs)
        norm = pipeline.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    return {f"step {step}": loss, f"norm {step}": norm}


def held_by(module: nn.Module) -> dict[str, torch.Tensor]:
    """What is held here, whole: parameters, buffers, and gradients."""
    found = dict(module.state_dict())
    found |= {
        f"gradient {name}": one.grad
        for name, one in module.named_parameters(remove_duplicate=False)
        if one.grad is not None
    }
    return {
        key: gather_full_tensor(value) if isinstance(value, DTensor) else value.detach() for key, value in found.items()
    }


def train_on_pipeline(name: str, plan: PipelinePlan, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What `trained` finds on this process."""
    module, inputs = model(name, **options)
    return train_pipeline(pipeline_of(module, inputs, plan), inputs)


def state_of(
    module: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = FLAT
) -> dict[str, Any]:
    """Model and optimizer, as they are saved and loaded."""
    return {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=options),
    }


def resume(
    module: nn.Module, optimizer: torch.optim.Optimizer, folder: str, options: StateDictOptions | None = FLAT
) -> None:
    """Load both as they were saved."""
    state = state_of(module, optimizer, options)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)


def assert_equal(held: list[dict[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> None:
    """All ranks together hold what one device has; each has losses and norms."""
    assert set().union(*held) == expected.keys()
    assert expected["norm 0"] > MAX_NORM
    for found in held:
        assert {f"{kind} {step}" for kind in ("step", "norm") for step in range(STEPS)} <= found.keys()
        for key, value in found.items():
            torch.testing.assert_close(
                value, expected[key], rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}"
            )
