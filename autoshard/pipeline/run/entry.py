"""The entry to pipelines from `plan` and `parallelize`: a mesh with a pipeline axis, its plan, and its module."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import InputError, MeshError, PlanError
from autoshard.names import suggestion
from autoshard.options import Pipeline
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.captures import PipelineCaptures
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.run.pipeline_module import PipelineModule, build_pipeline_module
from autoshard.planner.progress_line import show_progress
from autoshard.runtime.rank_agreement import check_ranks_agree, from_first_rank
from autoshard.specs.axes import MeshShape

PIPELINE_AXIS = "pp"
"""The default name of the mesh axis along which stages lie."""


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


def plan_with_options(call: BatchCall, mesh: MeshShape, pipeline: Pipeline, target: Target) -> PipelinePlan:
    """Return the plan of `plan_pipeline` for a resolved pipeline.

    Raises:
        InputError: there is no example call.
        AutoshardError: as for `plan_pipeline`.
    """
    _check_example(call)
    with show_progress(target.options.search.verbose, f"planning of {type(call.module).__name__} as a pipeline"):
        return plan_pipeline(PipelineCaptures(call, target), mesh, pipeline, target)


def parallelize_pipeline(
    call: BatchCall, device_mesh: DeviceMesh, pipeline: Pipeline, target: Target, *, plan: object = None
) -> PipelineModule:
    """Return this rank's part of a module, by the given plan or else by the plan of the first rank.

    Raises:
        InputError: there is no example call.
        PlanError: `plan` is not a pipeline's plan.
        AutoshardError: as for `plan_pipeline` and `build_pipeline_module`; nothing was changed then.
    """
    check_ranks_agree(
        device_mesh,
        {
            "whether an example call is given": "one" if call.args or call.kwargs else "none",
            "the plan that is given": "none" if plan is None else type(plan).__name__,
            "the options of the pipeline": str(pipeline),
        },
        "All ranks call autoshard.parallelize alike.",
    )
    _check_example(call)
    if plan is None:
        mesh = MeshShape.of(device_mesh)
        text = from_first_rank(device_mesh, lambda: plan_with_options(call, mesh, pipeline, target).to_json())
        plan = PipelinePlan.from_json(text)
    if not isinstance(plan, PipelinePlan) or plan.axis != pipeline.axis:
        raise PlanError(
            f"the mesh has the pipeline axis {pipeline.axis!r}, and the plan is "
            f"{f'of the pipeline axis {plan.axis!r}' if isinstance(plan, PipelinePlan) else type(plan).__name__}: make "
            "one for this mesh by autoshard.plan."
        )
    return build_pipeline_module(call, device_mesh, plan, target)


def _check_example(call: BatchCall) -> None:
    if not call.args and not call.kwargs:
        raise InputError(
            "a pipeline is planned before its first step: pass an example call with a whole batch, by example_args or "
            "example_kwargs."
        )
