"""The figures of a cluster as tables."""

from __future__ import annotations

from autoshard.cluster.device import Device, Link
from autoshard.cluster.measurements import Measurements
from autoshard.report import Table, numbers, texts
from autoshard.units import format_bytes, format_seconds


def hosts_lines(
    count: int | None, device: Device, devices_per_host: int, inside: Link, between: Link
) -> tuple[tuple[str, str], ...]:
    """Return labels and figures of equal devices and their links; `count` is None for any number."""
    number = "" if count is None else f"{count} x "
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in device.peak_flops.items())
    overhead = format_seconds(device.kernel_overhead)
    host_memory = f", {format_bytes(device.host_memory)} for a device" if device.host_memory else ""
    host_rate = f"{device.host_memory_bandwidth / 1e9:,.1f} GB/s of a device's share"
    return (
        ("device", f"{number}{device.name}, {format_bytes(device.memory)}, {devices_per_host} on a host"),
        ("best rates", rates),
        ("memory", f"{device.memory_bandwidth / 1e9:,.1f} GB/s, a kernel at least {overhead}"),
        ("link to the host", f"{device.host_bandwidth / 1e9:,.1f} GB/s each way{host_memory}"),
        ("memory of the host", host_rate),
        ("inside a host", _link_text(inside)),
        ("between hosts", _link_text(between)),
    )


def _link_text(link: Link) -> str:
    return f"{link.bandwidth / 1e9:,.2f} GB/s, {format_seconds(link.latency)} a message"


def collective_table(measured: Measurements) -> Table:
    """Return seconds at the smallest, the middle and the largest size, a row for each kind and grouping."""
    rows = []
    for (kind, grouping), curve in measured.collectives.items():
        points = list(zip(curve.amounts, curve.seconds, strict=True))
        shown = (points[0], points[len(points) // 2], points[-1])
        cells = (f"{format_bytes(int(amount))} {format_seconds(seconds)}" for amount, seconds in shown)
        rows.append((kind, str(grouping.size), str(grouping.stride), *cells))
    columns = (*texts("collective"), *numbers("groups of", "ranks apart", "smallest", "middle", "largest"))
    return Table.of(columns, rows, most=100)
