"""`search`: the best mesh for a number of devices, and its plan."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture._torch import pytree
from autoshard.cluster.cluster import Cluster
from autoshard.errors import AutoshardError, BudgetError, MeshError, PlanError
from autoshard.options import Hints, Options, check_options
from autoshard.pipeline.graph.microbatch import samples
from autoshard.pipeline.plan.captures import BatchCall, PipelineCaptures
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.planner.planning import capture_with_progress
from autoshard.runtime.arguments import check_examples, check_module
from autoshard.search.mesh_candidate import MeshCandidate
from autoshard.search.mesh_search import MeshSearch
from autoshard.search.request import Request
from autoshard.search.result import Option, SearchResult
from autoshard.search.shapes import Pipeline

_PIPELINES: dict[bool | str, Pipeline] = {False: "none", True: "outer", "outer": "outer", "inner": "inner"}


def search(
    module: nn.Module,
    devices: int,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster | None = None,
    option: str = "mini-time",
    memory_limit: int | str | None = None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    optimizer_bytes_per_element: float | None = None,
    hints: Hints | None = None,
    pipeline: bool | str = True,
    schedule: str = "auto",
    microbatches: int | str = "auto",
    virtual: int | str = "auto",
    batch_dims: Mapping[str, int | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    recompute: str = "auto",
    effort: str = "full",
    work_limit: int | None = None,
    time_limit: float = 120.0,
    verbose: bool = False,
) -> SearchResult:
    """The best mesh for `module` on so many devices, its plan, and a table of all meshes that were looked at.

    Needs neither a process group nor the devices. Meshes of up to three axes are looked at, with and without a
    pipeline axis, `"pp"`. Those that can't fit, or can't be faster than the best one found, are dropped by bounds; the
    others are planned, quickly at first, and the best with all effort.

    Args:
        module, example_args, example_kwargs, optimizer, optimizer_bytes_per_element, mp_policy, recompute, effort,
            work_limit: as for `autoshard.plan`.
        devices: how many there are; ranks fill one host after the other.
        cluster: as for `autoshard.plan`; `"h100"` by default.
        option: `"mini-time"`: the shortest step on these devices; `"mini-parallelism"`: the fewest devices that the
            model fits on, of the numbers that divide `devices`, and the shortest step on so many; `"profiling"`: the
            shortest step for each of these numbers (TensorOpt 4.1).
        memory_limit: bytes per device (or `"24GiB"`) that the step's peak may reach; by default what the smallest
            device has, and in a pipeline each as much as it has.
        hints: as for `autoshard.plan`; axes other than `"pp"` are called `"x"`, `"y"` and `"z"`, the last one over the
            nearest neighbours. A mesh that a hint does not fit is left out.
        pipeline: whether meshes with a pipeline are looked at. True or `"outer"`: its axis is the outermost one, stages
            being whole hosts or parts of one host; `"inner"`: the innermost one, so that neighbouring stages share a
            host; False: without pipelines.
        schedule: of pipelines: `"auto"`, or the name of one.
        microbatches: of a step of a pipeline: `"auto"`, or a number that divides the batch.
        virtual: stages per rank of a pipeline: `"auto"`, or a number.
        batch_dims: which dims of inputs are split into microbatches, as for `autoshard.plan`.
        time_limit: seconds that the search may take, capture aside. When they are over, the best plan found until then
            is returned with a note and a warning.
        verbose: log how the search goes (logger `autoshard`, level INFO).

    Returns:
        The result: `result.mesh`, `result.pipeline_axis`, `result.plan`; it prints as a table.

    Raises:
        MeshError: `devices` is no whole number from 1 up.
        PlanError: an option is none that there is; the message names it. Or no mesh could be planned in time.
        BudgetError: no mesh fits; the message names the smallest need.
        CaptureError, HintError, InputError: as for `autoshard.plan`.
        KeyboardInterrupt: Ctrl-C before there was any plan; later, the best one until then is returned, with a warning.

    Source: Rhino 3 (mesh configurations, with and without pipelines), TensorOpt 4.1 (the options).
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    options = check_options(
        None,
        hints=hints,
        memory_limit=memory_limit,
        optimizer=optimizer,
        optimizer_bytes_per_element=optimizer_bytes_per_element,
        cluster=cluster,
        inputs="global",
        input_placements=None,
        output_placements=None,
        method="auto",
        time_limit=time_limit,
        dynamic=None,
        mp_policy=mp_policy,
        recompute=recompute,
        effort=effort,
        work_limit=work_limit,
        verbose=verbose,
    )
    wanted = SearchOptions(option, devices, pipeline, schedule, microbatches, virtual, batch_dims)
    return run_search(module, args, kwargs, wanted, options)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What a search is for, as `search` describes it.

    Raises:
        MeshError, PlanError: one of them is none.
    """

    option: str
    devices: int
    pipeline: bool | str = True
    schedule: str = "auto"
    microbatches: int | str = "auto"
    virtual: int | str = "auto"
    batch_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or not isinstance(self.devices, int) or self.devices < 1:
            raise MeshError(f"devices={self.devices!r}: pass the number of devices, a whole number from 1 up.")
        if self.option not in get_args(Option):
            raise PlanError(f"option={self.option!r} is unknown: choose one of {', '.join(get_args(Option))}.")
        if self.pipeline not in _PIPELINES:
            raise PlanError(f'pipeline={self.pipeline!r}: choose True or "outer", "inner", or False for no pipelines.')
        for name, number in (("microbatches", self.microbatches), ("virtual", self.virtual)):
            if number != "auto" and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise PlanError(f'{name}={number!r}: choose "auto", or a whole number from 1 up.')

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices to look at, the fewest first."""
        if self.option == "mini-time":
            return (self.devices,)
        return tuple(count for count in range(1, self.devices + 1) if self.devices % count == 0)


def run_search(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: SearchOptions,
    options: Options,
) -> SearchResult:
    """What `search` returns, of checked arguments."""
    start = time.perf_counter()
    graph, capture_seconds = capture_with_progress(
        module, args, kwargs, options, grad=torch.is_grad_enabled(), dynamic=False
    )
    own_memory = options.settings.memory_limit is None
    limit = options.settings.memory_limit or options.cluster.device.memory
    options = replace(options, settings=replace(options.settings, memory_limit=limit))
    request = Request(
        module=module,
        args=args,
        kwargs=kwargs,
        graph=graph,
        capture_seconds=capture_seconds,
        options=options,
        pipeline=_PIPELINES[wanted.pipeline],
        schedule=wanted.schedule,
        microbatches=wanted.microbatches,
        virtual=wanted.virtual,
        batch=_batch_size(module, args, kwargs, wanted.batch_dims),
        plan_pipeline=functools.partial(
            plan_pipeline, captured=PipelineCaptures(BatchCall(module, args, kwargs, wanted.batch_dims), options)
        ),
        own_memory=own_memory,
    )
    candidates, notes = _search_counts(request, wanted)
    return SearchResult(
        option=wanted.option,  # type: ignore[arg-type]
        cluster=options.cluster.name,
        memory_limit=limit,
        candidates=candidates,
        notes=notes,
        seconds=time.perf_counter() - start,
    )


def _search_counts(request: Request, wanted: SearchOptions) -> tuple[tuple[MeshCandidate, ...], tuple[str, ...]]:
    """The meshes of all numbers of devices that are looked at, and what there is to note."""
    found: list[MeshCandidate] = []
    notes: list[str] = []
    failures: list[AutoshardError] = []
    deadline = time.monotonic() + request.options.settings.time_limit
    counts = wanted.counts
    for place, count in enumerate(counts):
        left = deadline - time.monotonic()
        one = MeshSearch(request, count, time.monotonic() + left / (len(counts) - place))
        try:
            one.run()
        except (BudgetError, PlanError) as error:
            failures.append(error)
            notes.append(str(error))
        found += one.candidates()
        notes += one.notes
        if one.interrupted or (one.best is not None and wanted.option == "mini-parallelism"):
            break
    if all(candidate.plan is None for candidate in found):
        raise failures[-1]
    return tuple(found), tuple(notes)


def _batch_size(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dims: Mapping[str, int | None] | None
) -> int:
    """How many samples a call has that microbatches can be made of: where nothing is said, its first tensor's rows."""
    if batch_dims is not None:
        return samples(module, args, kwargs, batch_dims)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)
