"""How long a step takes under some decisions: the calls of its program on streams, in the order of the program."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autoshard.planner.strategy_tables import StrategyTables
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import KernelPrices, operations
from autoshard.simulate.events import Timeline, replay


class OperatorPrices(KernelPrices):
    """Prices at which a local program costs what the search takes it for: the operator that it stands for.

    A compiler makes few kernels of it; without one it runs as many. So plans are compared by what was minimised.

    Args:
        tables: the search's prices of strategies.
    """

    def __init__(self, tables: StrategyTables) -> None:
        super().__init__(tables.cost)
        self._tables = tables

    def seconds(self, node: fx.Node) -> float:
        """Time of a call that is no collective; of a local program, the first one's is that of all."""
        stands_for = node.meta.get("stands_for")
        if stands_for is None:
            return super().seconds(node)
        return self._tables.compute_seconds(*stands_for) if stands_for else 0.0


def timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """The step on a stream of compute and one of communication per link.

    What is replayed are the calls of the program itself, with its copies, masks and local programs, its joined
    reductions, and gathers that are started ahead.
    """
    return _replay((program.forward.graph, program.backward.graph), prices)


def reduction_timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """Likewise the reductions of gradients that the backward half leaves unreduced, with nothing to hide behind."""
    return _replay(() if program.unreduced is None else (program.unreduced.scheduled_graph(),), prices)


def _replay(graphs: Sequence[fx.Graph], prices: KernelPrices) -> Timeline:
    return replay(operations(graphs, prices.cost.mesh.names, prices))
