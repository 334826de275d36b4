"""The verb `calibrate`: measure a cluster, and print its figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import MeshError
from autoshard.tools.cli.arguments import UsageError, Verbs, add_verb, check_output, console, print_line, usage_errors
from autoshard.units import parse_bytes

_DTYPES = ("float32", "bfloat16", "float64")


def add_calibrate(verbs: Verbs) -> None:
    """Add the verb `calibrate`."""
    measure = add_verb(
        verbs,
        "calibrate",
        _calibrate,
        details="Measure collectives and operators with all devices at work, and write a profile to plan with:\n"
        "cluster='my-profile.json' in Python, --cluster my-profile.json here.",
        example="torchrun --nproc-per-node 8 -m autoshard calibrate my-profile.json",
    )
    measure.add_argument("output", metavar="OUT.json", type=Path, help="file to write")
    measure.add_argument(
        "--largest", default="64MiB", metavar="BYTES", help="largest collective, per device; default: 64MiB"
    )
    measure.add_argument("--device", choices=("cuda", "cpu"), help="device to measure; default: cuda if there is one")
    measure.add_argument(
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        default=_DTYPES,
        help="dtypes of operators; default: all three",
    )


def _calibrate(options: argparse.Namespace) -> None:
    """Measure on all processes; the first one writes the profile and prints a summary."""
    check_output("OUT.json", options.output)
    if options.output.suffix != ".json":
        raise UsageError(f"{options.output} can't be the profile: name a .json file, by which plans will ask for it.")
    with usage_errors():
        parse_bytes(options.largest)
    if not dist.is_torchelastic_launched():
        raise MeshError(
            "calibrate measures all devices at once, a process for each. Start it by torchrun: "
            f"torchrun --nproc-per-node 8 -m autoshard calibrate {options.output}"
        )
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group()
    try:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        dtypes = [getattr(torch, name) for name in options.dtypes]
        stem, largest = options.output.stem, options.largest
        cluster = autoshard.calibrate(mesh, name=stem, largest=largest, dtypes=dtypes, progress=_print_progress)
        if dist.get_rank() == 0:
            cluster.save(options.output)
            console().print(cluster)
            print_line(f"wrote {options.output}")
    finally:
        dist.destroy_process_group()


def _print_progress(part: str) -> None:
    sys.stderr.write(f"measuring {part}\n")
