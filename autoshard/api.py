"""The front door: `parallelize` and `plan`."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.utils import _pytree as pytree

from autoshard import hints as hint_rules
from autoshard.arguments import check_examples, check_mesh, check_module, check_plain, check_plan
from autoshard.capture import outside_modes
from autoshard.capture.dynamic import Dynamic
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.twin import check_parameters
from autoshard.cluster.cluster import Cluster
from autoshard.errors import HintError, PlanError
from autoshard.memory.budget import parse_bytes
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
from autoshard.plan import ShardingPlan
from autoshard.planner.planner import METHODS, Planner, Settings
from autoshard.planner.problem import Wishes
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, padded_segments_of
from autoshard.specs.spec import Spec

Hints = Mapping[str, Any]
Placements = Mapping[str, Any] | Literal["planned"] | None

_RUNTIME = "_autoshard_runtime"


@dataclass(frozen=True, slots=True)
class Options:
    """The planning options of `parallelize` and `plan`, checked."""

    hints: Hints | None
    memory_limit: int | None
    optimizer_bytes_per_element: float
    cluster: Cluster
    inputs: Literal["global", "local"]
    input_placements: Mapping[str, Any] = field(default_factory=dict)
    output_placements: Placements = None
    method: str = "auto"
    time_limit: float = 30.0
    dynamic: Dynamic | None = None

    def settings(self) -> Settings:
        return Settings(self.memory_limit, self.optimizer_bytes_per_element, self.method, self.time_limit)


def _options(
    mesh: MeshShape,
    device_type: str | None,
    hints: Hints | None,
    memory_limit: int | str | None,
    optimizer_bytes_per_element: float,
    cluster: str | Cluster | None,
    inputs: str,
    input_placements: Mapping[str, Any] | None,
    output_placements: Placements,
    method: str,
    time_limit: float,
    dynamic: Dynamic | None,
) -> Options:
    if inputs not in ("global", "local"):
        raise PlanError(
            f'inputs={inputs!r}: choose "global" (every rank passes whole tensors) or "local" (its shards).'
        )
    if method not in METHODS:
        raise PlanError(f"method={method!r} is unknown: choose one of {', '.join(METHODS)}.")
    if isinstance(output_placements, str) and output_placements != "planned":
        raise PlanError(f'output_placements={output_placements!r}: pass "planned" or a mapping of output names.')
    if not time_limit > 0:
        raise PlanError(f"time_limit={time_limit!r}: it must be above zero seconds.")
    if not optimizer_bytes_per_element >= 0:
        raise PlanError(
            f"optimizer_bytes_per_element={optimizer_bytes_per_element!r}: it is what the optimizer keeps for every "
            "element of a trained parameter, such as 8 for Adam in float32, 4 for momentum, 0 for plain SGD."
        )
    default = "cpu" if device_type == "cpu" else "h100"
    return Options(
        hints=hints,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        optimizer_bytes_per_element=optimizer_bytes_per_element,
        cluster=Cluster.of(default if cluster is None else cluster),
        inputs=inputs,  # type: ignore[arg-type]
        input_placements=dict(input_placements or {}),
        output_placements=output_placements,
        method=method,
        time_limit=time_limit,
        dynamic=dynamic,
    )


def plan(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    hints: Hints | None = None,
    memory_limit: int | str | None = None,
    optimizer_bytes_per_element: float = 8,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    method: str = "auto",
    time_limit: float = 30.0,
    dynamic: Dynamic | None = None,
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
        optimizer_bytes_per_element: optimizer state per trained parameter element; 8 is Adam's two float32.
        cluster: a preset's name, a path of a cluster file, or a `Cluster`; by default `"cpu"` for a CPU mesh and
            `"h100"` for everything else.
        inputs: `"global"`: every rank will pass whole tensors; `"local"`: its own shards, as a data loader yields them.
            Where the example's batch does not divide, shards may be of different lengths: those that `Shard` makes,
            the last ones shorter or empty; the ranks then tell each other the lengths at every call.
        input_placements: input path -> placements, for local inputs.
        output_placements: None: outputs come back whole; `"planned"`: as they lie, as DTensors; or a mapping of output
            paths to placements.
        method: `"auto"`, `"eliminate"`, `"alternate"` or `"ilp"`.
        time_limit: seconds that the search may take.
        dynamic: sizes that calls may change: for inputs by name, `{dim: name}`, such as
            `{"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}`; dims of one name have one size.
            In place of a name, a `torch.export.Dim` may limit the size, or make it a multiple (`8 * Dim("batch")`).
            Costs are those of the example's sizes. Other sizes are all served by the one plan; what an axis does
            not divide is padded, so that at most one axis splits such a dim.

    Returns:
        The plan.

    Raises:
        CaptureError: the module cannot be captured as one graph.
        HintError: a hint does not fit the module or the mesh.
        InputError: `dynamic` names no input, no dim, or sizes that the example cannot stand for.
        BudgetError: no plan fits `memory_limit`.
        MeshError: the mesh is none.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    shape = MeshShape.of(mesh)
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    options = _options(
        shape, device_type, hints, memory_limit, optimizer_bytes_per_element, cluster, inputs, input_placements,
        output_placements, method, time_limit, dynamic,
    )  # fmt: skip
    start = time.perf_counter()
    graph = capture(module, args, kwargs, grad=torch.is_grad_enabled(), dynamic=dynamic)
    seconds = time.perf_counter() - start
    planner = _planner(module, graph, shape, options)
    return _planned(planner, seconds, options)


def _planned(planner: Planner, capture_seconds: float, options: Options) -> ShardingPlan:
    result = planner.plan()
    return replace(
        result,
        timings={"capture": capture_seconds, **result.timings},
        hints=hint_rules.describe(options.hints),
        options={"inputs": options.inputs, "memory_limit": options.memory_limit, "method": options.method},
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
    return Planner(graph, mesh, options.cluster, wishes, options.settings())


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
    optimizer_bytes_per_element: float = 8,
    cluster: str | Cluster | None = None,
    inputs: str = "global",
    input_placements: Mapping[str, Any] | None = None,
    output_placements: Placements = None,
    compile: bool = False,
    method: str = "auto",
    time_limit: float = 30.0,
    dynamic: Dynamic | None = None,
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
        example_args, example_kwargs, hints, memory_limit, optimizer_bytes_per_element, cluster, inputs,
            input_placements, output_placements, method, time_limit, dynamic: as for `autoshard.plan`.

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
    options = _options(
        shape, mesh.device_type, hints, memory_limit, optimizer_bytes_per_element, cluster, inputs, input_placements,
        output_placements, method, time_limit, dynamic,
    )  # fmt: skip
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
        flow = Flow(planner.rules, Decisions.from_data(decided.decisions), self.mesh)
        ranks = Ranks(self.device_mesh, device)
        with outside_modes():
            step = Localizer(flow, planner.resharder, ranks.groups).run()
            if graph.dynamic is not None:
                others = generic_sizes(graph, self.mesh, flow.rules.generic)
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
        graph = capture(self.module, args, kwargs, grad=grad, device=device, tangents=tangents, dynamic=sizes)
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
