"""What is known of a cluster, on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.cluster.cluster import Cluster, Link
from autoshard.memory.budget import format_bytes
from autoshard.plan_rows import format_seconds


def cluster_table(cluster: Cluster) -> Group:
    """A cluster's figures, and its measured collectives at a few sizes, where they were measured."""
    head = Table(box=None, show_header=False, title=f"Cluster {cluster.name}", title_justify="left")
    head.add_column(style="bold")
    head.add_column(overflow="fold")
    device = cluster.device
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in device.peak_flops.items())
    for label, value in (
        ("device", f"{device.name}, {format_bytes(device.memory)}, {cluster.devices_per_host} on a host"),
        ("best rates", rates),
        (
            "memory",
            f"{device.memory_bandwidth / 1e9:,.1f} GB/s, a kernel at least {format_seconds(device.kernel_overhead)}",
        ),
        ("inside a host", _link(cluster.inside)),
        ("between hosts", _link(cluster.between)),
        ("overlap", f"a second of communication behind compute costs {cluster.contention:.2f} s"),
        ("source", cluster.source),
    ):
        head.add_row(Text(label), Text(value))
    return Group(head, *([_collectives(cluster)] if cluster.measured is not None else []))


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
