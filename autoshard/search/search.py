"""`search`: the best mesh for a number of devices, and its plan."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack, get_args

import torch
from torch import nn

from autoshard.capture._torch import pytree
from autoshard.errors import AutoshardError, BudgetError, MeshError, PlanError, warn_caller
from autoshard.options import OptionKeywords, collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.captures import PipelineCaptures
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.planner.captured_call import capture_with_progress
from autoshard.runtime.arguments import check_examples, check_module
from autoshard.search.mesh_search import MeshSearch
from autoshard.search.request import Request
from autoshard.search.result import MeshCandidate, Option, SearchResult
from autoshard.search.shapes import PipelineAxis

_PIPELINES: dict[bool | str, PipelineAxis] = {False: "none", True: "outer", "outer": "outer", "inner": "inner"}


def search(
    module: nn.Module,
    devices: int,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    option: str = "mini-time",
    pipelines: bool | str = True,
    **keywords: Unpack[OptionKeywords],
) -> SearchResult:
    """Find the best mesh for `module` on so many devices, and its plan.

    The search needs neither a process group nor the devices. Its candidates are meshes of up to three axes, with and
    without a pipeline axis, `"pp"`. Those that can't fit, or can't be faster than the best one so far, are dropped by
    bounds; the others are planned, quickly at first, and the best with all effort.

    Args:
        module, example_args, example_kwargs: as for `autoshard.plan`.
        devices: the number of devices; ranks fill one host after the other.
        option: `"mini-time"`: the shortest step on these devices; `"mini-parallelism"`: the fewest devices that the
            model fits on, of the numbers that divide `devices`, and the shortest step on so many; `"profiling"`: the
            shortest step for each of these numbers (TensorOpt 4.1).
        pipelines: the meshes with a pipeline among the candidates. True or `"outer"`: its axis is the outermost one,
            stages being whole hosts or parts of one host; `"inner"`: the innermost one, so that neighbouring stages
            share a host; False: no pipelines.
        **keywords: the fields of `autoshard.Options`, without `inputs`, `input_placements`, `output_placements`,
            `dynamic`, `shares`, `compile` and `overlap`. Three of these have a special meaning here.
            `memory_limit`: by default what the smallest device has, and in a pipeline each as much as it has. `hints`:
            axes other than `"pp"` are called `"x"`, `"y"` and `"z"`, the last one over the nearest neighbours; a mesh
            that a hint does not fit is left out. `search.time_limit`: when it is over, the best plan so far is returned
            with a note and a warning.

    Returns:
        The result: `result.mesh`, `result.pipeline_axis`, `result.plan`; it prints as a table of all meshes.

    Raises:
        MeshError: `devices` is not a whole number from 1 up.
        PlanError: an option is not valid; the message names it. Or no mesh could be planned in time.
        BudgetError: no mesh fits; the message names the smallest need.
        CaptureError, HintError, InputError: as for `autoshard.plan`.
        KeyboardInterrupt: Ctrl-C before there was any plan; later, the best plan so far is returned, with a warning.

    Source: Rhino 3 (mesh configurations, with and without pipelines), TensorOpt 4.1 (the options).
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    earlier = keywords.get("pipeline")
    if isinstance(earlier, (bool, str)):
        del keywords["pipeline"]
        pipelines = earlier
        warn_caller(f"write pipelines={pipelines!r}: pipeline is an autoshard.Pipeline now.", DeprecationWarning)
    options = collect_options("search", keywords)
    return run_search(module, args, kwargs, SearchOptions(option, devices, pipelines), Target.of(options, None))


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of `search` that are not options of planning.

    Raises:
        MeshError, PlanError: an option is not valid.
    """

    option: str
    devices: int
    pipelines: bool | str = True

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or not isinstance(self.devices, int) or self.devices < 1:
            raise MeshError(f"devices={self.devices!r}: pass the number of devices, a whole number from 1 up.")
        if self.option not in get_args(Option):
            raise PlanError(f"option={self.option!r} is unknown: choose one of {', '.join(get_args(Option))}.")
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


def run_search(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SearchOptions,
    target: Target,
) -> SearchResult:
    """Run a search with checked arguments."""
    start = time.perf_counter()
    graph, capture_seconds = capture_with_progress(
        module, args, kwargs, target, grad=torch.is_grad_enabled(), dynamic=False
    )
    call = BatchCall(module, args, kwargs, target.options.pipeline.batch_dims)
    own_memory = target.settings.memory_limit is None
    limit = target.settings.memory_limit or target.cluster.device.memory
    target = replace(target, settings=replace(target.settings, memory_limit=limit))
    request = Request(
        module=module,
        graph=graph,
        capture_seconds=capture_seconds,
        target=target,
        pipelines=_PIPELINES[options.pipelines],
        batch=_batch_size(call),
        plan_pipeline=functools.partial(plan_pipeline, PipelineCaptures(call, target)),
        own_memory=own_memory,
    )
    candidates, notes = _search_counts(request, options)
    return SearchResult(
        option=options.option,  # type: ignore[arg-type]
        cluster=target.cluster.name,
        memory_limit=limit,
        candidates=candidates,
        notes=notes,
        seconds=time.perf_counter() - start,
    )


def _search_counts(request: Request, options: SearchOptions) -> tuple[tuple[MeshCandidate, ...], tuple[str, ...]]:
    """Return the meshes of all numbers of devices, and the notes."""
    candidates: list[MeshCandidate] = []
    notes: list[str] = []
    failures: list[AutoshardError] = []
    deadline = time.monotonic() + request.target.settings.time_limit
    counts = options.counts
    for index, count in enumerate(counts):
        left = deadline - time.monotonic()
        mesh_search = MeshSearch(request, count, time.monotonic() + left / (len(counts) - index))
        try:
            mesh_search.run()
        except (BudgetError, PlanError) as error:
            failures.append(error)
            notes.append(str(error))
        candidates += mesh_search.candidates()
        notes += mesh_search.notes
        if mesh_search.interrupted or (mesh_search.best is not None and options.option == "mini-parallelism"):
            break
    if all(candidate.plan is None for candidate in candidates):
        raise failures[-1]
    return tuple(candidates), tuple(notes)


def _batch_size(call: BatchCall) -> int:
    """Return the samples of a call that microbatches can split: by default the size of dim 0 of its first tensor."""
    if call.batch_dims is not None:
        return call.samples
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)
