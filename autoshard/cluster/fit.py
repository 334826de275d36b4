"""Latency and bandwidth that fit measured collectives best: prices for what was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autoshard.cluster.curve import Curve
from autoshard.cluster.device import Link
from autoshard.cluster.measurements import Grouping

_HOPS: dict[str, tuple[float, float]] = {
    "all_gather": (1.0, 1.0),
    "all_reduce": (2.0, 2.0),
    "reduce_scatter": (1.0, 1.0),
    "all_to_all": (1.0, 1.0),
}
"""Kind -> trips around the ring, and how often its volume crosses a link; a shift is a single message."""


def fit_links(
    collectives: Mapping[tuple[str, Grouping], Curve], devices: int, devices_per_host: int
) -> tuple[Link, Link]:
    """The links inside a host and between hosts that explain measured collectives best.

    Args:
        collectives: seconds by bytes.
        devices: how many were measured.
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
            rows[spans].append((messages / seconds, volume / seconds))
    found = {spans: _link(terms) for spans, terms in rows.items() if terms}
    inside, between = found.get(False), found.get(True)
    one = inside or between
    assert one is not None, "no collective was measured"
    return inside or one, between or one


def _terms(kind: str, bytes: float, size: int) -> tuple[float, float]:
    """Messages that a collective waits for, and bytes through one device's link."""
    if kind == "shift":
        return 1.0, bytes
    trips, crossings = _HOPS[kind]
    part = 1 if kind == "all_gather" else 1 / size
    return trips * (size - 1), crossings * bytes * part * (size - 1)


def _link(rows: list[tuple[float, float]]) -> Link:
    """Latency and bandwidth for which every row's seconds come nearest to its measured ones, as shares of these."""
    terms = np.array(rows)
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
    if latency <= 0 or per_byte <= 0:  # one of the terms alone explains them
        alone = [float(column.sum() / (column * column).sum()) for column in terms.T]
        latency, per_byte = max(float(latency), alone[0] * 1e-3), max(float(per_byte), alone[1] * 1e-3)
    return Link(bandwidth=1 / float(per_byte), latency=float(latency))


def _spans_hosts(grouping: Grouping, devices: int, devices_per_host: int) -> bool:
    """Whether any group holds ranks of different hosts."""
    reach = grouping.stride * (grouping.size - 1)
    firsts = (rank for rank in range(devices) if rank // grouping.stride % grouping.size == 0)
    return math.gcd(devices, devices_per_host) != devices and any(
        rank // devices_per_host != (rank + reach) // devices_per_host for rank in firsts
    )
