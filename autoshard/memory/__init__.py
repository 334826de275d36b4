"""What is alive when, what it takes, and what must be sharded to fit."""

from __future__ import annotations

from autoshard.memory.budget import format_bytes, parse_bytes
from autoshard.memory.footprint import KINDS, Allocation, Held, Kind, Memory, components, held, peak
from autoshard.memory.force import by_size, largest
from autoshard.memory.ladder import first_that_fits
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory

__all__ = [
    "KINDS",
    "Allocation",
    "Held",
    "Kind",
    "Memory",
    "OptimizerMemory",
    "by_size",
    "components",
    "first_that_fits",
    "format_bytes",
    "held",
    "largest",
    "optimizer_memory",
    "parse_bytes",
    "peak",
]
