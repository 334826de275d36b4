"""Live tensors of a step, their bytes, the optimizer's memory, and the search for a plan within a limit."""

from __future__ import annotations

from autoshard.memory.budget import first_that_fits, largest_names, names_by_size
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
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
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
