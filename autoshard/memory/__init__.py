"""What is alive when, what it takes, and what must be sharded to fit."""

from __future__ import annotations

from autoshard.memory.budget import format_bytes, parse_bytes
from autoshard.memory.footprint import KINDS, Allocation, Kind, Memory, components, peak
from autoshard.memory.force import by_size, smallest_feasible_k

__all__ = [
    "KINDS",
    "Allocation",
    "Kind",
    "Memory",
    "by_size",
    "components",
    "format_bytes",
    "parse_bytes",
    "peak",
    "smallest_feasible_k",
]
