"""The figures of a cluster as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Link
from autoshard.cluster.hosts import Hosts
from autoshard.units import format_bytes, format_seconds


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
