"""Capture: one functional graph of forward and backward from a module and an example call."""

from __future__ import annotations

from autoshard.capture._torch import outside_modes
from autoshard.capture.call_layout import signature_of
from autoshard.capture.joint import JointGraph, JointInput, JointOutput, capture
from autoshard.capture.marks import shard

__all__ = ["JointGraph", "JointInput", "JointOutput", "capture", "outside_modes", "shard", "signature_of"]
