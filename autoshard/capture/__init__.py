"""Capture of a module and an example call as one functional graph of forward and backward."""

from __future__ import annotations

from autoshard.capture._torch import outside_modes
from autoshard.capture.annotate import shard
from autoshard.capture.call_layout import signature_of
from autoshard.capture.joint import JointGraph, JointInput, JointOutput, capture

__all__ = ["JointGraph", "JointInput", "JointOutput", "capture", "outside_modes", "shard", "signature_of"]
