"""Prices of a program on a rank whose share is not an equal one (Whale, 3.3.1)."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.worker_shares import scaled_device
from autoshard.patterns.decisions import Flow
from autoshard.patterns.strategy import offered_factors
from autoshard.planner.schedule import OperatorPrices
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.program.program_replay import KernelPrices
from autoshard.specs.shared_axis import SharedAxis


class SharePrices(KernelPrices):
    """Prices of a program of equal shares as a rank pays them that has another one: operators that compute with a share
    take so many times as long, others as long as they do.

    Calls that belong to no operator, such as copies and pieces, count as the longer of both.

    Args:
        flow: what the program was made of.
        cluster: whose `device` is the rank's.
        shared: the mesh axis of which ranks hold shares, if there is one.
        share: the rank's, in times of an equal one.
    """

    def __init__(self, flow: Flow, cluster: Cluster, shared: SharedAxis | None, share: float) -> None:
        self._equal = OperatorPrices(StrategyTables(CostModel(cluster, flow.mesh), shared))
        super().__init__(self._equal.cost)
        device = scaled_device(cluster.device, 1 / share)
        self._own = OperatorPrices(StrategyTables(CostModel(replace(cluster, device=device), flow.mesh), shared))
        self._grows = {node.name: _is_shared(flow, node, shared) for node in flow.rules.operators}
        self._grows_by_default = share > 1

    def seconds(self, node: fx.Node) -> float:
        grows = self._grows.get(node.meta.get("key", ""), self._grows_by_default)
        return (self._own if grows else self._equal).seconds(node)


def _is_shared(flow: Flow, node: fx.Node, shared: SharedAxis | None) -> bool:
    """Whether an operator computes with the rank's share of some dim."""
    if shared is None or flow.rules.pin_spec(node, flow.mesh) is not None:
        return False
    choice = flow.decisions.choices[node.name][shared.axis]
    return choice >= 0 and shared.is_of_whole(offered_factors(flow.rules.rules[node])[choice].size)
