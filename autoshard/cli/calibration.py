"""The verb `calibrate`: measure a cluster, and print its figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch.distributed.device_mesh import init_device_mesh

from autoshard.cli.arguments import Verbs, add_verb, console, print_line
from autoshard.cluster.calibrate import DTYPES, calibrate
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Hosts, Link
from autoshard.errors import MeshError
from autoshard.units import format_bytes, format_seconds


def add_calibrate(verbs: Verbs) -> None:
    """Add the verb `calibrate`."""
    measure = add_verb(
        verbs,
        "calibrate",
        _calibrate,
        summary="measure this cluster; start with torchrun, one process per device",
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
        choices=[_name(dtype) for dtype in DTYPES],
        help="dtypes of operators; default: all three",
    )


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
            console().print(cluster_table(cluster))
            print_line(f"wrote {options.output}")
    finally:
        dist.destroy_process_group()


def _print_progress(part: str) -> None:
    sys.stderr.write(f"measuring {part}\n")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cluster_table(cluster: Cluster) -> Group:
    """Return the figures of a cluster, and its collectives at a few sizes where they were measured."""
    head = Table(box=None, show_header=False, title=f"Cluster {cluster.name}", title_justify="left")
    head.add_column(style="bold")
    head.add_column(overflow="fold")
    for hosts in cluster.stretches or (cluster,):
        for label, value in _hosts(hosts):
            head.add_row(Text(label), Text(value))
    for label, value in (
        ("overlap", f"a second of communication behind compute costs {cluster.contention:.2f} s"),
        ("source", cluster.source),
    ):
        head.add_row(Text(label), Text(value))
    return Group(head, *([_collectives(cluster)] if cluster.measured is not None else []))


def _hosts(hosts: Cluster | Hosts) -> Iterator[tuple[str, str]]:
    """Labels and figures of devices that are alike, and of their links."""
    device = hosts.device
    count = "" if hosts.count is None else f"{hosts.count} x "
    yield "device", f"{count}{device.name}, {format_bytes(device.memory)}, {hosts.devices_per_host} on a host"
    yield "best rates", ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in device.peak_flops.items())
    overhead = format_seconds(device.kernel_overhead)
    yield "memory", f"{device.memory_bandwidth / 1e9:,.1f} GB/s, a kernel at least {overhead}"
    yield "inside a host", _link(hosts.inside)
    yield "between hosts", _link(hosts.between)


def _link(link: Link) -> str:
    return f"{link.bandwidth / 1e9:,.2f} GB/s, {format_seconds(link.latency)} a message"


def _collectives(cluster: Cluster) -> Table:
    """Seconds at the smallest, the middle and the largest size, a row for each kind and grouping."""
    assert cluster.measured is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("collective", "groups of", "ranks apart", "smallest", "middle", "largest"):
        table.add_column(title, justify="left" if title == "collective" else "right")
    for (kind, grouping), curve in cluster.measured.collectives.items():
        points = list(zip(curve.amounts, curve.seconds, strict=True))
        shown = (points[0], points[len(points) // 2], points[-1])
        cells = [f"{format_bytes(int(bytes))} {format_seconds(seconds)}" for bytes, seconds in shown]
        table.add_row(kind, str(grouping.size), str(grouping.stride), *cells)
    return table
