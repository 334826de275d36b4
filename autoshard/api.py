"""The front door: `parallelize`, `plan` and `frontier`."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate
from torch.utils import _pytree as pytree

from autoshard import hints as hint_rules
from autoshard.arguments import check_examples, check_mesh, check_module, check_plain, check_plan
from autoshard.capture import outside_modes
from autoshard.capture.dynamic import Dynamic
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.recompute import recomputed
from autoshard.capture.twin import check_parameters
from autoshard.cluster.cluster import Cluster
from autoshard.errors import HintError, PlanError
from autoshard.frontier import Frontier
from autoshard.options import Hints, Options, Placements, check_options
from autoshard.partition.agree import from_first_rank, together
from autoshard.partition.checkpoint import install_hooks
from autoshard.partition.localize import Localizer
from autoshard.partition.module import Runtime, Tangents, check_constants, wants_gradient
from autoshard.partition.shards import replace_parameters, synchronize_buffers
from autoshard.partition.split import split
from autoshard.partition.steady import check_steady
from autoshard.partition.step import Program, Ranks
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.generic import generic_sizes
from autoshard.patterns.graph import GraphRules
from autoshard.plan import ShardingPlan
from autoshard.planner.frontier import frontier_plans
from autoshard.planner.planner import Planner
from autoshard.planner.problem import Wishes
from autoshard.planner.recompute import planned
from autoshard.progress import watched
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, padded_segments_of
from autoshard.specs.spec import Spec

_RUNTIME = "_autoshard_runtime"


def plan(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    memory_limit: int | str | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    optimizer_bytes_per_element: float | None = None,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    method: str = "auto",
    time_limit: float = 30.0,
    dynamic: Dynamic | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    recompute: str = "auto",
    effort: str = "full",
    work_limit: int | None = None,
    verbose: bool = False,
) -> ShardingPlan:
    """Decide how `module` should lie on `mesh`, and change nothing.

    Needs neither a process group nor the devices: the module may be on the meta device, the examples meta tensors.

    Args:
        module: the model; captured as it is (training or evaluation, frozen parameters).
        mesh: a `DeviceMesh`, or axis sizes such as `{"dp": 8, "tp": 8}`.
        example_args: positional arguments of a call, tensors of global shape.
        example_kwargs: keyword arguments of a call.
        hints: globs of parameter or module paths -> placements that the planner must keep.
        memory_limit: bytes per device (or `"24GiB"`) that the step's peak may reach.
        optimizer: what will train the model: a class of `torch.optim`, or a name such as `"adamw"` (the default),
            `"sgd"`, `"momentum"` or `"adafactor"`. Its state, and what it makes on the way through a step, is memory.
        optimizer_bytes_per_element: of an optimizer that is none of these, the state that it keeps for every element
            of a trained parameter.
        cluster: a preset's name, a path of a cluster file, or a `Cluster`; by default `"cpu"` for a CPU mesh and
            `"h100"` for everything else.
        inputs: `"global"`: every rank will pass whole tensors; `"local"`: its own shards, as a data loader yields them.
            Where the example's batch does not divide, shards may be of different lengths: those that `Shard` makes,
            the last ones shorter or empty; the ranks then tell each other the lengths at every call.
        input_placements: input path -> placements, for local inputs.
        output_placements: None: outputs come back whole; `"planned"`: as they lie, as DTensors; or a mapping of output
            paths to placements.
        method: `"auto"`, `"eliminate"`, `"alternate"` or `"ilp"`; or `"force"`, which keeps a memory limit by sharding
            the largest parameters (and recomputation) alone: a quicker search that finds slower plans, or none.
        time_limit: seconds that the search may take.
        dynamic: sizes that calls may change: for inputs by name, `{dim: name}`, such as
            `{"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}`; dims of one name have one size.
            In place of a name, a `torch.export.Dim` may limit the size, or make it a multiple (`8 * Dim("batch")`).
            Costs are those of the example's sizes. Other sizes are all served by the one plan; what an axis does
            not divide is padded, so that at most one axis splits such a dim.
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

    Returns:
        The plan.

    Raises:
        CaptureError: the module cannot be captured as one graph.
        HintError: a hint does not fit the module or the mesh.
        InputError: `dynamic` names no input, no dim, or sizes that the example cannot stand for.
        BudgetError: no plan fits `memory_limit`.
        PlanError: an option is none; the message names it.
        MeshError: the mesh is none.
        KeyboardInterrupt: Ctrl-C before there was any plan; later, the best one until then is returned, with a warning.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    shape = MeshShape.of(mesh)
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
        mp_policy=mp_policy,
        recompute=recompute,
        effort=effort,
        work_limit=work_limit,
        verbose=verbose,
    )
    start = time.perf_counter()
    graph = capture(module, args, kwargs, grad=torch.is_grad_enabled(), dynamic=dynamic, mp_policy=options.mp_policy)
    seconds = time.perf_counter() - start
    planner = _planner(module, graph, shape, options)
    return _planned(planner, seconds, options)


def _planned(planner: Planner, capture_seconds: float, options: Options) -> ShardingPlan:
    with watched(options.verbose) as planner.progress:
        return _told(planned(planner), capture_seconds, options)


def frontier(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
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
    start = time.perf_counter()
    graph = capture(module, args, kwargs, grad=torch.is_grad_enabled(), dynamic=dynamic, mp_policy=options.mp_policy)
    seconds = time.perf_counter() - start
    planner = _planner(module, graph, shape, options)
    with watched(options.verbose) as planner.progress:
        plans = frontier_plans(planner, gaps)
    return Frontier([_told(plan, seconds, options) for plan in plans])


def _told(result: ShardingPlan, capture_seconds: float, options: Options) -> ShardingPlan:
    """A plan with what the planner does not know of it."""
    return replace(
        result,
        timings={"capture": capture_seconds, **result.timings},
        hints=hint_rules.describe(options.hints),
        options={
            "inputs": options.inputs,
            "memory_limit": options.settings.memory_limit,
            "method": options.settings.method,
        },
    )


def _planner(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    options: Options,
    placed: Mapping[str, tuple[Placement, ...]] | None = None,
    placed_inputs: Mapping[str, tuple[Placement, ...]] | None = None,
) -> Planner:
    """A planner for one graph.

    Args:
        module, graph, mesh, options: what is planned, and how.
        placed: placements of parameters that are not to move.
        placed_inputs: placements in which local inputs were asked for before, and arrive.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    modules = [name for name, _ in module.named_modules()]
    pinned: dict[str, tuple[Placement | None, ...]] = {}
    if placed is None:
        pinned.update(hint_rules.resolve(options.hints, shapes, graph.aliases, modules, mesh))
    else:
        pinned.update({source.name: placed[source.name] for source in graph.inputs if source.name in placed})
    pinned.update(_input_pins(graph, mesh, options, placed_inputs or {}))
    planned = options.output_placements == "planned"
    wishes = Wishes(
        pinned=pinned,
        planned_outputs=planned,
        outputs={} if planned else _output_specs(graph, mesh, options.output_placements),
        local_inputs=options.inputs == "local",
    )
    return Planner(graph, mesh, options.cluster, wishes, options.settings)


def _input_pins(
    graph: JointGraph, mesh: MeshShape, options: Options, before: Mapping[str, tuple[Placement, ...]]
) -> dict[str, tuple[Placement | None, ...]]:
    shapes = {s.name: tuple(s.node.meta["val"].shape) for s in graph.inputs if s.kind == "input"}
    if options.input_placements and options.inputs == "global":
        raise PlanError('input_placements is for inputs="local": global inputs are sliced by the program, for free.')
    asked: dict[str, tuple[Placement | None, ...]] = {
        name: _spec_of(f"input_placements[{name!r}]", value, shapes[name], mesh).placements
        for name, value in options.input_placements.items()
        if _known(name, shapes, "input")
    }
    return {**{name: placements for name, placements in before.items() if name in shapes}, **asked}


def _output_specs(graph: JointGraph, mesh: MeshShape, wanted: Placements) -> dict[str, Spec]:
    shapes = {
        o.name: tuple(o.node.meta["val"].shape) for o in graph.outputs if o.kind == "output" and o.node is not None
    }
    if wanted is None or isinstance(wanted, str):
        return {}
    return {
        name: _spec_of(f"output_placements[{name!r}]", value, shapes[name], mesh)
        for name, value in wanted.items()
        if _known(name, shapes, "output")
    }


def _known(name: str, shapes: Mapping[str, Any], kind: str) -> bool:
    if name not in shapes:
        raise HintError(f"there is no {kind} {name!r}; the {kind}s are {', '.join(shapes) or 'none'}.")
    return True


def _spec_of(what: str, value: Any, shape: tuple[int, ...], mesh: MeshShape) -> Spec:
    placements = (value,) if isinstance(value, Placement) else tuple(value)
    if len(placements) > mesh.ndim:
        raise HintError(f"{what} has {len(placements)} placements, the mesh has the axes {mesh}.")
    try:
        spec = canonical(shape, Spec.of(*placements, *[Replicate()] * (mesh.ndim - len(placements))), mesh)
        padded_segments_of(shape, spec, mesh)
    except ValueError as error:
        raise HintError(f"{what} does not fit a tensor of shape {list(shape)}: {error}") from error
    return spec


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    memory_limit: int | str | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    optimizer_bytes_per_element: float | None = None,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    compile: bool = False,
    method: str = "auto",
    time_limit: float = 30.0,
    dynamic: Dynamic | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    recompute: str = "auto",
    effort: str = "full",
    work_limit: int | None = None,
    verbose: bool = False,
    plan: ShardingPlan | None = None,
) -> nn.Module:
    """Shard `module` over `mesh` in place, so that it trains there with the numbers that one device would give.

    The module stays the same object of the same class, with the same names; its parameters become `DTensor`s. Make the
    optimizer afterwards. Without examples the parameters are replicated at once, and planned and re-placed in place at
    the first call. Every further call signature (batch size, evaluation, keyword set) is captured and planned once,
    under the placements made.

    Args:
        module: the model; parameters may be on the meta device (see `materialize`).
        mesh: a `DeviceMesh` whose process group is initialised.
        compile: hand the local forward and backward programs to inductor.
        plan: apply this plan instead of making one.
        example_args, example_kwargs, hints, memory_limit, optimizer, optimizer_bytes_per_element, cluster, inputs,
            input_placements, output_placements, method, time_limit, dynamic, mp_policy, recompute, effort,
            work_limit, verbose: as for
            `autoshard.plan`.

    Returns:
        The module. `module.sharding_plan` is its plan.

    Raises:
        PlanError: the module is parallelised already, or `plan` is of another model or mesh.
        MeshError: `mesh` is no `DeviceMesh`, or larger than the world.
        CaptureError, HintError, BudgetError: as for `autoshard.plan`. Nothing was changed then.
    """
    _check(module, mesh)
    args, kwargs = check_examples(example_args, example_kwargs)
    shape = MeshShape.of(mesh)
    if plan is not None:
        check_plan(plan, module, shape)
    options = check_options(
        mesh.device_type,
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
        mp_policy=mp_policy,
        recompute=recompute,
        effort=effort,
        work_limit=work_limit,
        verbose=verbose,
    )
    parallelizer = _Parallelizer(module, mesh, options, compile, plan)
    parallelizer.start(args, kwargs)
    return module


def _check(module: object, mesh: object) -> None:
    check_module(module)
    check_mesh(mesh)
    assert isinstance(module, nn.Module)
    for name, part in module.named_modules():
        if _RUNTIME in part.__dict__:
            raise PlanError(
                f"{name or 'the module'} is parallelised already: parallelize works in place, once. Build the module "
                "anew to place it differently."
            )
    check_plain(module)


class _Parallelizer:
    """One parallelised module: makes the program of every call signature, and places parameters once."""

    def __init__(
        self, module: nn.Module, device_mesh: DeviceMesh, options: Options, compile: bool, plan: ShardingPlan | None
    ) -> None:
        self.module = module
        self.device_mesh = device_mesh
        self.mesh = MeshShape.of(device_mesh)
        self.options = options
        self.compile = compile
        self.plan = plan
        self.placed: dict[str, tuple[Placement, ...]] | None = None
        self.runtime = Runtime(module, device_mesh, self.prepare, options.inputs, options.dynamic)
        self.runtime.planned_outputs = options.output_placements is not None

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan and place now if there is an example call, else replicate and plan at the first call."""
        if args or kwargs:
            self.runtime.serve(args, kwargs, torch.is_grad_enabled() and wants_gradient(self.module, args, kwargs))
        else:
            check_parameters(self.module)
            whole = Spec.replicated(self.mesh.ndim)
            replace_parameters(
                self.module, {name: whole for name, _ in self.module.named_parameters()}, self.device_mesh
            )
            self.module.sharding_plan = None  # type: ignore[assignment]
        synchronize_buffers(self.module, self.device_mesh)
        install_hooks(self.module)
        self.runtime.install()
        self.module.__dict__[_RUNTIME] = self.runtime

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
        tangents: Tangents,
        signature: Hashable,
        dynamic: bool,
    ) -> tuple[JointGraph, Program]:
        """Graph and program of one call."""
        device = torch.device(self.device_mesh.device_type)
        graph, planner, seconds = together(
            self.device_mesh, lambda: self._capture(args, kwargs, grad, tangents, dynamic, device)
        )
        decided = self._decide(graph, planner, seconds)
        rules = planner.rules
        if decided.recomputed:
            rules = GraphRules(recomputed(graph, decided.recomputed), self.mesh)
        flow = Flow(rules, Decisions.from_data(decided.decisions), self.mesh)
        ranks = Ranks(self.device_mesh, device)
        with outside_modes():
            step = Localizer(flow, planner.resharder, ranks.groups).run()
            if graph.dynamic is not None:
                others = generic_sizes(flow.graph, self.mesh, flow.rules.generic)
                check_steady(step, Localizer(flow, planner.resharder, ranks.groups, others).run(), others)
            halves = split(step, self.compile)
        if self.placed is None:
            self._place(decided)
        self.runtime.know_inputs(step.inputs)
        general = None
        if grad and tangents != "all" and not _differentiates_all(graph):
            like_args, like_kwargs = pytree.tree_map_only(torch.Tensor, _without_numbers, (args, kwargs))

            def general() -> Program:
                return self.runtime.prepare(like_args, like_kwargs, grad, "all", signature, dynamic).program

        return graph, Program(step, halves, ranks, general)

    def _capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
        tangents: Tangents,
        dynamic: bool,
        device: torch.device,
    ) -> tuple[JointGraph, Planner, float]:
        """The graph of one call, its planner, and the seconds that the capture took."""
        start = time.perf_counter()
        sizes = self.options.dynamic if dynamic else None
        graph = capture(
            self.module,
            args,
            kwargs,
            grad=grad,
            device=device,
            tangents=tangents,
            dynamic=sizes,
            mp_policy=self.options.mp_policy,
        )
        check_constants(graph, self.module)
        seconds = time.perf_counter() - start
        known = self.runtime.input_placements if self.options.inputs == "local" else {}
        return graph, _planner(self.module, graph, self.mesh, self.options, self.placed, known), seconds

    def _decide(self, graph: JointGraph, planner: Planner, seconds: float) -> ShardingPlan:
        """The plan given by the user for the first call; else the first rank's."""
        held = {
            name: tuple(source.node.meta["val"].shape)
            for source in graph.inputs
            if source.kind in ("parameter", "buffer")
            for name in graph.aliases[source.name]
        }
        decided = self.plan if self.placed is None else None
        if decided is None:
            text = from_first_rank(self.device_mesh, lambda: _planned(planner, seconds, self.options).to_json())
            decided = ShardingPlan.from_json(text)
        together(self.device_mesh, lambda: decided.check(self.mesh, graph.fingerprint, held))
        return decided

    def _place(self, decided: ShardingPlan) -> None:
        whole = Spec.replicated(self.mesh.ndim).placements
        specs = {name: Spec.of(*decided.placements.get(name, whole)) for name, _ in self.module.named_parameters()}
        replace_parameters(self.module, specs, self.device_mesh)
        self.placed = dict(decided.placements)
        self.module.sharding_plan = decided  # type: ignore[assignment]


def _differentiates_all(graph: JointGraph) -> bool:
    """Whether the program of a graph starts its backward half from every output."""
    return len(graph.tangent_outputs) == sum(output.kind == "output" for output in graph.outputs)


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
