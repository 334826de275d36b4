"""The verbs that plan without devices: `plan`, `fits`, `compare`, `search` and `frontier`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import AutoshardError, BudgetError, Pipeline, PipelinePlan, Search
from autoshard.options import EFFORTS, OFFLOAD, OFFLOAD_OPTIMIZER, RECOMPUTE, SCHEDULES, SEARCH_OPTIONS
from autoshard.report import HasReport
from autoshard.tools.cli.arguments import (
    UsageError,
    Verbs,
    add_verb,
    check_output,
    console,
    parse_hints,
    parse_mesh,
    print_error,
    print_line,
    usage_errors,
)
from autoshard.tools.cli.plan_files import Plan
from autoshard.tools.cli.targets import TARGETS, add_target, load_target
from autoshard.tools.compare.compare import BASELINES
from autoshard.units import format_bytes, format_seconds

_NOT_VALID = "2: an argument is not valid; nothing was planned."
_OUTPUTS = ("whole", "planned")
_PLOTS = (".png", ".svg", ".pdf")
_WITHOUT_PIPELINE = {"frontier": "a frontier", "compare": "a comparison", "verify": "verify"}


def add_plan(verbs: Verbs) -> None:
    """Add the verb `plan`."""
    parser = add_verb(
        verbs,
        "plan",
        _plan,
        details="Plan a model on a mesh, print the plan, and save it for\nautoshard.parallelize(plan=...). "
        f"An axis named pp is a pipeline. No device is needed.\n\n{TARGETS}\n\n"
        "Exit status 1: no plan fits, or the model cannot be captured.\n" + _NOT_VALID,
        example="autoshard plan hf:llama/config.json --batch 16 --seq 4096 --mesh dp=8,tp=8 \\\n"
        "    --cluster h100 --memory 70GiB -o plan.json --html plan.html",
    )
    add_target(parser)
    add_mesh(parser)
    add_memory(parser)
    add_options(parser)
    add_dtypes(parser)
    _add_accumulate(parser)
    _add_offload(parser)
    add_pipeline(parser)
    _add_files(parser, "the plan")


def add_fits(verbs: Verbs) -> None:
    """Add the verb `fits`."""
    parser = add_verb(
        verbs,
        "fits",
        _fits,
        details=f"Plan a model on a mesh within a memory limit, and tell whether a plan fits.\n\n{TARGETS}\n\n"
        "Exit status 0: a plan fits. 1: no plan fits; the error names the smallest peak.\n"
        "2: an argument is not valid, or the model cannot be planned.",
        example="autoshard fits mypackage.models:make --mesh dp=8 --memory 24GiB --cluster a100",
    )
    add_target(parser)
    add_mesh(parser)
    add_memory(parser, required=True)
    add_options(parser)
    add_dtypes(parser)
    _add_accumulate(parser)
    _add_offload(parser)
    add_pipeline(parser)


def add_compare(verbs: Verbs) -> None:
    """Add the verb `compare`."""
    parser = add_verb(
        verbs,
        "compare",
        _compare,
        details="Plan a model on a mesh, and beside it DDP, FSDP2, HSDP, tensor, sequence and expert\n"
        "parallelism and their products, at the same prices; print the flags of torchtitan,\n"
        f"Megatron-LM and FSDP2 for the nearest of them. No device is needed.\n\n{TARGETS}\n\n"
        "Exit status 1: the model cannot be captured.\n" + _NOT_VALID,
        example="autoshard compare hf:llama/config.json --batch 64 --seq 4096 --mesh dp=8,tp=8 --cluster h100",
    )
    add_target(parser)
    add_mesh(parser)
    add_memory(parser)
    add_options(parser)
    add_dtypes(parser)
    parser.add_argument(
        "--baseline",
        action="append",
        choices=BASELINES,
        help="a standard layout to compare with, several times for several; default: all that the mesh has",
    )
    parser.add_argument("--details", action="store_true", help="print what every layout spends where")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.json", help="file of all figures to write")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="web page of the plan and the layouts to write")


def add_search(verbs: Verbs) -> None:
    """Add the verb `search`."""
    parser = add_verb(
        verbs,
        "search",
        _search,
        details="Plan a model on the meshes of so many devices, with and without a pipeline; print\n"
        f"all meshes, and save the plan of the best one. No device is needed.\n\n{TARGETS}\n\n"
        "Exit status 1: no mesh fits, or the model cannot be captured.\n" + _NOT_VALID,
        example="autoshard search mypackage.models:make --devices 64 --cluster h100 -o plan.json",
    )
    add_target(parser)
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="the number of devices")
    parser.add_argument(
        "--option",
        choices=SEARCH_OPTIONS,
        default="mini-time",
        help="shortest step (the default), fewest devices, or the best step of every number of devices",
    )
    parser.add_argument("--no-pipelines", action="store_true", help="only meshes without a pipeline")
    add_memory(parser)
    add_options(parser)
    add_dtypes(parser)
    _add_offload(parser)
    add_pipeline(parser, axis=False)
    _add_files(parser, "the search and its best plan")


def add_frontier(verbs: Verbs) -> None:
    """Add the verb `frontier`."""
    parser = add_verb(
        verbs,
        "frontier",
        _frontier,
        details="Find the plans from the smallest peak of memory to the shortest step; print them,\n"
        f"and save them for autoshard.Frontier.load. No device is needed.\n\n{TARGETS}\n\n"
        "Exit status 1: the model cannot be captured.\n" + _NOT_VALID,
        example="autoshard frontier mypackage.models:make --mesh x=8 --cluster a100 --plot frontier.png",
    )
    add_target(parser)
    add_mesh(parser)
    parser.add_argument(
        "--gaps", type=int, default=8, metavar="N", help="widest gaps between plans to search; default: 8"
    )
    add_options(parser)
    add_dtypes(parser)
    _add_offload(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.json", help="file of all plans to write")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="web page of the frontier to write")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help=f"picture to write: {', '.join(_PLOTS)}")


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the mesh."""
    parser.add_argument("--mesh", required=True, metavar="AXES", help="names and sizes of the axes, as in dp=8,tp=8")


def _add_accumulate(parser: argparse.ArgumentParser) -> None:
    text = "backwards for every step of the optimizer, with autoshard.no_sync"
    parser.add_argument("--accumulate", type=int, metavar="N", help=text)


def add_memory(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the option of the memory limit."""
    text = "bytes that a device may hold, such as 70GiB"
    parser.add_argument("--memory", dest="memory_limit", required=required, metavar="BYTES", help=text)


def _add_offload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offload", choices=OFFLOAD, help="tensors that are moved to the host for the backward pass; default: none"
    )
    text = "parameters whose optimizer state is on the host, which updates them; default: none"
    parser.add_argument("--offload-optimizer", choices=OFFLOAD_OPTIMIZER, help=text)
    text = "bytes of the host that a device may fill, such as 200GiB; by default those of the cluster"
    parser.add_argument("--host-memory", metavar="BYTES", help=text)


def _add_files(parser: argparse.ArgumentParser, content: str) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.json", help="file of the plan to write")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help=f"web page of {content} to write")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of planning that all verbs share."""
    parser.add_argument(
        "--cluster",
        default="h100",
        help="a preset, devices such as '8xA100 + 8xV100', or a .json file of calibrate; default: h100",
    )
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        help="what the backward pass runs again of the forward pass; auto: as the limit asks; full: whole layers; "
        "selective: what is cheap of them",
    )
    parser.add_argument("--optimizer", metavar="NAME", help="the optimizer, for its memory; default: adamw")
    parser.add_argument(
        "--output-placements",
        choices=_OUTPUTS,
        help="gather all outputs, or leave them in shards; default: leave those that come beside a loss",
    )
    parser.add_argument(
        "--unread-outputs",
        nargs="+",
        metavar="NAME",
        help="outputs that training does not read, such as logits: they are not made, and the loss may be in pieces",
    )
    parser.add_argument("--effort", choices=EFFORTS, default="full", help="of the search; default: full")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of the search, without the capture")
    parser.add_argument(
        "--hint",
        action="append",
        dest="hints",
        metavar="GLOB=PLACEMENTS",
        help="what the plan must have: placements, such as '*.up.weight=tp:S(0)', a primitive, '*.mlp=split(tp)', or "
        "what is run again, kept or moved, '*.mlp=recompute()'",
    )


def add_dtypes(parser: argparse.ArgumentParser) -> None:
    """Add the options of mixed precision."""
    group = parser.add_argument_group("mixed precision")
    text = "dtype that parameters and inputs are cast to for the compute, such as bfloat16; default: none"
    group.add_argument("--param-dtype", metavar="DTYPE", help=text)
    text = "dtype in which gradients are reduced, such as float32; default: that of the compute"
    group.add_argument("--reduce-dtype", metavar="DTYPE", help=text)


def _mixed_precision(options: argparse.Namespace) -> MixedPrecisionPolicy | None:
    """Return the policy that the options of `add_dtypes` ask for; None without any."""
    dtypes: dict[str, torch.dtype] = {}
    for name in ("param_dtype", "reduce_dtype"):
        text = getattr(options, name, None)
        if text is not None:
            dtype = getattr(torch, text, None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                option = f"--{name.replace('_', '-')} {text}"
                raise UsageError(f"{option}: name a floating dtype of torch, such as bfloat16.")
            dtypes[name] = dtype
    if not dtypes:
        return None
    return MixedPrecisionPolicy(param_dtype=dtypes.get("param_dtype"), reduce_dtype=dtypes.get("reduce_dtype"))


def add_pipeline(parser: argparse.ArgumentParser, *, axis: bool = True) -> None:
    """Add the options of pipelines."""
    group = parser.add_argument_group("pipelines")
    if axis:
        group.add_argument(
            "--pipeline-axis", dest="axis", metavar="AXIS", help="the axis of the stages; default: pp, if there is one"
        )
    names = ", ".join(SCHEDULES[1:])
    group.add_argument("--schedule", choices=SCHEDULES, metavar="NAME", help=f"default: the best of {names}")
    group.add_argument("--microbatches", type=int, metavar="N", help="of a step; by default the best number")
    group.add_argument("--virtual", type=int, metavar="N", help="stages of a rank; by default the best number")


def planning_keywords(function: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of a function of autoshard, after a check of them and of the mesh.

    Raises:
        UsageError: an option is not valid.
    """
    mesh = parse_mesh(options.mesh) if "mesh" in options else None
    hints = parse_hints(options.hints or (), mesh)
    with usage_errors():
        search_options = Search(effort=options.effort, time_limit=options.time_limit)
        keywords: dict[str, Any] = {"cluster": options.cluster, "search": search_options}
        names = ("recompute", "offload", "offload_optimizer", "host_memory", "optimizer", "memory_limit", "accumulate")
        for name in names:
            if getattr(options, name, None) is not None:
                keywords[name] = getattr(options, name)
        if options.output_placements is not None:
            keywords["output_placements"] = None if options.output_placements == "whole" else "planned"
        # A comparison has a default of its own, and a saved plan records what it was made with.
        elif function != "compare" and getattr(options, "plan", None) is None:
            keywords["output_placements"] = "auto"
        if options.unread_outputs is not None:
            keywords["unread_outputs"] = tuple(options.unread_outputs)
        policy = _mixed_precision(options)
        if policy is not None:
            keywords["mp_policy"] = policy
        if hints:
            keywords["hints"] = hints
        pipeline = {name: getattr(options, name, None) for name in ("axis", "schedule", "microbatches", "virtual")}
        if any(value is not None for value in pipeline.values()):
            given = {name: value for name, value in pipeline.items() if value is not None}
            keywords["pipeline"] = Pipeline(**given)
        checked = autoshard.check_options(function, mesh, **keywords)
    if checked.pipeline.axis is not None and function in _WITHOUT_PIPELINE:
        raise UsageError(
            f"--mesh {options.mesh}: {_WITHOUT_PIPELINE[function]} plans no pipeline. Give axis pp another name."
        )
    return keywords


def print_outputs_left(plan: Plan, options: argparse.Namespace) -> None:
    """Print a line about the outputs that a plan leaves in shards, where nobody asked for that."""
    if options.output_placements is not None or isinstance(plan, PipelinePlan):
        return
    beside = [
        name
        for name, placements in plan.output_placements.items()
        if not all(placement.is_replicate() for placement in placements)
    ]
    if beside and plan.options.get("output_placements") == "planned":
        print_line(
            f"{', '.join(beside)}: left in shards, as DTensors, beside the loss; --output-placements whole gathers them"
        )


def _plan(options: argparse.Namespace) -> None:
    """Plan a model on a mesh; print the plan, and write its files."""
    _check_outputs(options)
    plan = _make_plan(options)
    _print_and_save(plan, options)
    _write_page(plan, options)


def _make_plan(options: argparse.Namespace) -> Plan:
    # Arguments that are quick to check come before the model, which may take long to build.
    keywords = planning_keywords("plan", options)
    module, args, kwargs = load_target(options)
    return autoshard.plan(module, parse_mesh(options.mesh), args, kwargs, **keywords)


def _fits(options: argparse.Namespace) -> int:
    """Tell whether a plan fits: status 0 or 1; 2 where that is not known."""
    try:
        plan = _make_plan(options)
    except BudgetError as error:
        print_error(error)
        return 1
    except AutoshardError as error:
        print_error(error)
        return 2
    limit = options.memory_limit
    peak = max(plan.peaks) if isinstance(plan, PipelinePlan) else plan.memory.peak
    verdict = "fits" if plan.fits else "does not fit"
    print_line(
        f"{verdict}: peak {format_bytes(peak)} of {limit} per device on mesh {plan.mesh}, predicted step "
        f"{format_seconds(plan.step_seconds)}"
    )
    print_outputs_left(plan, options)
    return int(not plan.fits)


def _compare(options: argparse.Namespace) -> None:
    """Print the plan beside standard layouts, and write the file of the figures."""
    _check_outputs(options)
    keywords = planning_keywords("compare", options)
    module, args, kwargs = load_target(options)
    comparison = autoshard.compare(
        module, parse_mesh(options.mesh), args, kwargs, baselines=options.baseline, **keywords
    )
    console().print(comparison)
    for layout in comparison if options.details else ():
        if layout.plan is not None:
            console().print(f"\n{layout.name}", layout.expenses, highlight=False)
    if options.output is not None:
        options.output.write_text(comparison.to_json(), "utf-8")
        print_line(f"wrote {options.output}")
    _write_page(comparison, options)


def _search(options: argparse.Namespace) -> None:
    """Print the meshes, and write the file of the best plan, and the page of the search."""
    _check_outputs(options)
    devices, pipelines = options.devices, not options.no_pipelines
    if devices < 1:
        raise UsageError(f"--devices {devices}: pass a number of devices, 1 or more.")
    keywords = planning_keywords("search", options)
    with usage_errors():
        # For its error: the cluster may be too small.
        autoshard.Cluster.of(options.cluster).first(devices)
    module, args, kwargs = load_target(options)
    result = autoshard.search(module, devices, args, kwargs, option=options.option, pipelines=pipelines, **keywords)
    console().print(result)
    _print_and_save(result.plan, options)
    _write_page(result, options)


def _frontier(options: argparse.Namespace) -> None:
    """Print the plans that are worth their memory, and write the file, the page and the picture of them."""
    _check_outputs(options)
    _check_plot(options.plot)
    if options.gaps < 0:
        raise UsageError(f"--gaps {options.gaps}: pass a number of gaps to search, 0 or more.")
    keywords = planning_keywords("frontier", options)
    module, args, kwargs = load_target(options)
    frontier = autoshard.frontier(module, parse_mesh(options.mesh), args, kwargs, gaps=options.gaps, **keywords)
    console().print(frontier)
    print_outputs_left(frontier[0], options)
    if options.output is not None:
        frontier.save(options.output)
        print_line(f"wrote {options.output}")
    _write_page(frontier, options)
    if options.plot is not None:
        frontier.plot(options.plot)
        print_line(f"wrote {options.plot}")


def _check_outputs(options: argparse.Namespace) -> None:
    check_output("-o", options.output)
    check_output("--html", options.html)


def _check_plot(path: Path | None) -> None:
    """Raise a `UsageError` unless a picture can be drawn at the path, if there is one."""
    check_output("--plot", path)
    if path is not None and path.suffix not in _PLOTS:
        raise UsageError(f"--plot {path}: name a file that ends in {', '.join(_PLOTS)}.")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'autoshard[plot]'")


def _print_and_save(plan: Plan, options: argparse.Namespace) -> None:
    console().print(plan)
    print_outputs_left(plan, options)
    if options.output is not None:
        plan.save(options.output)
        print_line(f"wrote {options.output}")


def _write_page(result: HasReport, options: argparse.Namespace) -> None:
    if options.html is not None:
        result.to_html(options.html)
        print_line(f"wrote {options.html}")
