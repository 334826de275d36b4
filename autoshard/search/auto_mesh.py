"""`auto_mesh`: the best mesh of all ranks of a running job, found by the first rank."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import InputError, MeshError
from autoshard.options import Pipeline
from autoshard.options.target import Target
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.rank_agreement import from_first_rank
from autoshard.search.search import SearchOptions, run_search


class AgreedMesh(NamedTuple):
    """The mesh that all ranks agree on.

    Attributes:
        device_mesh: the mesh of all ranks of the job.
        pipeline: the axis of the pipeline, and the dims of inputs that count samples; None without a pipeline.
        plan: for this mesh.
    """

    device_mesh: DeviceMesh
    pipeline: Pipeline | None
    plan: ShardingPlan | PipelinePlan


def auto_mesh(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Target,
    *,
    device_type: str | None = None,
    pipelines: bool | str = True,
) -> AgreedMesh:
    """Make the best mesh of all ranks of a job. The first rank searches, the others wait for it.

    Args:
        module, args, kwargs: the model and an example call, the same on every rank.
        target: of planning; its time limit is also that of the search.
        device_type: such as `"cuda"`; by default `"cpu"` where the process group is gloo's, else the accelerator's.
        pipelines: as for `search`.

    Raises:
        MeshError: there is no process group.
        InputError: there is no example call.
        PlanError, BudgetError, CaptureError, HintError: as for `search`, on every rank.
    """
    if not dist.is_initialized():
        raise MeshError(
            'mesh="auto" lays out the ranks of a running job: call torch.distributed.init_process_group and start the '
            "program with torchrun. To decide without one, call autoshard.search."
        )
    if not args and not kwargs:
        raise InputError('mesh="auto" needs an example call to plan for: pass example_args or example_kwargs.')
    request = SearchOptions("mini-time", dist.get_world_size(), pipelines)
    kind = device_type or device_type_of_job()
    all_ranks = init_device_mesh(kind, (request.devices,), mesh_dim_names=("devices",))

    def decide() -> str:
        result = run_search(module, args, kwargs, request, target)
        axes = dict(zip(result.mesh.names, result.mesh.sizes, strict=True))
        return json.dumps({"mesh": axes, "pipeline_axis": result.pipeline_axis, "plan": result.plan.to_json()})

    decision = json.loads(from_first_rank(all_ranks, decide))
    axes, axis = decision["mesh"], decision["pipeline_axis"]
    device_mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if axis is None:
        return AgreedMesh(device_mesh, None, ShardingPlan.from_json(decision["plan"]))
    # The plan has the schedule and the microbatches.
    pipeline = Pipeline(axis=axis, batch_dims=target.options.pipeline.batch_dims)
    return AgreedMesh(device_mesh, pipeline, PipelinePlan.from_json(decision["plan"]))


def device_type_of_job() -> str:
    """Return the type of the devices of the ranks of the job."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if dist.get_backend() == "gloo" or accelerator is None else accelerator.type
