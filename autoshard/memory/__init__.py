"""What is alive when, what it takes, and what must be sharded to fit."""

from __future__ import annotations

from autoshard.memory.footprint import (
    KINDS,
    Allocation,
    AllocationKind,
    LiveTensor,
    Memory,
    bytes_by_kind,
    live_bytes,
    peak,
)
from autoshard.memory.largest_parameters import largest_names, names_by_size
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.memory.plan_bisection import first_that_fits
from autoshard.units import format_bytes, parse_bytes

__all__ = [
    "KINDS",
    "Allocation",
    "AllocationKind",
    "LiveTensor",
    "Memory",
    "OptimizerMemory",
    "bytes_by_kind",
    "first_that_fits",
    "format_bytes",
    "largest_names",
    "live_bytes",
    "names_by_size",
    "optimizer_memory",
    "parse_bytes",
    "peak",
]
