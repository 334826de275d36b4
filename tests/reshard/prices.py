"""Prices for tests."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.specs.axes import MeshShape

LATENCY = 1e-5
BANDWIDTH = 1e10
MEMORY_BANDWIDTH = 1e12


def ring_price(mesh: MeshShape) -> Callable[[str, int, int], float]:
    """Latency and bandwidth of rings; local moves cost what memory does."""

    def price(kind: str, amount: int, axis: int) -> float:
        others = mesh.sizes[axis] - 1
        share = others / mesh.sizes[axis]
        words = {"all_gather": others, "all_reduce": 2 * share, "reduce_scatter": share, "all_to_all": share}
        if kind not in words:
            return 2 * amount / MEMORY_BANDWIDTH
        return LATENCY * others * (2 if kind == "all_reduce" else 1) + amount * words[kind] / BANDWIDTH

    return price


def wire_price(mesh: MeshShape) -> Callable[[str, int, int], float]:
    """As `ring_price`, with everything local for free."""
    ring = ring_price(mesh)
    local = {"slice", "make_partial", "copy"}
    return lambda kind, amount, axis: 0.0 if kind in local else ring(kind, amount, axis)
