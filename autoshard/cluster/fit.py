"""Latency and bandwidth that fit measured collectives best: prices for groups that were not measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoshard.cluster.cost import RING_TRIPS
from autoshard.cluster.curve import Curve
from autoshard.cluster.device import Link
from autoshard.cluster.measurements import Grouping


def fit_links(
    collectives: Mapping[tuple[str, Grouping], Curve], devices: int, devices_per_host: int
) -> tuple[Link, Link]:
    """Return the links inside a host and between hosts that explain measured collectives best.

    Args:
        collectives: seconds by bytes.
        devices: number of devices that were measured.
        devices_per_host: consecutive ranks in groups of this size share a host.

    Returns:
        The two links: least squares of the relative error of the formulas of `CostModel.collective`. Where no group
        crosses hosts, or every one does, both are the same.
    """
    rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for (kind, grouping), curve in collectives.items():
        spans = _spans_hosts(grouping, devices, devices_per_host)
        for bytes, seconds in zip(curve.amounts, curve.seconds, strict=True):
            messages, volume = _terms(kind, bytes, grouping.size)
            # Each equation is divided by its measured seconds, so that the squares are those of relative errors.
            rows[spans].append((messages / seconds, volume / seconds))
    inside, between = (_link(rows[spans]) if rows[spans] else None for spans in (False, True))
    any_link = inside or between
    assert any_link is not None, "no collective was measured"
    return inside or any_link, between or any_link


def _terms(kind: str, bytes: float, size: int) -> tuple[float, float]:
    """Messages that a collective waits for, and bytes through one device's link."""
    if kind == "shift":
        return 1.0, bytes
    hops = RING_TRIPS[kind] * (size - 1)
    return hops, hops * (bytes if kind == "all_gather" else bytes / size)


def _link(rows: list[tuple[float, float]]) -> Link:
    """The latency and bandwidth for which every row's seconds come nearest to the measured ones, as shares of these."""
    terms = np.array(rows)
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
    if latency <= 0 or per_byte <= 0:
        # Noise: one of the terms alone explains the seconds. The other is kept above zero, at a thousandth of what it
        # would be alone, for a link needs both.
        alone = [float(column.sum() / (column * column).sum()) for column in terms.T]
        latency, per_byte = max(float(latency), alone[0] * 1e-3), max(float(per_byte), alone[1] * 1e-3)
    return Link(bandwidth=1 / float(per_byte), latency=float(latency))


def _spans_hosts(grouping: Grouping, devices: int, devices_per_host: int) -> bool:
    """Return True if any group holds ranks of different hosts."""
    reach = grouping.stride * (grouping.size - 1)
    firsts = (rank for rank in range(devices) if rank // grouping.stride % grouping.size == 0)
    return any(rank // devices_per_host != (rank + reach) // devices_per_host for rank in firsts)
