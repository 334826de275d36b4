"""The command `autoshard`: check a model, measure a cluster, print saved plans."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard.cluster.calibrate import DTYPES, calibrate
from autoshard.doctor.doctor import doctor, report_page
from autoshard.errors import AutoshardError, InputError, MeshError
from autoshard.plans.html import page
from autoshard.plans.plan_text import explanation_table, plan_table
from autoshard.plans.sharding_plan import ShardingPlan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 with the reason on standard error if a plan or a path is not valid, or if the examined
        model cannot be captured.
    """
    options = _parser().parse_args(arguments)
    try:
        # Commands that cannot fail by themselves return None.
        return int(options.run(options) or 0)
    except (AutoshardError, OSError) as error:
        sys.stderr.write(f"autoshard: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Check models, measure clusters, and show plans saved by ShardingPlan.save."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="print a plan as tables")
    show.set_defaults(run=_show)

    explain = commands.add_parser("explain", help="print the strategies and costs of parameters and modules")
    explain.set_defaults(run=_explain)

    html = commands.add_parser("html", help="write a plan as a self-contained web page")
    html.set_defaults(run=_html)

    examine = commands.add_parser("doctor", help="check if a model can be captured and sharded")
    examine.set_defaults(run=_doctor)
    examine.add_argument(
        "model", metavar="MODULE:FACTORY", help="function of a Python module that returns (model, args, kwargs)"
    )
    examine.add_argument(
        "--cluster", default="h100", help="cluster whose prices predict the seconds: a preset or a file; default: h100"
    )

    measure = commands.add_parser(
        "calibrate",
        help="measure this cluster; start with torchrun, one process per device",
        description="Measure collectives and operators with all devices at work, and write a profile to plan with: "
        "torchrun --nproc-per-node 8 -m autoshard.cli calibrate my-profile.json, then cluster='my-profile.json'.",
    )
    measure.set_defaults(run=_calibrate)
    measure.add_argument("output", metavar="OUT.json", type=Path, help="file to write")
    measure.add_argument(
        "--largest", default="64MiB", metavar="BYTES", help="largest collective, per device; default: 64MiB"
    )
    measure.add_argument("--device", choices=("cuda", "cpu"), help="device to measure; default: cuda if there is one")
    measure.add_argument(
        "--dtypes",
        nargs="+",
        choices=[_name(dtype) for dtype in DTYPES],
        help="dtypes of operators; default: all three",
    )

    for command in (show, explain, html):
        command.add_argument("plan", metavar="PLAN.json", help="file of the plan")
    explain.add_argument("glob", metavar="GLOB", help="glob of parameter names or module paths, such as 'layers.*.mlp'")
    html.add_argument("output", metavar="OUT.html", type=Path, help="file to write")
    return parser


def _show(options: argparse.Namespace) -> None:
    _console().print(plan_table(ShardingPlan.load(options.plan)))


def _explain(options: argparse.Namespace) -> None:
    _console().print(explanation_table(ShardingPlan.load(options.plan), options.glob))


def _html(options: argparse.Namespace) -> None:
    options.output.write_text(page(ShardingPlan.load(options.plan)), "utf-8")
    # Rich would read brackets in the path as markup.
    _console().print(f"wrote {options.output}", markup=False, highlight=False)


def _doctor(options: argparse.Namespace) -> int:
    """Print the report on a model; status 1 where it cannot be captured."""
    report = doctor(*load_example(options.model), cluster=options.cluster)
    _console().print(report_page(report))
    return 0 if report.captured else 1


def _calibrate(options: argparse.Namespace) -> None:
    """Measure on all processes; the first one writes the profile and prints a summary."""
    if not dist.is_torchelastic_launched():
        raise MeshError(
            "calibrate measures all devices at once, a process for each. Start it by torchrun: "
            f"torchrun --nproc-per-node 8 -m autoshard.cli calibrate {options.output}"
        )
    if options.output.suffix != ".json" or not options.output.parent.is_dir():
        raise MeshError(
            f"{options.output} can't be the profile: name a .json file, by which plans will ask for it, in a folder "
            "that there is."
        )
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group()
    try:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        dtypes = [dtype for dtype in DTYPES if options.dtypes is None or _name(dtype) in options.dtypes]
        stem, largest = options.output.stem, options.largest
        cluster = calibrate(mesh, name=stem, largest=largest, dtypes=dtypes, progress=_print_progress)
        if dist.get_rank() == 0:
            cluster.save(options.output)
            _console().print(cluster.table())
            _console().print(f"wrote {options.output}", markup=False, highlight=False)
    finally:
        dist.destroy_process_group()


def _print_progress(part: str) -> None:
    sys.stderr.write(f"measuring {part}\n")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _console() -> Console:
    """Standard output, wide enough for the tables where it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 120)


Example = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]


def load_example(text: str) -> Example:
    """Call a factory such as `"package.module:factory"`, found from the current directory as Python finds modules.

    The factory takes no arguments and returns the model and its example call: `(model, args, kwargs)`, or
    `(model, args)` with a tuple, or `(model, kwargs)` with a mapping.

    Returns:
        The model, positional arguments, keyword arguments.

    Raises:
        InputError: there is no such factory, or it returns something else.
    """
    name, _, attribute = text.partition(":")
    if not name or not attribute:
        raise InputError(f'"{text}" names no factory: write "package.module:factory".')
    # A console script, unlike `python -m`, does not look in the current directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the Python module {name} cannot be imported: {error}. Is it below this directory?"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InputError(f"{name} has no function {attribute}.")
    match result := factory():
        case (nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return model, tuple(args), kwargs
        case (nn.Module() as model, Mapping() as kwargs):
            return model, (), kwargs
        case (nn.Module() as model, tuple() | list() as args):
            return model, tuple(args), {}
    shape = f"a {type(result).__name__}"
    if isinstance(result, tuple):
        shape = f"({', '.join(type(item).__name__ for item in result)})"
    raise InputError(f"{text} returned {shape}: return (model, args, kwargs), with args a tuple and kwargs a mapping.")


if __name__ == "__main__":
    sys.exit(main())
