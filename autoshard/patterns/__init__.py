"""The pattern library: how every operator may be split over a mesh axis, and what each rank then runs."""

from __future__ import annotations

from autoshard.patterns import ops as ops  # registers the rules
from autoshard.patterns.soundness import Finding, check

__all__ = ["Finding", "check"]
