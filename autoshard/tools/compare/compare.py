"""`compare`: a plan beside standard layouts, which hints force, at the same prices and on one captured graph."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import AutoshardError, MeshShape, PlanError, ShardingPlan, check_options
from autoshard.names import suggestion
from autoshard.options import Hints, OptionKeywords
from autoshard.planner.layouts.compared_layouts import plan_for_comparison
from autoshard.planner.layouts.layout_planner import LayoutPlanner
from autoshard.planner.layouts.standard_layouts import NAMES, StandardLayout
from autoshard.runtime.arguments import check_examples, check_module
from autoshard.tools.compare.comparison import PLAN, ComparedLayout, Comparison, NearestLayout
from autoshard.tools.compare.flags import Job, fsdp2_code, megatron_flags, torchtitan_flags

BASELINES = NAMES
"""The names of all standard layouts."""

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
    do, and with `"selective"` all recompute what is cheap of them.

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
    options = check_options("compare", mesh, **keywords)
    names, own = _parse_baselines(baselines)
    if options.pipeline.axis is not None:
        raise PlanError("compare plans no pipelines, and the axis pp is one: give it another name.")
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    plan, layout_planner = plan_for_comparison(module, shape, args, kwargs, options, device_type)
    limit = layout_planner.target.settings.memory_limit
    assert limit is not None, "a device has a limit"
    layouts = [ComparedLayout(PLAN, "plan", plan, hints=options.hints or {})]
    standard = layout_planner.standard
    rows = {name: _compare_standard(layout_planner, name) for name in (standard.names if names is None else names)}
    layouts += [row for row, _ in rows.values()]
    layouts += [_compare_own(layout_planner, name, hints) for name, hints in own.items()]
    nearest = _nearest(plan, rows, limit)
    flags = None if nearest is None else _flags(layout_planner, *nearest)
    seconds = time.perf_counter() - start
    return Comparison(shape, plan.cluster, limit, tuple(layouts), flags, seconds)


def _parse_baselines(baselines: Baselines | None) -> tuple[tuple[str, ...] | None, dict[str, Hints]]:
    """Return the names of standard layouts, None for all, and the hints of the user's own.

    Raises:
        PlanError: a name is unknown, or a layout of the user is not valid.
    """
    if baselines is None:
        return None, {}
    if isinstance(baselines, Mapping):
        for name, options in baselines.items():
            if name in BASELINES or name == PLAN:
                raise PlanError(f"baselines={{{name!r}: ...}}: a layout of your own needs a name of its own.")
            if not isinstance(options, Mapping) or set(options) != {"hints"}:
                raise PlanError(f'baselines: {name!r} is {options!r}: give its hints, as in {{"hints": {{...}}}}.')
        return None, {name: options["hints"] for name, options in baselines.items()}
    if isinstance(baselines, str):
        baselines = (baselines,)
    for name in baselines:
        if name not in BASELINES:
            raise PlanError(f"baselines: there is no standard layout {name!r}. {suggestion(str(name), BASELINES)}")
    return tuple(dict.fromkeys(baselines)), {}


def _compare_standard(planner: LayoutPlanner, name: str) -> tuple[ComparedLayout, StandardLayout | None]:
    """Return a standard layout with its plan, or with the reason why it cannot be had."""
    try:
        layout = planner.standard.make(name)
        return ComparedLayout(name, "standard", planner.plan(layout), hints=layout.hints), layout
    except AutoshardError as error:
        return ComparedLayout(name, "standard", reason=str(error)), None


def _compare_own(planner: LayoutPlanner, name: str, hints: Hints) -> ComparedLayout:
    """Return a layout of the user with its plan, or with the reason why it cannot be had."""
    try:
        return ComparedLayout(name, "own", planner.plan_hints(hints), hints=hints)
    except AutoshardError as error:
        return ComparedLayout(name, "own", reason=str(error), hints=hints)


def _flags(
    planner: LayoutPlanner, layout: StandardLayout, plan: ShardingPlan, reference: ShardingPlan, fits: bool
) -> NearestLayout:
    """Return a standard layout with its flags, and its loss beside the plan."""
    layers = planner.first.rules.parameter_layers.values()
    inputs = planner.first.rules.batch_inputs()
    chosen = planner.target.settings.recompute
    job = Job(
        layout=layout,
        mesh=planner.call.mesh,
        samples=inputs[0].meta["val"].shape[0] if inputs else 1,
        recomputed=("selective" if chosen == "selective" else "full") if plan.recomputed else "none",
        modules={path: type(part) for path, part in planner.module.named_modules()},
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
    """Return the arguments of `_flags` for the nearest standard layout; None if there is none."""
    made = [(layout, row.plan) for row, layout in rows.values() if layout is not None and row.plan is not None]
    if not made:
        return None
    fitting = [pair for pair in made if pair[1].memory.peak <= limit]
    if fitting:
        layout, plan = min(fitting, key=lambda pair: (pair[1].step_seconds, pair[1].memory.peak))
    else:
        layout, plan = min(made, key=lambda pair: pair[1].memory.peak)
    return layout, plan, reference, bool(fitting)
