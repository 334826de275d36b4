"""Resharding from spec to spec along the cheapest path of collectives, priced and lowered."""

from __future__ import annotations

from autoshard.reshard.eager import EagerEmitter
from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path, Resharder, Step

__all__ = ["EagerEmitter", "Path", "Resharder", "Step", "lower"]
