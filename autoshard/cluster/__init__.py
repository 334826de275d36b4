"""Devices and links: what work and words cost."""

from __future__ import annotations

from autoshard.cluster.cluster import Cluster, Device, Link
from autoshard.cluster.cost import CostModel
from autoshard.cluster.flops import flops

__all__ = ["Cluster", "CostModel", "Device", "Link", "flops"]
