"""Positions and indices whose number depends on numbers, and is told beforehand: all of what they count is whole."""

from __future__ import annotations

from autoshard.patterns.registry import rule

rule("aten.nonzero_static.default", "...! -> k! d!")
rule("aten.repeat_interleave.Tensor", "n! -> m!")
