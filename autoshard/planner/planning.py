"""The planners of captured calls of a module, and their plans.

During planning only new objects are garbage-collected: see `freeze_older_objects`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.depth import capture_repeated
from autoshard.capture.joint import CaptureOptions, JointGraph, Tangents, capture_call
from autoshard.capture.recomputation import captured_step, graph_of_plan, recompute_layers
from autoshard.names import matching_paths
from autoshard.operators.large_losses.loss_in_pieces import is_in_pieces
from autoshard.options.placements import unknown_name_error
from autoshard.options.target import Target
from autoshard.patterns.parts import Loop, with_unequal_loops
from autoshard.planner import hints as hint_rules
from autoshard.planner.budget_search import ShortfallError
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.explorer import Explorer, check_host
from autoshard.planner.planner import Planner
from autoshard.planner.progress_line import Progress, show_progress
from autoshard.planner.recompute_option import names_by_option
from autoshard.planner.regions import with_regions
from autoshard.planner.subject import subject_of, work_of
from autoshard.planner.target_constraints import PinsByName, PlacementsByName, constraints_for, shared_axis
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.solver.solver_budget import Budget
from autoshard.specs.axes import MeshShape

_YOUNG_THRESHOLD = 10_000  # new objects between two collections of the youngest generation: most are long-lived
_MIDDLE_THRESHOLD = 400  # collections of the youngest generation between two of the middle one


@contextlib.contextmanager
def freeze_older_objects() -> Iterator[None]:
    """Context in which garbage collections are rarer and ignore the objects that existed before it.

    Nothing changes if objects are already frozen (`gc.freeze`), also by an outer one of these contexts, or if
    collections are already rare, or off.
    """
    # A captured step and torch itself have millions of long-lived objects. Traversing them each time that planning has
    # made many more would take a good part of planning's time, and would find nothing.
    young, middle, old = gc.get_threshold()
    # An inner context is known by the threshold, since `get_freeze_count` counts all frozen objects one by one.
    if not 0 < young < _YOUNG_THRESHOLD or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, max(middle, _MIDDLE_THRESHOLD), old)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


def capture_with_progress(
    call: BoundCall,
    target: Target,
    *,
    devices: int,
    logits_room: float | None = None,
    tangents: Tangents = "loss",
    dynamic: bool = True,
    by_layers: bool = False,
    quiet: bool = False,
    first: bool = True,
) -> tuple[JointGraph, float]:
    """Return the graph of a call and the seconds of its capture, and show its progress on a terminal.

    The graph has the recomputation, saving and offloading that hints and the model's code ask for.

    Args:
        call: as for `capture_call`.
        devices, logits_room, tangents: as for `CaptureOptions`.
        target: the options.
        dynamic: True to make the sizes dynamic that the options name.
        by_layers: True to capture a few of many equal layers, for a graph that is planned and not run.
        quiet: True to show nothing, if another rank captures the same.
        first: True if no training call of the module was captured before; later ones may lack unread outputs.

    Raises:
        CaptureError, InputError: as for `capture`.
        HintError: as for `with_regions`; the first training call has no output of a name in `unread_outputs`.
    """
    start = time.perf_counter()
    line = show_progress(target.options.search.verbose, f"capture of {type(call.module).__name__}")
    with contextlib.nullcontext() if quiet else line as report:

        def report_part(part: str) -> None:
            if report is not None:
                report(Progress(part, math.inf, -math.inf, time.perf_counter() - start))

        options = CaptureOptions(
            tangents=tangents,
            dynamic=target.dynamic if dynamic else None,
            mp_policy=target.options.mp_policy,
            devices=devices,
            logits_room=logits_room,
            unread_outputs=target.options.unread_outputs,
            progress=report_part,
        )
        graph = capture_repeated(call, options) if by_layers else capture_call(call, options)
    if first and graph.unread is not None:
        _check_unread_outputs(graph.unread, graph, target.options.unread_outputs)
    graph = with_regions(graph, target.hints, [name for name, _ in call.module.named_modules()])
    return graph, time.perf_counter() - start


def _check_unread_outputs(unread: Collection[str], graph: JointGraph, globs: Sequence[str]) -> None:
    for glob in globs:
        if not matching_paths(glob, unread):
            raise unknown_name_error("output", glob, [*unread, *graph.tensor_outputs])


@dataclass(eq=False)
class CapturedCall:
    """A captured call.

    Attributes:
        graph: the captured step.
        seconds: the time of its capture.
        mesh: the mesh axes.
        target: the options of the user.
        planner_cache: makes planners, which share their tables of operators and tensors.
        placed: fixed placements of parameters and buffers; None for the first call of a module.
        input_pins: the placements of some inputs, None where the planner decides. Other global inputs are whole.
        deadline: the time at which searches for its plans end, if their own time limit does not end them before.
        is_explained: False to skip the search, which takes time, for what would help if no plan fits.
        capture_other: captures the call once more, with whole losses if the graph has them in pieces, and vice versa;
            None if there is no choice.
    """

    graph: JointGraph
    seconds: float
    mesh: MeshShape
    target: Target
    planner_cache: PlannerCache
    placed: PlacementsByName | None = None
    input_pins: PinsByName = field(default_factory=dict)
    deadline: float = math.inf
    is_explained: bool = True
    capture_other: Callable[[], CapturedCall] | None = None
    _planners: list[Planner] = field(default_factory=list)
    _in_parts: dict[Hashable, JointGraph] = field(default_factory=dict)

    @cached_property
    def other_form(self) -> CapturedCall:
        """The call with its losses in the other form."""
        assert self.capture_other is not None, "there is a choice"
        return self.capture_other()

    @property
    def is_in_pieces(self) -> bool:
        """True if the graph has a loss in pieces."""
        return is_in_pieces(self.graph.graph)

    @property
    def unlimited_seconds(self) -> float:
        """Seconds of the fastest step that was found without a memory limit; infinite if none was searched for."""
        return min((planner.unlimited_seconds for planner in self._planners), default=math.inf)

    @property
    def was_interrupted(self) -> bool:
        """True if Ctrl-C ended a search for its plans."""
        return any(planner.interrupted for planner in self._planners)

    def form_of(self, plan: ShardingPlan) -> CapturedCall:
        """Return the call with its losses as a plan has them: whole, or in pieces."""
        is_other = self.capture_other is not None and plan.is_in_pieces != self.is_in_pieces
        return self.other_form if is_other else self

    def graph_in_parts(self, loops: Sequence[Loop], parts: int) -> JointGraph:
        """Return the graph with some loops in equal parts, so that ranks can take unequal numbers of them; cached.

        Raises:
            RuleError: an argument of an operator is the former size of a dim.
        """
        key = tuple(loops), parts
        if key not in self._in_parts:
            split = with_unequal_loops(captured_step(self.graph), self.mesh, loops, parts)
            self._in_parts[key] = graph_of_plan(split, self.graph.recomputed, self.graph.offloaded)
        return self._in_parts[key]

    def planner_of(self, target: Target, graph: JointGraph | None = None) -> Planner:
        """Return the planner of the graph for the prices and limits of a target; cached.

        Args:
            target: the target of the plan.
            graph: the graph with dims in equal parts, instead of the captured one.

        Raises:
            HintError: a hint does not fit the module or the mesh.
        """
        graph = self.graph if graph is None else graph
        # A planner depends on nothing else of a target: all targets of a call have the same other options.
        prices = shared_axis(graph, self.mesh, target), target.cluster, target.settings
        for planner in self._planners:
            if planner.graph is graph and planner.price_key == prices:
                return planner
        planner = self.planner_cache.of(graph, target, self.placed, self.input_pins)
        if self.deadline < planner.budget.deadline:
            planner.budget = Budget(self.deadline)
        self._planners.append(planner)
        return planner


@freeze_older_objects()
def planner_for(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    target: Target,
    placed: PlacementsByName | None = None,
    input_pins: PinsByName | None = None,
    like: Planner | None = None,
) -> Planner:
    """Return a planner for a call of a module; arguments as for `constraints_for` and `Planner`."""
    constraints = constraints_for(module, graph, mesh, target, placed, input_pins)
    return Planner(graph, mesh, target.cluster, constraints, target.settings, like=like)


class PlannerCache:
    """Planners of the calls of one module on one mesh, which share their tables of operators and tensors.

    Args:
        module: the module.
        mesh: the mesh axes.
    """

    def __init__(self, module: nn.Module, mesh: MeshShape) -> None:
        self.module = module
        self.mesh = mesh
        self._first_planners: list[Planner] = []  # the first planner for every set of prices

    def of(
        self,
        graph: JointGraph,
        target: Target,
        placed: PlacementsByName | None = None,
        input_pins: PinsByName | None = None,
    ) -> Planner:
        """Return a new planner for a graph; arguments as for `constraints_for`."""
        prices = shared_axis(graph, self.mesh, target), target.cluster, target.settings
        like = next((planner for planner in self._first_planners if planner.price_key == prices), None)
        planner = planner_for(self.module, graph, self.mesh, target, placed, input_pins, like)
        if like is None:
            self._first_planners.append(planner)
        return planner

    def forget(self) -> None:
        """Drop the results of searches, which hold much memory; keep the tables that serve other planners."""
        for planner in self._first_planners:
            planner.forget()

    def for_module(self, module: nn.Module) -> PlannerCache:
        """Return a cache for a copy of the module, with the same first planners."""
        cache = copy.copy(self)
        cache.module = module
        return cache


@freeze_older_objects()
def run_planner(
    planner: Planner,
    capture_seconds: float,
    target: Target,
    unlimited: CandidatePlan | None = None,
    *,
    explained: bool = True,
) -> ShardingPlan:
    """Return the plan of a planner, and show the progress of the search on a terminal.

    Args:
        planner, unlimited, explained: as for `plan_with_recompute`.
        capture_seconds: the time of the graph's capture.
        target: the target of the planner.
    """
    with show_progress(target.options.search.verbose) as planner.progress:
        plan = plan_with_recompute(planner, unlimited, explained=explained)
    check_host(plan.memory.host, planner)
    return with_provenance(plan, planner, capture_seconds, target)


def with_provenance(plan: ShardingPlan, planner: Planner, capture_seconds: float, target: Target) -> ShardingPlan:
    """Return a plan with a record of its capture, hints and options."""
    # A primitive of one device has no axes.
    task_graphs = {
        str(primitive): " x ".join(planner.mesh.names[axis] for axis in axes) or "one device"
        for primitive, axes in planner.constraints.task_graphs.items()
    }
    # `PlanContents` reads the shares and the limit; the other entries are for people.
    options: dict[str, Any] = {
        "inputs": target.inputs,
        "memory_limit": target.settings.memory_limit,
        "method": target.settings.method,
    }
    if isinstance(target.shares, Mapping):
        options["shares"] = {axis: list(counts) for axis, counts in target.shares.items()}
    if target.options.accumulate > 1:
        options["accumulate"] = target.options.accumulate
    options["subject"] = subject_of(planner.graph, target)
    options["work"] = work_of(planner.graph, planner.rules, target.cluster, planner.mesh)
    if planner.constraints.planned_outputs:
        options["output_placements"] = "planned"
    if target.options.unread_outputs:
        options["unread_outputs"] = list(target.options.unread_outputs)
    return replace(
        plan,
        timings={"capture": capture_seconds, **plan.timings},
        hints={**hint_rules.describe(target.hints), **task_graphs},
        options=options,
    )


def plan_with_recompute(
    planner: Planner, unlimited: CandidatePlan | None = None, *, explained: bool = True
) -> ShardingPlan:
    """Return the plan of a graph, with recomputation as the planner's settings say.

    Args:
        planner: the planner of the graph.
        unlimited: the plan without the memory limit and without recomputation, if it is known.
        explained: True to find out, which takes time, what would help if no plan fits.

    Raises:
        BudgetError: no plan that was found fits the memory limit; the message names the smallest peak, and what would
            make it smaller.
    """
    explorer = explorer_for(planner)
    try:
        # The plan without a limit is for the same graph, unless layers are always recomputed.
        return explorer.plan(unlimited if explorer.planner is planner else None)
    except ShortfallError as shortfall:
        if not explained:
            raise
        raise shortfall.with_remedies() from None
    finally:
        planner.unlimited_seconds = explorer.planner.unlimited_seconds


def explorer_for(planner: Planner) -> Explorer:
    """Return the explorer for a planner's graph, with recomputation as its settings say."""
    names = names_by_option(planner)
    may_rerun = planner.settings.recompute == "auto"
    return Explorer(recomputing_planner(planner, names) if names else planner, may_rerun=may_rerun)


def recomputing_planner(planner: Planner, names: Collection[str]) -> Planner:
    """Return a planner of the same step with the layers or operators of these names recomputed."""
    start = time.perf_counter()
    graph = recompute_layers(planner.graph, names)
    recomputing = Planner(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
    planner.timings["patterns"] = planner.timings.get("patterns", 0.0) + time.perf_counter() - start
    recomputing.timings = planner.timings  # both work on one plan
    return recomputing
