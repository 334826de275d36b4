"""The front door: `plan`, `frontier`, `parallelize`, and the initial numbers, data and state of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autoshard.capture.bound_call import BoundCall
from autoshard.errors import InputError, PlanError
from autoshard.options import MeshKeywords, OptionKeywords, Options, Pipeline, collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import (
    PipelineModule,
    parallelize_pipeline,
    plan_with_options,
    resolve_pipeline,
)
from autoshard.pipeline.schedule.schedule_search import names_to_try
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planning import explorer_for, with_provenance
from autoshard.planner.progress_line import show_progress
from autoshard.planner.replanner import Replanner
from autoshard.plans.frontier import Frontier
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.arguments import (
    check_dtypes,
    check_examples,
    check_mesh,
    check_module,
    check_not_parallelized,
    check_plan,
)
from autoshard.runtime.calls import global_example
from autoshard.runtime.data_loader import BatchPart, ShardedDataLoader
from autoshard.runtime.forward_methods import register_method
from autoshard.runtime.full_state import gather_state, load_state
from autoshard.runtime.materialize import Initializer, Model, materialize_module
from autoshard.runtime.module_runtime import RUNTIME, Runtime, runtime_of
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.safetensors import IncompatibleKeys, Paths, load_module
from autoshard.runtime.shards import gather_full_tensor
from autoshard.search.search import auto_mesh, device_type_of_job
from autoshard.specs.axes import MeshShape

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@overload
def plan(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[MeshKeywords],
) -> ShardingPlan: ...
@overload
def plan(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    pipeline: Pipeline,
    **keywords: Unpack[MeshKeywords],
) -> PipelinePlan: ...
def plan(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> ShardingPlan | PipelinePlan:
    """Plan how to shard `module` over `mesh`, without changing anything.

    Needs neither a process group nor the devices: the module may be on the meta device, the examples meta tensors.

    Args:
        module: the model; captured as it is (training or evaluation, frozen parameters).
        mesh: a `DeviceMesh`, or axis sizes such as `{"dp": 8, "tp": 8}`.
        example_args: positional arguments of a call, tensors of global shape (see `Options.example_inputs`).
        example_kwargs: keyword arguments of a call.
        **keywords: the fields of `autoshard.Options`.

    Returns:
        The plan: a `PipelinePlan` if the mesh has a pipeline axis. Type checkers, which do not see the names of axes,
        assume one if the call names the axis: `pipeline=autoshard.Pipeline(axis="pp")`.

    Raises:
        CaptureError: the module cannot be captured as one graph.
        HintError: a hint does not fit the module or the mesh.
        InputError: `dynamic` names no input, no dim, or sizes that the example cannot represent.
        BudgetError: no plan fits `memory_limit`.
        PlanError: an option is not valid; the message names it.
        TypeError: there is no option of that name; the message names the close ones.
        MeshError: the mesh is not valid, or has no axis of the name `pipeline.axis`.
        PipelineError: no schedule has that name, or fits such sizes.
        KeyboardInterrupt: Ctrl-C before the first plan was found; later, the best known plan is returned, with a
            warning.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    shape = MeshShape.of(mesh)
    options = collect_options("plan", keywords)
    pipeline = resolve_pipeline(shape, options.pipeline)
    _check_accumulate(options, pipeline is not None)
    target = Target.of(options, mesh.device_type if isinstance(mesh, DeviceMesh) else None)
    if pipeline is not None:
        return plan_with_options(BatchCall(module, args, kwargs, pipeline.batch_dims), shape, pipeline, target)
    target = target.on_mesh(shape)
    # Under `torch.no_grad()` the plan is one of inference, as the call itself would be.
    call = global_example(BoundCall.of(module, args, kwargs, torch.is_grad_enabled()), target, shape)
    planner = ModulePlanner(module, shape, target)
    captured = planner.capture(call, logits_room=planner.logits_room, by_layers=True)
    found = planner.plan(captured)
    captured = captured.form_of(found)
    return Replanner.of(module, captured.graph, captured.seconds, shape, target).remember(found)


def check_options(
    function: str, mesh: DeviceMesh | Mapping[str, int] | None = None, **keywords: Unpack[OptionKeywords]
) -> Options:
    """Check the options of planning before there is a model, which may take long to build.

    Args:
        function: that will get the options: `"plan"`, `"parallelize"`, `"frontier"`, `"search"`, `"compare"`,
            `"verify"` or `"why_not"`.
        mesh: as for `autoshard.plan`; None if it is not known.
        **keywords: the fields of `autoshard.Options` that the function takes.

    Returns:
        The options with the defaults of the function. Their `pipeline.axis` is the name of the pipeline axis of the
        mesh, None where it has none.

    Raises:
        TypeError: the function has no option of that name; the message names the close ones.
        BudgetError, InputError, MeshError, PipelineError, PlanError: an option or the mesh is not valid, there is no
            such cluster, or it has fewer devices. Hints are checked with the model only.
    """
    options = collect_options(function, keywords)
    names_to_try(options.pipeline.schedule)
    target = Target.of(options, mesh.device_type if isinstance(mesh, DeviceMesh) else None)
    if mesh is None:
        return options
    shape = MeshShape.of(mesh)
    target.cluster.first(shape.size)
    return replace(options, pipeline=resolve_pipeline(shape, options.pipeline) or options.pipeline)


def frontier(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    gaps: int = 8,
    **keywords: Unpack[OptionKeywords],
) -> Frontier:
    """Find every plan of `module` on `mesh` that is worth its memory, from the smallest peak to the shortest step.

    They include the plan that `autoshard.plan` makes without a memory limit, or a better one, and one with the smallest
    known peak. Predictions are made as in `autoshard.plan`; nothing is changed. The search solves some tens of
    problems; each takes about as long as one plan.

    Args:
        module, mesh, example_args, example_kwargs: as for `autoshard.plan`.
        gaps: how many of the widest gaps between plans are searched for more plans; 0 for a quick look.
        **keywords: the fields of `autoshard.Options`, without `memory_limit`, `shares`, `compile` and
            `pipeline`.

    Returns:
        The frontier; `frontier.at(memory="24GiB")` is the plan for a device.

    Raises:
        CaptureError, HintError, InputError, MeshError, PlanError, TypeError: as for `autoshard.plan`.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    if isinstance(gaps, bool) or not isinstance(gaps, int) or gaps < 0:
        raise PlanError(f"gaps={gaps!r}: it is a number of gaps to search, zero or more.")
    shape = MeshShape.of(mesh)
    options = collect_options("frontier", keywords)
    target = Target.of(options, mesh.device_type if isinstance(mesh, DeviceMesh) else None).on_mesh(shape)
    call = global_example(BoundCall.of(module, args, kwargs, torch.is_grad_enabled()), target, shape)
    module_planner = ModulePlanner(module, shape, target)
    captured = module_planner.capture(call, logits_room=module_planner.logits_room, by_layers=True)
    # If logits may be whole, fast plans have whole ones, and lean plans have losses in pieces.
    has_both = captured.capture_other is not None and not captured.is_in_pieces
    found: list[ShardingPlan] = []
    for form in (captured, captured.other_form) if has_both else (captured,):
        planner = form.planner_of(target)
        with show_progress(options.search.verbose) as planner.progress:
            plans = explorer_for(planner).frontier(gaps // 2 if has_both else gaps)
        found += [with_provenance(plan, planner, form.seconds, target) for plan in plans]
    best = Frontier(found).plans
    # A plan is the best one until there is memory for the next.
    limits = [*(plan.memory.peak - 1 for plan in best[1:]), None]

    def remember(plan: ShardingPlan, limit: int | None) -> ShardingPlan:
        form = captured.form_of(plan)
        return Replanner.of(module, form.graph, form.seconds, shape, target).within(limit).remember(plan)

    return Frontier([remember(plan, limit) for plan, limit in zip(best, limits, strict=True)])


@overload
def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: PipelinePlan | None = None,
    pipeline: Pipeline,
    **keywords: Unpack[MeshKeywords],
) -> PipelineModule: ...
@overload
def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: PipelinePlan,
    **keywords: Unpack[MeshKeywords],
) -> PipelineModule: ...
@overload
def parallelize(
    module: ModuleT,
    mesh: DeviceMesh,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | None = None,
    **keywords: Unpack[MeshKeywords],
) -> ModuleT: ...
@overload
def parallelize(
    module: ModuleT,
    mesh: DeviceMesh | Literal["auto"],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | PipelinePlan | None = None,
    **keywords: Unpack[OptionKeywords],
) -> ModuleT | PipelineModule: ...
def parallelize(
    module: nn.Module,
    mesh: DeviceMesh | Literal["auto"],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | PipelinePlan | None = None,
    **keywords: Unpack[OptionKeywords],
) -> nn.Module:
    """Shard `module` over `mesh` in place, so that it trains there with the numbers of one device.

    The module is still the same object of the same class, with the same names; its parameters become `DTensor`s. Make
    the optimizer afterwards. Without examples the parameters are replicated at first; the first call plans them and
    changes their placements in place. Every further call signature (batch size, evaluation, keyword set) is captured
    and planned once, with these placements.

    On a mesh with a pipeline axis, the result is a new module, a `PipelineModule`. It has the parameters and buffers of
    this rank's stages under their names in `module`, which loses its numbers. It has `train_step(...)` instead of calls
    and `backward()`.

    Args:
        module: the model; parameters may be on the meta device (see `materialize`).
        mesh: a `DeviceMesh` whose process group is initialised; or `"auto"`: all ranks of the job, on the best mesh
            that `autoshard.search` finds, with or without a pipeline.
        example_args, example_kwargs: as for `autoshard.plan`.
        plan: apply this plan instead of making one.
        **keywords: the fields of `autoshard.Options`.

    Returns:
        The module, or the `PipelineModule`. Its plan is `sharding_plan` (for type checkers, `plan_of`).

    Raises:
        PlanError: the module is parallelised already, or `plan` is for another model or mesh.
        MeshError: `mesh` is no `DeviceMesh`, or larger than the world, or has no backend for its devices.
        InputError: the module has float64 numbers, and the devices have none.
        CaptureError, HintError, BudgetError, PipelineError, TypeError: as for `autoshard.plan`. Nothing was changed
            then.
    """
    check_module(module)
    check_not_parallelized(module)
    if mesh != "auto":
        check_mesh(mesh)
    args, kwargs = check_examples(example_args, example_kwargs)
    options = collect_options("parallelize", keywords)
    device_type = device_type_of_job() if isinstance(mesh, str) else mesh.device_type
    # The capture runs on the CPU, which has all dtypes: devices would refuse theirs in the first step only.
    check_dtypes(module, device_type)
    target = Target.of(options, device_type)
    batch = BatchCall(module, args, kwargs, options.pipeline.batch_dims)
    pipeline: Pipeline | None
    if isinstance(mesh, str):
        _check_accumulate(options, True)
        if plan is not None:
            raise PlanError('mesh="auto" and a plan: a plan is for one mesh, pass that.')
        mesh, pipeline, plan = auto_mesh(batch, target)
    else:
        pipeline = resolve_pipeline(MeshShape.of(mesh), options.pipeline)
        _check_accumulate(options, pipeline is not None)
    if pipeline is not None:
        return parallelize_pipeline(batch, mesh, pipeline, target, plan=plan)
    shape = MeshShape.of(mesh)
    if plan is not None:
        check_plan(plan, module, shape)
        assert isinstance(plan, ShardingPlan)
    target = target.on_mesh(shape, plan)
    call = global_example(BoundCall.of(module, args, kwargs), target, shape)
    runtime = Runtime(ProgramMaker(module, mesh, ModulePlanner(module, shape, target), plan))
    runtime.start(call)
    runtime.programs.order.open(mesh)
    return module


@overload
# Of a pipeline in a variable of type `nn.Module`, a checker takes the plan for one of a mesh.
def plan_of(model: PipelineModule) -> PipelinePlan: ...  # type: ignore[overload-overlap]
@overload
def plan_of(model: nn.Module) -> ShardingPlan: ...
def plan_of(model: nn.Module) -> ShardingPlan | PipelinePlan:
    """Return the plan of a parallelised module: its attribute `sharding_plan`, with a type for type checkers.

    Args:
        model: the result of `parallelize`.

    Raises:
        InputError: the module is not parallelised; or `parallelize` had no example, and no call has been planned yet.
    """
    check_module(model)
    if not isinstance(model, PipelineModule) and not isinstance(model.__dict__.get(RUNTIME), Runtime):
        raise InputError(f"{type(model).__name__} is not parallelised: call autoshard.parallelize first.")
    found: ShardingPlan | PipelinePlan | None = model.__dict__["sharding_plan"]
    if found is None:
        raise InputError(f"{type(model).__name__} has no plan yet: it is planned at its first call.")
    return found


def register_forward_method(module: nn.Module, method: str) -> None:
    """Run a method of a parallelised module, or of a submodule, as a separate call.

    Afterwards `model.encode(x)` gives the numbers of one device, with gradients. Every kind of call is captured and
    planned once, with the placements of the parameters and the options of `parallelize`. `dynamic` and the placements
    of local inputs apply to arguments with the names of arguments of `forward`; other arguments with the size of the
    batch are rows. Outputs are whole unless `output_placements="planned"` or `outputs="local"`. Inside other calls, the
    method is part of their programs. All ranks must call this function, and then the method. A repeated call of this
    function changes nothing.

    Args:
        module: the result of `parallelize`; not a `PipelineModule`.
        method: the name, such as `"encode"`; of a submodule, its path: `"encoder.forward"` runs calls of
            `model.encoder(x)`, with the hooks of the submodule around its program.

    Raises:
        InputError: the module is not parallelised, or is a pipeline, or there is no such method. Later, a call raises
            it if `parallelize` had no example and no call of the module placed the parameters before.
    """
    check_module(module)
    register_method(module, method, ModulePlanner)


def shard_dataloader(loader: DataLoader[Any], model: nn.Module) -> ShardedDataLoader:
    """Return a loader that yields each rank's part of the batches of a loader, as a parallelised module takes it.

    The loader is as for one device: its batches are global. With `inputs="local"`, each rank gets its rows along the
    data axes; a smaller last batch is split like `Shard`, so some ranks may get no rows. From a data set with
    `__getitem__`, a rank reads only its own rows. With `inputs="global"`, and for a pipeline, all ranks get whole
    batches. All ranks draw the same shuffled order, whatever their random state. The result has `set_epoch`,
    `state_dict` and `load_state_dict`. All ranks call this function, and iterate, together.

    Args:
        loader: a `DataLoader`, shuffled or not, of a data set with `__getitem__` or an `IterableDataset` that yields
            the same rows on all ranks; or torchdata's `StatefulDataLoader`. It is not changed.
        model: the result of `parallelize`.

    Raises:
        InputError: the module is not parallelised, or the loader makes no batches. While iterating, on every rank: the
            ranks draw different batches, as with a `DistributedSampler`.
    """
    check_module(model)
    device_mesh, axes = _data_axes_of(model)
    hosts = None if isinstance(model, PipelineModule) else model.__dict__[RUNTIME].maker.hosts
    return ShardedDataLoader(loader, device_mesh, BatchPart.of(device_mesh, axes), hosts)


def sampler_arguments(model: nn.Module) -> dict[str, int]:
    """Return the arguments of a `DistributedSampler` for a module: the number of parts, and the part of this rank.

    With `DistributedSampler(data, **autoshard.sampler_arguments(model))`, a loader reads this rank's rows. Its
    `batch_size` is then that of one rank, and the sampler repeats rows if the parts do not divide the data.

    Args:
        model: the result of `parallelize`.

    Returns:
        `num_replicas` and `rank`; 1 and 0 if every rank passes whole batches.

    Raises:
        InputError: the module is not parallelised.
    """
    check_module(model)
    part = BatchPart.of(*_data_axes_of(model))
    return {"num_replicas": part.count, "rank": part.index}


def _data_axes_of(model: nn.Module) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Return the mesh of a parallelised module, and the axes along which its ranks pass different rows."""
    if isinstance(model, PipelineModule):
        return model.device_mesh, ()
    runtime = model.__dict__.get(RUNTIME)
    if not isinstance(runtime, Runtime):
        raise InputError(f"{type(model).__name__} is not parallelised: call autoshard.parallelize first.")
    return runtime.device_mesh, runtime.data_axes if runtime.inputs == "local" else ()


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context in which backwards of a parallelised module add up gradients on each rank, and reduce none.

    The first backward outside of it adds its own gradients and reduces the sums, once for all microbatches of a step:

        for x in microbatches[:-1]:
            with autoshard.no_sync(model):
                model(x).backward()
        model(microbatches[-1]).backward()
        optimizer.step()

    The gradients are the same as without the context. The forward must run in it too: a forward before it reduces
    gradients as usual. Until they are reduced, sums are not in `.grad`: only one small parameter has one, of zeros.
    `zero_grad()`, which sets it to None, drops the sums. Gradients from `torch.autograd.grad` need the last backward.

    A sum has the size of the gradient before its reduction: for a parameter that is sharded over the axis that splits
    the batch, the size of the whole parameter on this axis. A plan counts it with the option `accumulate`. If the
    dtypes of reduction (`mp_policy`) and parameter differ, a sum has the wider one.

    Args:
        module: the result of `parallelize`; not a `PipelineModule`, whose `train_step` sums its microbatches. All ranks
            enter and exit together.

    Raises:
        InputError: the module is not parallelised, or is a pipeline. Later, `optimizer.step()` raises it if gradients
            are not reduced.
    """
    check_module(module)
    with runtime_of(module, "no_sync").programs.accumulation.without_reductions():
        yield


def materialize(model: Model, device: torch.device | str | None = None, init: Initializer | None = None) -> Model:
    """Allocate and initialise the meta tensors of a parallelised module in place.

    Parameters are still the same objects. They are initialised by `init`, called for every submodule of the model,
    children first; else by the model's own `init_weights()` (Hugging Face, torchtitan); else by `reset_parameters()` of
    every submodule that has it and holds a meta tensor. The values are those of one device with the random state of
    rank 0. All ranks call this together.

    Every rank holds its shards, for a `PipelineModule` those of its stages. In addition it holds one whole tensor and
    its part at a time. A parameter that an initialiser draws again later, such as the projections of Hugging Face's
    GPT-2, is gathered from the ranks that hold it, and is then held twice; gloo's threads free a tensor a moment after
    it is sent. A parameter that no stage uses is whole to the end.

    Args:
        model: the result of `parallelize`.
        device: the device of the tensors; by default the mesh's device type.
        init: initialises the parameters and buffers of one submodule in place, as if they were whole.

    Returns:
        The model.

    Raises:
        InputError: the model is not parallelised; the device has another type than the mesh; or a parameter or buffer
            has not been initialised.
    """
    if isinstance(model, PipelineModule):
        model.materialize(device, init)
        return model
    return materialize_module(model, device, init)


def load_safetensors(
    model: nn.Module, paths: Paths, *, strict: bool = True, device: torch.device | str | None = None
) -> IncompatibleKeys:
    """Fill the parameters and persistent buffers of a parallelised module from safetensors files, in place.

    Every rank reads its own slices, so that no rank ever holds a whole tensor that is sharded, and nothing is
    communicated. Parameters and buffers on the meta device are allocated.

    Args:
        model: the result of `parallelize`. Tied parameters are filled from any of their names. The files are those of
            the whole model: every rank of a `PipelineModule` reads the tensors of its stages.
        paths: a file, several, an index (`model.safetensors.index.json`), or a folder with an index or files.
        strict: True if names that only the module or only the files have are an error; so are buffers on the meta
            device that are not persistent, which no file holds.
        device: the device of tensors that are on the meta device; by default the device type of the mesh.

    Returns:
        The names that only the module has, and those that only the files have.

    Raises:
        InputError: safetensors is not installed, a path is not valid, or names or shapes do not match. Nothing is
            changed then.
    """
    if isinstance(model, PipelineModule):
        return model.load_safetensors(paths, strict, device)
    return load_module(model, paths, strict=strict, device=device)


def full_tensor(tensor: DTensor) -> Tensor:
    """Gather one whole tensor from the ranks that hold its shards, such as a parameter, its gradient or an output.

    All ranks of the tensor's mesh call this together. Unlike `DTensor.full_tensor`, it is also right for a dim that
    several axes split into strided pieces, as they do a fused weight.

    Args:
        tensor: with the placements `Replicate`, `Shard` and `_StridedShard` of any dims, even or not.

    Returns:
        A plain tensor in memory of its own, of the global shape and dtype, on the rank's device, without autograd.

    Raises:
        InputError: the tensor is no `DTensor`, or is partial: shards are put together, and nothing is added up.
    """
    if not isinstance(tensor, DTensor):
        raise InputError(f"full_tensor gathers the shards of a DTensor, got a {type(tensor).__name__}.")
    if any(placement.is_partial() for placement in tensor.placements):
        raise InputError(
            f"full_tensor puts shards together, and the tensor is partial ({tensor.placements}): reduce it first, by "
            "tensor.redistribute(placements=...)."
        )
    return gather_full_tensor(tensor)


def full_state_dict(
    model: nn.Module, *, names: Container[str] | None = None, rank0_only: bool = True
) -> dict[str, Any]:
    """Gather the whole parameters and persistent buffers of a parallelised module to the CPU.

    All ranks call this together. In addition to the result, a device holds one whole tensor at a time. The result is
    that of `state_dict()` on one device, for `save_pretrained(..., state_dict=...)`, `torch.save` or `safetensors`.
    Tied parameters are one tensor. To resume training, use `torch.distributed.checkpoint`, which gathers nothing.

    Args:
        model: the result of `parallelize`; not a `PipelineModule`, whose ranks have different stages.
        names: the names to gather; all by default.
        rank0_only: True if only the first rank of the mesh gets the tensors, and the others an empty dict.

    Returns:
        Name -> whole tensor in separate CPU memory, with the parameter's global shape and dtype.

    Raises:
        InputError: the model is not parallelised, or is a pipeline, or a tensor is on the meta device.
    """
    _check_no_pipeline(model, "full_state_dict")
    return gather_state(model, names, rank0_only)


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> IncompatibleKeys:
    """Fill a parallelised module from whole tensors that the first rank of the mesh has, in place.

    All ranks call this together. The first rank sends one whole tensor at a time, and every rank keeps its part, also
    of strided shards. Parameters and buffers on the meta device are allocated. If every rank has the state,
    `model.load_state_dict(state)` sends nothing. To read files, use `load_safetensors`.

    Args:
        model: the result of `parallelize`; not a `PipelineModule`.
        state: on the first rank, name -> whole tensor of the global shape, on any device and of any dtype. Ignored on
            the others, which may pass None. Tied parameters are filled from any of their names.
        strict: True if names that only the module or only the state has are an error.
        device: the device of tensors that are on the meta device; by default the device type of the mesh.

    Returns:
        The names that only the module has, and those that only the state has.

    Raises:
        InputError: the model is not parallelised, or is a pipeline, or names or shapes do not match; on every rank.
            Nothing is changed then.
    """
    _check_no_pipeline(model, "load_full_state_dict")
    return load_state(model, state, strict, device)


def _check_accumulate(options: Options, may_have_pipeline: bool) -> None:
    if options.accumulate > 1 and may_have_pipeline:
        raise PlanError(
            f"accumulate={options.accumulate}: a pipeline adds up the gradients of its microbatches itself. Pass the "
            "whole batch, with pipeline=autoshard.Pipeline(microbatches=...); or a mesh without a pipeline axis."
        )


def _check_no_pipeline(model: nn.Module, function: str) -> None:
    if isinstance(model, PipelineModule):
        raise InputError(
            f"{function} is for modules that lie on all ranks, and every rank of a PipelineModule has stages of its "
            "own. Save and load it by torch.distributed.checkpoint, or read files by autoshard.load_safetensors."
        )
