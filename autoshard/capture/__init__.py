"""Capture: one functional graph of forward and backward from a module and an example call."""

from __future__ import annotations

from autoshard.capture._torch import outside_modes
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import JointGraph, JointInput, JointOutput, capture
from autoshard.capture.marks import shard

__all__ = ["BoundCall", "JointGraph", "JointInput", "JointOutput", "capture", "outside_modes", "shard"]
