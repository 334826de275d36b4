"""`compare`: a plan beside standard layouts, which hints force, at the same prices and on one captured graph."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.marks import assign_task_graphs, defaults_of
from autoshard.capture.recomputation import recomputable
from autoshard.compare.comparison import PLAN, ComparedLayout, Comparison, NearestLayout
from autoshard.compare.flags import Job, fsdp2_code, megatron_flags, torchtitan_flags
from autoshard.compare.layouts import NAMES, Hints, StandardLayout, StandardLayouts
from autoshard.errors import AutoshardError, BudgetError, PlanError
from autoshard.names import suggestion
from autoshard.options import OptionKeywords, collect_options
from autoshard.options.target import Target
from autoshard.patterns.graph_rules import Value
from autoshard.pipeline.run.pipeline_module import resolve_pipeline
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planner import Planner
from autoshard.planner.planning import (
    CapturedCall,
    freeze_older_objects,
    planner_for,
    recomputing_planner,
    run_planner,
    with_provenance,
)
from autoshard.planner.planning_context import CandidatePlan
from autoshard.planner.regather import regather_parameters
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.arguments import check_examples, check_module
from autoshard.specs.axes import MeshShape

Baselines = Sequence[str] | Mapping[str, Mapping[str, Any]]


def compare(
    module: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    baselines: Baselines | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Comparison:
    """Compare the plan of `module` on `mesh` with standard layouts, and name the nearest of them.

    The standard layouts are DDP, FSDP2 (parameters gathered for each half of the step) and FSDP2 whole (gathered once),
    HSDP, Megatron-LM's tensor parallelism with and without sequence parallelism, its products with these, and expert
    parallelism. Each is planned by the same planner, under hints that leave it next to nothing to choose, at the same
    prices. The model is captured once; neither a process group nor the devices are needed.

    A standard layout that does not fit recomputes all its layers, as `recompute` allows. With `recompute="full"` all
    do.

    Args:
        module, mesh, example_args, example_kwargs: as for `autoshard.plan`.
        baselines: names of the standard layouts to compare with, by default all that the mesh has; or a mapping with
            layouts of one's own beside all of these: `{"mine": {"hints": {...}}}`.
        **keywords: the fields of `autoshard.Options`, without `dynamic`, `inputs`, `input_placements`, `shares`
            and `pipeline`. By default `memory_limit` is what a device has, and outputs come back as they lie
            (`output_placements="planned"`), since no standard layout gathers them. `hints` are of the plan alone.

    Returns:
        The comparison, which prints as a table; `comparison.nearest` has the flags for other tools.

    Raises:
        PlanError: a baseline is unknown, an option is not valid, or an axis of the mesh is a pipeline.
        CaptureError, HintError, InputError, MeshError, TypeError: as for `autoshard.plan`.
    """
    start = time.perf_counter()
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    shape = MeshShape.of(mesh)
    options = collect_options("compare", keywords)
    names, own = _parse_baselines(baselines)
    if resolve_pipeline(shape, options.pipeline) is not None:
        raise PlanError("compare plans no pipelines, and the axis pp is one: give it another name.")
    target = Target.of(options, mesh.device_type if isinstance(mesh, DeviceMesh) else None)
    limit = target.settings.memory_limit or target.cluster.device.memory
    target = replace(target, settings=replace(target.settings, memory_limit=limit))
    planner = ModulePlanner(module, shape, target)
    call = planner.capture(args, kwargs, grad=torch.is_grad_enabled())
    layouts = [ComparedLayout(PLAN, "plan", _plan(planner, call), hints=target.hints or {})]
    layout_planner = LayoutPlanner(module, call, target)
    standard = layout_planner.standard
    rows = {name: layout_planner.compare_standard(name) for name in (standard.names if names is None else names)}
    layouts += [row for row, _ in rows.values()]
    layouts += [layout_planner.compare_own(name, hints) for name, hints in own.items()]
    nearest = _nearest(layouts[0].made, rows, limit)
    flags = None if nearest is None else layout_planner.flags(*nearest)
    seconds = time.perf_counter() - start
    return Comparison(shape, target.cluster.name, limit, tuple(layouts), flags, seconds)


def _parse_baselines(baselines: Baselines | None) -> tuple[tuple[str, ...] | None, dict[str, Hints]]:
    """Return the names of standard layouts, None for all, and the hints of the user's own.

    Raises:
        PlanError: a name is unknown, or a layout of the user is not valid.
    """
    if baselines is None:
        return None, {}
    if isinstance(baselines, Mapping):
        for name, options in baselines.items():
            if name in NAMES or name == PLAN:
                raise PlanError(f"baselines={{{name!r}: ...}}: a layout of your own needs a name of its own.")
            if not isinstance(options, Mapping) or set(options) != {"hints"}:
                raise PlanError(f'baselines: {name!r} is {options!r}: give its hints, as in {{"hints": {{...}}}}.')
        return None, {name: options["hints"] for name, options in baselines.items()}
    if isinstance(baselines, str):
        baselines = (baselines,)
    for name in baselines:
        if name not in NAMES:
            raise PlanError(f"baselines: there is no standard layout {name!r}. {suggestion(str(name), NAMES)}")
    return tuple(dict.fromkeys(baselines)), {}


def _plan(planner: ModulePlanner, call: CapturedCall) -> ShardingPlan:
    """Return the plan within the memory limit; if none fits, the one without a limit."""
    try:
        return planner.plan(call)
    except BudgetError:
        target = replace(planner.target, settings=replace(planner.target.settings, memory_limit=None))
        return run_planner(call.planner_of(target), call.seconds, target)


class LayoutPlanner:
    """Plans layouts of one captured call, under hints.

    Args:
        module: the model.
        call: a call of it.
        target: the options of the comparison; its memory limit is that of all layouts.
    """

    def __init__(self, module: nn.Module, call: CapturedCall, target: Target) -> None:
        self.module = module
        self.call = call
        self.target = target
        # All layouts share the tables of operators and tensors of the first planner.
        self.first = call.planner_of(target)
        self.standard = StandardLayouts(self.first.rules, call.mesh)

    def compare_standard(self, name: str) -> tuple[ComparedLayout, StandardLayout | None]:
        """Return a standard layout with its plan, or with the reason why it cannot be had."""
        try:
            layout = self.standard.make(name)
            return ComparedLayout(name, "standard", self._plan_standard(layout), hints=layout.hints), layout
        except AutoshardError as error:
            return ComparedLayout(name, "standard", reason=str(error)), None

    def compare_own(self, name: str, hints: Hints) -> ComparedLayout:
        """Return a layout of the user with its plan, or with the reason why it cannot be had."""
        target = replace(self.target, hints=hints)
        try:
            plan = run_planner(self._planner(target), self.call.seconds, target, explained=False)
        except AutoshardError as error:
            return ComparedLayout(name, "own", reason=str(error), hints=hints)
        return ComparedLayout(name, "own", plan, hints=hints)

    @freeze_older_objects()
    def _plan_standard(self, layout: StandardLayout) -> ShardingPlan:
        # There is next to nothing to choose: the first solution is taken, and memory follows from the layout.
        settings = replace(self.target.settings, effort="fast", memory_limit=None)
        target = replace(self.target, hints=layout.hints, settings=settings)
        recompute, limit = self.target.settings.recompute, self.target.settings.memory_limit
        planner = self._planner(target)
        candidate = self._solve(planner, layout)
        assert limit is not None, "a comparison has a limit: at least what a device has"
        if recompute == "full" or (recompute == "auto" and candidate.memory.peak > limit):
            layers = recomputable(planner.graph)
            if layers:
                planner = recomputing_planner(planner, [layer.name for layer in layers])
                candidate = self._solve(planner, layout)
        return with_provenance(planner.describe(candidate), planner, self.call.seconds, self.target)

    def _solve(self, planner: Planner, layout: StandardLayout) -> CandidatePlan:
        candidate = planner.solve(planner.constraints)
        if not layout.regathers:
            return candidate
        decisions = regather_parameters(planner.rules, candidate.decisions)
        # Only reshards differ: of the parameters that are gathered once more.
        once, twice = (
            sum(reshard.path.seconds for reshard in planner.account(each).reshards)
            for each in (candidate.decisions, decisions)
        )
        return planner.evaluate(decisions, candidate.cost - once + twice, candidate.lower_bound, candidate.method)

    def _planner(self, target: Target) -> Planner:
        graph = self.call.graph
        # The hints of the layout before have marked the operators of the graph.
        assign_task_graphs(graph.graph, defaults_of(self.module))
        return planner_for(self.module, graph, self.call.mesh, target, like=self.first)

    def flags(self, layout: StandardLayout, plan: ShardingPlan, reference: ShardingPlan, fits: bool) -> NearestLayout:
        """Return a standard layout with its flags, and its loss beside the plan."""
        layers = self.first.rules.parameter_layers.values()
        inputs = self.first.rules.batch_inputs()
        job = Job(
            layout=layout,
            mesh=self.call.mesh,
            samples=Value(inputs[0]).meta.shape[0] if inputs else 1,
            recomputes=bool(plan.recomputed),
            modules={path: type(part) for path, part in self.module.named_modules()},
            layers=tuple(dict.fromkeys(layer for layer in layers if layer.rpartition(".")[2].isdigit())),
        )
        lost = plan.step_seconds - reference.step_seconds
        return NearestLayout(
            layout.name,
            lost,
            100 * lost / reference.step_seconds,
            fits,
            torchtitan_flags(job),
            megatron_flags(job),
            fsdp2_code(job),
        )


def _nearest(
    reference: ShardingPlan, rows: Mapping[str, tuple[ComparedLayout, StandardLayout | None]], limit: int
) -> tuple[StandardLayout, ShardingPlan, ShardingPlan, bool] | None:
    """Return the arguments of `LayoutPlanner.flags` for the nearest standard layout; None if there is none."""
    made = [(layout, row.plan) for row, layout in rows.values() if layout is not None and row.plan is not None]
    if not made:
        return None
    fitting = [pair for pair in made if pair[1].memory.peak <= limit]
    if fitting:
        layout, plan = min(fitting, key=lambda pair: (pair[1].step_seconds, pair[1].memory.peak))
    else:
        layout, plan = min(made, key=lambda pair: pair[1].memory.peak)
    return layout, plan, reference, bool(fitting)
