"""`search`: the best mesh for a number of devices, and its plan; `auto_mesh`: the same for the ranks of a job."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.capture._torch import pytree
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint_graph import JointGraph
from autoshard.errors import AutoshardError, BudgetError, InputError, MeshError, PlanError, warn_caller
from autoshard.operators.large_losses.loss_in_pieces import has_large_logits
from autoshard.options import SEARCH_OPTIONS, OptionKeywords, Pipeline, SearchOption, collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.plan.pipeline_replanner import PipelineReplanner
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from autoshard.planner.planning import capture_with_progress
from autoshard.planner.replanner import Replanner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.arguments import check_examples, check_module
from autoshard.runtime.rank_agreement import from_first_rank
from autoshard.search.mesh_planner import Request
from autoshard.search.mesh_search import MeshSearch
from autoshard.search.result import MeshCandidate, SearchResult
from autoshard.search.shapes import PipelineAxis

_PIPELINES: dict[bool | str, PipelineAxis] = {False: "none", True: "outer", "outer": "outer", "inner": "inner"}


def search(
    module: nn.Module,
    devices: int,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    option: SearchOption = "mini-time",
    pipelines: bool | str = True,
    **keywords: Unpack[OptionKeywords],
) -> SearchResult:
    """Find the best mesh for `module` on a number of devices, and its plan.

    The search needs neither a process group nor the devices. Its candidates are meshes of up to three axes, with and
    without a pipeline axis, `"pp"`. Those that cannot fit, or cannot be faster than the best so far, are dropped by
    bounds; the others are planned, quickly at first, and the best at full effort.

    Args:
        module, example_args, example_kwargs: as for `autoshard.plan`.
        devices: the number of devices; ranks fill one host after the other.
        option: `"mini-time"`: the shortest step on these devices; `"mini-parallelism"`: the fewest devices that the
            model fits on, among the divisors of `devices`, and the shortest step on these; `"profiling"`: the shortest
            step for each divisor (TensorOpt 4.1).
        pipelines: which meshes with a pipeline are candidates. True or `"outer"`: the pipeline axis is the outermost
            one, with stages of whole hosts or parts of one host; `"inner"`: the innermost one, so that neighbouring
            stages share a host; False: none.
        **keywords: the fields of `autoshard.Options`, without those of inputs and local outputs, `dynamic`, `shares`
            and `compile`. With `output_placements="planned"`, no mesh has a pipeline; `"auto"` leaves outputs whole
            there. Three have a special meaning here. `memory_limit`: by default the memory of the smallest device, and
            in a pipeline that of each device. `hints`: axes other than `"pp"` are called `"x"`, `"y"` and `"z"`, the
            last one over the nearest neighbours; a mesh that a hint does not fit is dropped. `search.time_limit`:
            afterwards the best plan so far is returned with a note and a warning.

    Returns:
        The result: `result.mesh`, `result.pipeline_axis`, `result.plan`; it prints as a table of all meshes.

    Raises:
        MeshError: `devices` is not a whole number from 1 up.
        PlanError: an option is not valid; the message names it. Or no mesh could be planned in time.
        BudgetError: no mesh fits; the message names the smallest need.
        CaptureError, HintError, InputError: as for `autoshard.plan`.
        KeyboardInterrupt: Ctrl-C before the first plan was found; later, the best plan so far is returned, with a
            warning.

    Source: Rhino 3 (mesh configurations, with and without pipelines), TensorOpt 4.1 (the options).
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    # The option `pipelines` used to be called `pipeline`.
    earlier = keywords.get("pipeline")
    if isinstance(earlier, (bool, str)):
        del keywords["pipeline"]
        pipelines = earlier
        warn_caller(f"write pipelines={pipelines!r}: pipeline is an autoshard.Pipeline now.", DeprecationWarning)
    options = collect_options("search", keywords)
    if isinstance(options.output_placements, Mapping):
        raise PlanError(
            f"output_placements={options.output_placements!r}: the axes are not known before the search. Pass "
            '"planned", "auto" or None.'
        )
    call = BatchCall(module, args, kwargs, options.pipeline.batch_dims)
    return _run_search(call, SearchOptions(option, devices, pipelines), Target.of(options, None))


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of `search` that are not planning options.

    Raises:
        MeshError, PlanError: an option is not valid.
    """

    option: SearchOption
    devices: int
    pipelines: bool | str = True

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or not isinstance(self.devices, int) or self.devices < 1:
            raise MeshError(f"devices={self.devices!r}: pass the number of devices, a whole number from 1 up.")
        if self.option not in SEARCH_OPTIONS:
            raise PlanError(f"option={self.option!r} is unknown: choose one of {', '.join(SEARCH_OPTIONS)}.")
        if self.pipelines not in _PIPELINES:
            raise PlanError(
                f'pipelines={self.pipelines!r}: choose True or "outer", "inner", or False for no pipelines.'
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices to search for, the fewest first."""
        if self.option == "mini-time":
            return (self.devices,)
        return tuple(count for count in range(1, self.devices + 1) if self.devices % count == 0)


def _run_search(call: BatchCall, options: SearchOptions, target: Target) -> SearchResult:
    """Run a search with checked arguments."""
    start = time.perf_counter()
    graph, capture_seconds = _capture(call, target, options.devices)
    # Only a limit of the user restricts larger devices of a pipeline.
    own_memory = target.settings.memory_limit is None
    limit = target.settings.memory_limit or target.cluster.device.memory
    target = replace(target, settings=replace(target.settings, memory_limit=limit))
    captures = PipelineCaptures(call, target)
    request = Request(
        module=call.module,
        graph=graph,
        capture_seconds=capture_seconds,
        target=target,
        pipelines=_PIPELINES[options.pipelines],
        batch=_batch_size(call),
        plan_pipeline=functools.partial(plan_pipeline, captures),
        own_memory=own_memory,
    )
    fewer = {count: _with_graph_of(request, call, count) for count in options.counts if count < options.devices}
    requests = {**fewer, options.devices: request}
    candidates, notes = _search_counts(requests, options)
    candidates = tuple(_remembering(candidate, requests[candidate.devices], captures) for candidate in candidates)
    return SearchResult(
        option=options.option,
        cluster=target.cluster.name,
        memory_limit=limit,
        candidates=candidates,
        notes=notes,
        seconds=time.perf_counter() - start,
    )


def _capture(call: BatchCall, target: Target, devices: int) -> tuple[JointGraph, float]:
    """Return the captured step for a number of devices, and the seconds of its capture."""
    return capture_with_progress(
        *(BoundCall.of(call.module, call.args, call.kwargs, torch.is_grad_enabled()), target),
        devices=devices,
        dynamic=False,
        by_layers=True,
    )


def _with_graph_of(request: Request, call: BatchCall, devices: int) -> Request:
    """Return the request for fewer devices. Each may hold more logits, so the graph may differ."""
    if not has_large_logits(request.graph.graph, devices):
        return request
    graph, seconds = _capture(call, request.target, devices)
    return replace(request, graph=graph, capture_seconds=seconds)


def _search_counts(
    requests: Mapping[int, Request], options: SearchOptions
) -> tuple[tuple[MeshCandidate, ...], tuple[str, ...]]:
    """Return the meshes of all numbers of devices, and the notes; `requests` has the request for each number."""
    candidates: list[MeshCandidate] = []
    notes: list[str] = []
    failures: list[AutoshardError] = []
    counts = options.counts
    deadline = time.monotonic() + requests[counts[0]].target.settings.time_limit
    for index, count in enumerate(counts):
        # Time that one number of devices does not use is available to later ones.
        left = deadline - time.monotonic()
        mesh_search = MeshSearch(requests[count], count, time.monotonic() + left / (len(counts) - index))
        try:
            mesh_search.run()
        except (BudgetError, PlanError) as error:
            failures.append(error)
            notes.append(str(error))
        candidates += mesh_search.candidates()
        notes += mesh_search.notes
        if mesh_search.interrupted or (mesh_search.best is not None and options.option == "mini-parallelism"):
            break
    # The last failure is that of the most devices, on which a model fits best.
    if all(candidate.plan is None for candidate in candidates):
        raise failures[-1]
    return tuple(candidates), tuple(notes)


def _remembering(candidate: MeshCandidate, request: Request, captures: PipelineCaptures) -> MeshCandidate:
    """Return a candidate whose plan, if any, answers `why_not`."""
    plan, target = candidate.plan, request.target
    if isinstance(plan, PipelinePlan):
        if request.own_memory:
            target = replace(target, settings=replace(target.settings, memory_limit=None))
        target = target.in_pipeline
        target = replace(target, shares="auto" if plan.in_shares else None)
        pipeline = replace(request.pipeline, axis=plan.axis)
        return replace(candidate, plan=PipelineReplanner.of(captures, plan.mesh, pipeline, target).remember(plan))
    if plan is None:
        return candidate
    replanner = Replanner.of(request.module, request.graph, request.capture_seconds, plan.mesh, target)
    return replace(candidate, plan=replanner.remember(plan))


def _batch_size(call: BatchCall) -> int:
    """Return the samples of a call that can be split into microbatches: by default dim 0 of its first tensor."""
    if call.batch_dims is not None:
        return call.samples
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)


class AgreedMesh(NamedTuple):
    """The mesh that all ranks agree on.

    Attributes:
        device_mesh: the mesh of all ranks of the job.
        pipeline: the pipeline axis, and the dims of inputs that count samples; None without a pipeline.
        plan: the plan for this mesh.
    """

    device_mesh: DeviceMesh
    pipeline: Pipeline | None
    plan: ShardingPlan | PipelinePlan


def auto_mesh(call: BatchCall, target: Target, *, pipelines: bool | str = True) -> AgreedMesh:
    """Make the best mesh of all ranks of a job: the first rank searches, and the others wait for it.

    Args:
        call: an example call of the model, equal on every rank.
        target: the target of planning; its time limit is also that of the search.
        pipelines: as for `search`.

    Raises:
        MeshError: there is no process group, or inputs or outputs are local.
        InputError: there is no example call.
        PlanError, BudgetError, CaptureError, HintError: as for `search`, on every rank.
    """
    if not dist.is_initialized():
        raise MeshError(
            'mesh="auto" lays out the ranks of a running job: call torch.distributed.init_process_group and start the '
            "program with torchrun. To decide without one, call autoshard.search."
        )
    if target.inputs == "local" or target.outputs == "local":
        raise MeshError(
            'mesh="auto" and local inputs or outputs: the axes that the batch is split over are not known before the '
            'search. Pass a mesh, or inputs="global" and outputs="global".'
        )
    if not call.args and not call.kwargs:
        raise InputError('mesh="auto" needs an example call to plan for: pass example_args or example_kwargs.')
    request = SearchOptions("mini-time", dist.get_world_size(), pipelines)
    kind = device_type_of_job()
    all_ranks = init_device_mesh(kind, (request.devices,), mesh_dim_names=("devices",))

    # As text, because the first rank sends the result to the others.
    def decide() -> str:
        result = _run_search(call, request, target)
        axes = dict(zip(result.mesh.names, result.mesh.sizes, strict=True))
        return json.dumps({"mesh": axes, "pipeline_axis": result.pipeline_axis, "plan": result.plan.to_json()})

    decision = json.loads(from_first_rank(all_ranks, decide))
    axes, axis = decision["mesh"], decision["pipeline_axis"]
    device_mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if axis is None:
        return AgreedMesh(device_mesh, None, ShardingPlan.from_json(decision["plan"]))
    # The plan has the schedule and the microbatches.
    pipeline = Pipeline(axis=axis, batch_dims=call.batch_dims)
    return AgreedMesh(device_mesh, pipeline, PipelinePlan.from_json(decision["plan"]))


def device_type_of_job() -> str:
    """Return the device type of the job's ranks: `"cpu"` with gloo, whatever the machine has."""
    # Torch's GPU builds also name an accelerator on machines without a driver.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if dist.get_backend() == "gloo" or accelerator is None else accelerator.type
