"""Devices and links, and the prices of operators and collectives on them."""

from __future__ import annotations

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel, flops
from autoshard.cluster.device import Device, Link

__all__ = ["Cluster", "CostModel", "Device", "Link", "flops"]
