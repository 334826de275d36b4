"""From what a user asked of a mesh with a pipeline axis to its plan, and to the module that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import InputError, MeshError, PlanError
from autoshard.names import suggestion
from autoshard.options import Pipeline
from autoshard.options.target import Target
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.run.pipeline_module import PipelineModule, build_pipeline_module
from autoshard.planner.progress_line import show_progress
from autoshard.runtime.rank_agreement import check_ranks_agree, from_first_rank
from autoshard.specs.axes import MeshShape

PIPELINE_AXIS = "pp"
"""Name of the mesh axis that is a pipeline where nothing else is said."""


def resolve_pipeline(mesh: MeshShape, pipeline: Pipeline) -> Pipeline | None:
    """Return the options of a pipeline with the name of its axis; None for a mesh without a pipeline.

    Raises:
        MeshError: no mesh axis has the name of the axis.
        PlanError: there are options of a pipeline, and the mesh has none.
    """
    axis = PIPELINE_AXIS if pipeline.axis is None and PIPELINE_AXIS in mesh.names else pipeline.axis
    if axis is not None:
        if axis not in mesh.names:
            raise MeshError(
                f"pipeline axis {axis!r}: the mesh {mesh} has no such axis. {suggestion(axis, list(mesh.names))}"
            )
        return replace(pipeline, axis=axis)
    for name, value in pipeline.requests.items():
        raise PlanError(
            f"{name}={value!r} is an option of a pipeline, and the mesh {mesh} has none: name the axis along which "
            f"stages lie {PIPELINE_AXIS!r}, or pass pipeline=autoshard.Pipeline(axis=...)."
        )
    return None


def plan_with_options(
    module: nn.Module,
    mesh: MeshShape,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    pipeline: Pipeline,
    target: Target,
) -> PipelinePlan:
    """The plan that `plan_pipeline` makes.

    Raises:
        InputError: there is no example call.
        AutoshardError: as for `plan_pipeline`.
    """
    _check_example(args, kwargs)
    assert pipeline.axis is not None, "of a pipeline that was resolved"
    with show_progress(target.options.search.verbose, f"planning of {type(module).__name__} as a pipeline"):
        return plan_pipeline(
            module,
            mesh,
            args,
            kwargs,
            axis=pipeline.axis,
            schedule=pipeline.schedule,
            microbatches=pipeline.microbatches,
            virtual=pipeline.virtual,
            target=target,
            batch_dims=pipeline.batch_dims,
        )


def parallelize_pipeline(
    module: nn.Module,
    device_mesh: DeviceMesh,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    pipeline: Pipeline,
    target: Target,
    *,
    plan: object = None,
) -> PipelineModule:
    """What is left of a module on this rank of a pipeline, by the plan given, or else by the first rank's.

    Raises:
        InputError: there is no example call.
        PlanError: `plan` is none of a pipeline.
        AutoshardError: as for `plan_pipeline` and `pipelined`; nothing was changed then.
    """
    check_ranks_agree(
        device_mesh,
        {
            "whether an example call is given": "one" if args or kwargs else "none",
            "the plan that is given": "none" if plan is None else type(plan).__name__,
            "the options of the pipeline": str(pipeline),
        },
        "All ranks call autoshard.parallelize alike.",
    )
    _check_example(args, kwargs)
    if plan is None:
        mesh = MeshShape.of(device_mesh)
        text = from_first_rank(
            device_mesh, lambda: plan_with_options(module, mesh, args, kwargs, pipeline, target).to_json()
        )
        plan = PipelinePlan.from_json(text)
    if not isinstance(plan, PipelinePlan) or plan.axis != pipeline.axis:
        raise PlanError(
            f"the mesh has the pipeline axis {pipeline.axis!r}, and the plan is "
            f"{f'of the pipeline axis {plan.axis!r}' if isinstance(plan, PipelinePlan) else type(plan).__name__}: make "
            "one for this mesh by autoshard.plan."
        )
    return build_pipeline_module(
        module,
        device_mesh,
        args,
        kwargs,
        plan=plan,
        target=target,
        batch_dims=pipeline.batch_dims,
    )


def _check_example(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not args and not kwargs:
        raise InputError(
            "a pipeline is planned before its first step: pass an example call with a whole batch, by example_args or "
            "example_kwargs."
        )
