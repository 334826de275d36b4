"""Devices and links, and the prices of operators and collectives on them."""

from __future__ import annotations

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.device import Device, Link
from autoshard.cluster.flops import flops

__all__ = ["Cluster", "CostModel", "Device", "Link", "flops"]
