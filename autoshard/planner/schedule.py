"""Seconds of a step: the replay of its program on streams, at the search's prices of operators."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.worker_shares import scaled_device
from autoshard.patterns.decisions import Flow
from autoshard.patterns.strategy import offered_factors
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import KernelPrices, operations
from autoshard.simulate.events import Timeline, replay
from autoshard.specs.shared_axis import SharedAxis


class OperatorPrices(KernelPrices):
    """Prices at which a local program costs as much as the search assumes: as the operator that it stands for.

    A compiler makes few kernels of a local program; without one it runs as many kernels as it has calls. Plans are
    compared by the seconds that were minimised.

    Args:
        tables: the search's prices of strategies.
    """

    def __init__(self, tables: StrategyTables) -> None:
        super().__init__(tables.cost)
        self._tables = tables

    def seconds(self, node: fx.Node) -> float:
        """Return the time of a call that is no collective."""
        stands_for = node.meta.get("stands_for")
        if stands_for is None:
            return super().seconds(node)
        # The first call of a local program has the time of all its calls.
        return self._tables.compute_seconds(*stands_for) if stands_for else 0.0


class SharePrices(KernelPrices):
    """Prices of a program of equal shares for a rank with another share (Whale, 3.3.1).

    An operator that computes with a share takes as many times as long as the share is larger; others take as long as
    with equal shares. Calls that belong to no operator, such as copies and pieces, count as the longer of both.

    Args:
        flow: the graph and the decisions that the program is made of.
        cluster: the cluster; its `device` is the rank's.
        shared: the mesh axis whose ranks have shares, if there is one.
        share: the rank's share as a multiple of an equal one.
    """

    def __init__(self, flow: Flow, cluster: Cluster, shared: SharedAxis | None, share: float) -> None:
        self._equal = OperatorPrices(StrategyTables(CostModel(cluster, flow.mesh), shared))
        super().__init__(self._equal.cost)
        # A rank with a larger share computes as a slower device with an equal one does.
        cluster = replace(cluster, device=scaled_device(cluster.device, 1 / share))
        self._scaled = OperatorPrices(StrategyTables(CostModel(cluster, flow.mesh), shared))
        self._is_scaled = {node.name: _splits_share(flow, node, shared) for node in flow.rules.operators}
        self._is_scaled_by_default = share > 1

    def seconds(self, node: fx.Node) -> float:
        scaled = self._is_scaled.get(node.meta.get("key", ""), self._is_scaled_by_default)
        return (self._scaled if scaled else self._equal).seconds(node)


def _splits_share(flow: Flow, node: fx.Node, shared: SharedAxis | None) -> bool:
    """Return True if an operator computes with the rank's share of a dim."""
    if shared is None or flow.rules.pin_spec(node, flow.mesh) is not None:
        return False
    choice = flow.decisions.choices[node.name][shared.axis]
    return choice >= 0 and shared.is_of_whole(offered_factors(flow.rules.rules[node])[choice].size)


def timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """Return the step on a stream of compute and one of communication for each kind of link.

    The replay runs the calls of the program itself, with its copies, masks and local programs, its joined reductions,
    and gathers that are started ahead.
    """
    graphs = (program.forward.graph, program.backward.graph)
    return replay(operations(graphs, prices.cost.mesh.names, prices))


def reduction_timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """Return the reductions of gradients that the backward half leaves unreduced; no compute hides them."""
    graphs = () if program.unreduced is None else (program.unreduced.scheduled_graph(),)
    return replay(operations(graphs, prices.cost.mesh.names, prices))
