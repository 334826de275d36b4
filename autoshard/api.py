"""The front door: `parallelize`, `plan` and `frontier`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture.dynamic import Dynamic
from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.options import Hints, Placements, Shares, check_options
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.entry import PipelineOptions, parallelize_pipeline, plan_with_options
from autoshard.planner.frontier_search import frontier_plans
from autoshard.planner.part_shares import plan_shares
from autoshard.planner.planning import PlannerCache, capture_with_progress, planner_for, with_provenance
from autoshard.planner.progress_line import show_progress
from autoshard.plans.frontier import Frontier
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.arguments import check_dtypes, check_examples, check_mesh, check_module, check_plain, check_plan
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.parallelizer import Parallelizer
from autoshard.search.auto_mesh import auto_mesh, device_type_of_job
from autoshard.specs.axes import MeshShape


def plan(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    memory_limit: int | str | None = None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    optimizer_bytes_per_element: float | None = None,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    compile: bool = False,
    method: str = "auto",
    time_limit: float = 30.0,
    dynamic: Dynamic | None = None,
    shares: Shares | Literal["auto"] | None = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    recompute: str = "auto",
    effort: str = "full",
    work_limit: int | None = None,
    verbose: bool = False,
    pipeline_axis: str | None = None,
    schedule: str = "auto",
    microbatches: int | str = "auto",
    virtual: int | str = "auto",
    batch_dims: Mapping[str, int | None] | None = None,
) -> ShardingPlan | PipelinePlan:
    """Decide how `module` should lie on `mesh`, and change nothing.

    Needs neither a process group nor the devices: the module may be on the meta device, the examples meta tensors.

    Args:
        module: the model; captured as it is (training or evaluation, frozen parameters).
        mesh: a `DeviceMesh`, or axis sizes such as `{"dp": 8, "tp": 8}`.
        example_args: positional arguments of a call, tensors of global shape.
        example_kwargs: keyword arguments of a call.
        hints: globs of parameter or module paths -> placements that the planner must keep; or, of module paths,
            `autoshard.replicate(n)` or `autoshard.split(n)`. See docs/hints.md.
        memory_limit: bytes per device (or `"24GiB"`) that the step's peak may reach.
        optimizer: what will train the model: an optimizer, its class, or a name such as `"adamw"` (the default),
            `"sgd"`, `"momentum"` or `"adafactor"`. Its state, and what it makes on the way through a step, is memory.
        optimizer_bytes_per_element: of an optimizer that is none of these, the state that it keeps for every element
            of a trained parameter.
        cluster: a preset's name, a path of a cluster file, or a `Cluster`; by default `"cpu"` for a CPU mesh, the
            preset of the GPU that is there, or the nearest one scaled to it, for a CUDA mesh, and `"h100"` for
            everything else.
        inputs: `"global"`: every rank will pass whole tensors; `"local"`: its own shards, as a data loader yields them.
            Where the example's batch does not divide and the plan splits it, shards may be of different lengths: those
            that `Shard` makes, the last ones shorter or empty; the ranks then tell each other the lengths at every
            call. Else all ranks pass equally many rows; the ranks compare the sizes of every call, as they do with
            `dynamic`, and raise one error. A rank that makes fewer calls is not detected: the others wait for it until
            torch's timeout.
        input_placements: input path -> placements, for local inputs.
        output_placements: None: outputs come back whole; `"planned"`: as they lie, as DTensors; or a mapping of output
            paths to placements.
        compile: whether the local programs will be compiled: what the compiler fuses is priced as one kernel.
        method: `"auto"`, `"eliminate"`, `"alternate"` or `"ilp"`; or `"force"`, which keeps a memory limit by sharding
            the largest parameters (and recomputation) alone: a quicker search that finds slower plans, or none.
        time_limit: seconds that the search may take.
        dynamic: sizes that calls may change: for inputs by name, `{dim: name}`, such as
            `{"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}`; dims of one name have one size.
            In place of a name, a `torch.export.Dim` may limit the size, or make it a multiple (`8 * Dim("batch")`).
            Costs are those of the example's sizes. Other sizes are all served by the one plan; what an axis does
            not divide is padded, so that at most one axis splits such a dim.
        shares: for devices of different speed, what the ranks of one mesh axis take, in proportion to one another, such
            as `{"dp": (4, 2)}`. With `dynamic` that is of the batch, the size that it gives dim 0 of the inputs. Every
            rank runs operators on its own rows, without padding; means, losses and gradients are those of the global
            batch. Global inputs are shared in these proportions; local ones as they come, at least one row a rank. On
            this axis tensors that have to do with the batch are split along it or not at all. Without `dynamic` it is
            of every dim that a plan of equal parts splits along the axis, if so many parts divide it (`(5, 3)` are 8
            parts): samples, heads, columns, classes. Parameters with such dims lie whole on this axis, and every rank
            computes with its part of them; a hint that one is sharded there says what is split. The predicted step is
            that of the rank that is done last; memory is that of equal shares. `"auto"`: where the cluster has devices
            of several kinds along an axis, and inputs are global, shares in proportion to speed, as far as memory
            allows, if they make the step shorter (`plan.shares` says which); else equal ones. None: equal ones.
            In a pipeline they are of every microbatch, on an axis besides the pipeline's, and need no `dynamic`; memory
            is that of the device with the least room for its share.
        mp_policy: precisions, as `fully_shard(module, mp_policy=...)` understands them: parameters stay in their own
            dtype, and are cast to `param_dtype` before they are gathered; the inputs of `forward` are cast too
            (`cast_forward_inputs`), its outputs to `output_dtype`; gradients are reduced in `reduce_dtype`, or the
            dtype of the compute, and then cast back.
        recompute: what of the forward pass the backward pass runs again, instead of keeping what it made: `"auto"`:
            layers, as many as the memory limit asks for, where that is faster than what keeps the limit otherwise, and
            none without a limit; `"none"`; or `"full"`: every layer, so that only what enters and leaves layers is
            kept. Random numbers are never drawn anew, and collectives that are run again are part of the price.
        effort: `"full"`, or `"fast"`: repeated layers are planned alike in any case, one problem is solved instead
            of several, by messages and segments alone (Rhino's O2) where it is large, and the bound may be further off.
        work_limit: of every search by the solver, in its units of work: unlike `time_limit`, equal calls end with
            equal plans under it, however busy the machine is.
        verbose: log how the search goes (logger `autoshard`, level INFO). Otherwise a line on standard error shows it
            where that is a terminal.
        pipeline_axis: name of the mesh axis along which pipeline stages lie; by default `"pp"`, if there is such an
            axis. Each place on it is a pipeline rank, unless task graphs in `forward` ask for devices that add up to it
            (docs/hints.md). The example is then a call with a whole batch, and what a pipeline can not have (`dynamic`,
            local inputs, `output_placements`) is refused.
        schedule: of a pipeline: `"auto"`, the one with the shortest predicted step of all that fit; or a name, such as
            `"1F1B"` (`autoshard.pipeline.schedule.schedules.SCHEDULES`), or `"custom"` for an order of our own.
        microbatches: of a step of a pipeline: `"auto"`, or a number that divides the batch.
        virtual: stages per rank of a pipeline: `"auto"`, or a number.
        batch_dims: for inputs of a pipeline by name (such as `mask` or `batch['x']`), the dim that counts samples, and
            along which they are split into microbatches; None where there is none and every microbatch gets the whole
            tensor. Of other inputs it is dim 0.

    Returns:
        The plan: a `PipelinePlan` where the mesh has a pipeline axis.

    Raises:
        CaptureError: the module cannot be captured as one graph.
        HintError: a hint does not fit the module or the mesh.
        InputError: `dynamic` names no input, no dim, or sizes that the example cannot stand for.
        BudgetError: no plan fits `memory_limit`.
        PlanError: an option is none; the message names it.
        MeshError: the mesh is none, or has no axis of the name `pipeline_axis`.
        PipelineError: no schedule is of that name, or for such sizes.
        KeyboardInterrupt: Ctrl-C before there was any plan; later, the best one until then is returned, with a warning.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    shape = MeshShape.of(mesh)
    pipeline = PipelineOptions.of(shape, pipeline_axis, schedule, microbatches, virtual, batch_dims)
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    options = check_options(
        device_type,
        hints=hints,
        memory_limit=memory_limit,
        optimizer=optimizer,
        optimizer_bytes_per_element=optimizer_bytes_per_element,
        cluster=cluster,
        inputs=inputs,
        input_placements=input_placements,
        output_placements=output_placements,
        method=method,
        time_limit=time_limit,
        dynamic=dynamic,
        shares=shares,
        mp_policy=mp_policy,
        recompute=recompute,
        effort=effort,
        work_limit=work_limit,
        verbose=verbose,
        compile=compile,
    )
    if pipeline is not None:
        return plan_with_options(module, shape, args, kwargs, pipeline, options)
    graph, seconds = capture_with_progress(module, args, kwargs, options, grad=torch.is_grad_enabled())
    return plan_shares(graph, shape, options, seconds, PlannerCache(module, shape).of)


def frontier(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    optimizer_bytes_per_element: float | None = None,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    method: str = "auto",
    time_limit: float = 240.0,
    dynamic: Dynamic | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    recompute: str = "none",
    effort: str = "full",
    work_limit: int | None = None,
    verbose: bool = False,
    gaps: int = 4,
) -> Frontier:
    """Every plan of `module` on `mesh` that is worth its memory, from the smallest peak to the shortest step.

    Among them is the plan that `autoshard.plan` makes without a memory limit, or a better one, and one of the smallest
    peak that is found. All are predicted by the account that `autoshard.plan` uses; nothing is changed.

    Args:
        module, mesh, example_args, example_kwargs, hints, optimizer, optimizer_bytes_per_element, cluster, inputs,
            input_placements, output_placements, method, dynamic, mp_policy, effort, work_limit, verbose: as for
            `autoshard.plan`.
        recompute: what the backward half runs again, instead of keeping what the forward half made: `"none"`; `"full"`:
            all layers; `"auto"`: the frontier of both, which takes twice as long.
        time_limit: seconds that the search may take. It solves some tens of problems, each of which takes about as long
            as a plan does.
        gaps: how many of the widest gaps between plans are searched for plans that lie in them; 0 for a quick look.

    Returns:
        The frontier; `frontier.at(memory="24GiB")` is the plan for a device.

    Raises:
        CaptureError, HintError, InputError, MeshError, PlanError: as for `autoshard.plan`.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    if isinstance(gaps, bool) or not isinstance(gaps, int) or gaps < 0:
        raise PlanError(f"gaps={gaps!r}: it is a number of gaps to search, zero or more.")
    shape = MeshShape.of(mesh)
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    options = check_options(
        device_type,
        hints=hints,
        optimizer=optimizer,
        optimizer_bytes_per_element=optimizer_bytes_per_element,
        cluster=cluster,
        inputs=inputs,
        input_placements=input_placements,
        output_placements=output_placements,
        method=method,
        time_limit=time_limit,
        dynamic=dynamic,
        mp_policy=mp_policy,
        recompute=recompute,
        effort=effort,
        work_limit=work_limit,
        verbose=verbose,
    )
    graph, seconds = capture_with_progress(module, args, kwargs, options, grad=torch.is_grad_enabled())
    planner = planner_for(module, graph, shape, options)
    with show_progress(options.verbose) as planner.progress:
        plans = frontier_plans(planner, gaps)
    return Frontier([with_provenance(plan, planner, seconds, options) for plan in plans])


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh | Literal["auto"],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    memory_limit: int | str | None = None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    optimizer_bytes_per_element: float | None = None,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    compile: bool = False,
    overlap: str = "own",
    method: str = "auto",
    time_limit: float = 30.0,
    dynamic: Dynamic | None = None,
    shares: Shares | Literal["auto"] | None = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    recompute: str = "auto",
    effort: str = "full",
    work_limit: int | None = None,
    verbose: bool = False,
    pipeline_axis: str | None = None,
    schedule: str = "auto",
    microbatches: int | str = "auto",
    virtual: int | str = "auto",
    batch_dims: Mapping[str, int | None] | None = None,
    plan: ShardingPlan | PipelinePlan | None = None,
) -> nn.Module:
    """Shard `module` over `mesh` in place, so that it trains there with the numbers that one device would give.

    The module stays the same object of the same class, with the same names; its parameters become `DTensor`s. Make the
    optimizer afterwards. Without examples the parameters are replicated at once, and planned and re-placed in place at
    the first call. Every further call signature (batch size, evaluation, keyword set) is captured and planned once,
    under the placements made.

    On a mesh with a pipeline axis another module comes back, a `PipelineModule`: it has the parameters and buffers of
    this rank's stages under their names in `module`, which is left without numbers, and `train_step(...)` in place of
    calls and `backward()`.

    Args:
        module: the model; parameters may be on the meta device (see `materialize`).
        mesh: a `DeviceMesh` whose process group is initialised; or `"auto"`: all ranks of the job, on the mesh that
            `autoshard.search` finds the best, with or without a pipeline.
        compile: hand the local forward and backward programs to inductor.
        overlap: who joins the program's collectives and orders them among its compute: `"own"`, this library, as the
            plan predicts it; or `"torch"`, torch's private `schedule_overlap_bucketing` at the cluster's prices, where
            this release of torch has it. The numbers are the same; what the plan says of seconds and of memory is of
            `"own"`.
        plan: apply this plan instead of making one.
        example_args, example_kwargs, hints, memory_limit, optimizer, optimizer_bytes_per_element, cluster, inputs,
            input_placements, output_placements, method, time_limit, dynamic, shares, mp_policy, recompute, effort,
            work_limit, verbose, pipeline_axis, schedule, microbatches, virtual, batch_dims: as for `autoshard.plan`.

    Returns:
        The module, or the `PipelineModule`. `sharding_plan` of it is its plan.

    Raises:
        PlanError: the module is parallelised already, or `plan` is of another model or mesh.
        MeshError: `mesh` is no `DeviceMesh`, or larger than the world, or has no backend for its devices.
        InputError: the module has float64 numbers, and the devices have none.
        CaptureError, HintError, BudgetError, PipelineError: as for `autoshard.plan`. Nothing was changed then.
    """
    _check(module)
    if mesh != "auto":
        check_mesh(mesh)
    args, kwargs = check_examples(example_args, example_kwargs)
    options = check_options(
        device_type_of_job() if isinstance(mesh, str) else mesh.device_type,
        hints=hints,
        memory_limit=memory_limit,
        optimizer=optimizer,
        optimizer_bytes_per_element=optimizer_bytes_per_element,
        cluster=cluster,
        inputs=inputs,
        input_placements=input_placements,
        output_placements=output_placements,
        method=method,
        time_limit=time_limit,
        dynamic=dynamic,
        shares=shares,
        mp_policy=mp_policy,
        recompute=recompute,
        effort=effort,
        work_limit=work_limit,
        verbose=verbose,
        overlap=overlap,
        compile=compile,
    )
    check_dtypes(module, device_type_of_job() if isinstance(mesh, str) else mesh.device_type)
    if isinstance(mesh, str):
        if plan is not None:
            raise PlanError('mesh="auto" and a plan: a plan is for one mesh, pass that.')
        agreed = auto_mesh(
            module,
            args,
            kwargs,
            options,
            schedule=schedule,
            microbatches=microbatches,
            virtual=virtual,
            batch_dims=batch_dims,
        )
        mesh, pipeline_axis, plan = agreed.device_mesh, agreed.pipeline_axis, agreed.plan
        pipeline = None if pipeline_axis is None else PipelineOptions(pipeline_axis, batch_dims=batch_dims)
    else:
        pipeline = PipelineOptions.of(MeshShape.of(mesh), pipeline_axis, schedule, microbatches, virtual, batch_dims)
    if pipeline is not None:
        return parallelize_pipeline(module, mesh, args, kwargs, pipeline, options, compile=compile, plan=plan)
    if plan is not None:
        check_plan(plan, module, MeshShape.of(mesh))
        assert isinstance(plan, ShardingPlan)
    parallelizer = Parallelizer(module, mesh, options, compile, plan)
    parallelizer.start(args, kwargs)
    return module


def _check(module: object) -> None:
    check_module(module)
    assert isinstance(module, nn.Module)
    for name, part in module.named_modules():
        if RUNTIME in part.__dict__:
            raise PlanError(
                f"{name or 'the module'} is parallelised already: parallelize works in place, once. Build the module "
                "anew to place it differently."
            )
    check_plain(module)
