"""The program of a planned graph: made for all sizes, split in halves, its collectives arranged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.capture import outside_modes
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cost import CostModel
from autoshard.patterns.decisions import Flow
from autoshard.program.localize import LocalStep
from autoshard.program.overlap import Arrangement, TorchArrangement, arrange_own
from autoshard.program.program_replay import KernelPrices
from autoshard.program.size_generic import size_generic_step
from autoshard.program.split import Halves, split
from autoshard.reshard.deferred_reductions import DeferredReduction
from autoshard.reshard.path import Resharder
from autoshard.specs.shared_axis import SharedAxis


@dataclass(frozen=True, slots=True, eq=False)
class PlannedGraph:
    """A captured step and the decisions for it.

    Attributes:
        graph: the captured step, in which dims may be in parts; in that of `flow`, layers may run again, too.
        flow: the graph, its rules and the decisions.
        resharder: finds the reshards; the one that priced them.
        cost: prices of kernels and collectives.
        shared: the axis whose ranks hold unequal shares, if any.
    """

    graph: JointGraph
    flow: Flow
    resharder: Resharder
    cost: CostModel
    shared: SharedAxis | None


def build_program(
    planned: PlannedGraph,
    groups: Sequence[str],
    home: torch.device,
    *,
    compile: bool = False,
    overlap: str = "own",
    in_parts: bool = False,
    reduced: DeferredReduction | None = None,
) -> tuple[LocalStep, Halves]:
    """Make the program of a rank.

    Args:
        planned: the graph and the decisions.
        groups: for every mesh axis, the name of the process group of this rank's line along it.
        home: the device of the program's tensors.
        compile, in_parts, reduced: as for `split`.
        overlap: the passes that arrange collectives, `"own"` or `"torch"`.

    Raises:
        PlanError: an operator can't have unequal shares as the plan has it.
        RuleError: the program would be another one at other sizes.
    """
    arrange: Arrangement = arrange_own
    if overlap == "torch":
        dynamic = planned.graph.dynamic is not None
        arrange = TorchArrangement(KernelPrices(planned.cost), groups, dynamic)
    with outside_modes():
        step = size_generic_step(planned.flow, planned.resharder, groups, home, planned.shared)
        return step, split(step, compile, in_parts=in_parts, reduced=reduced, arrange=arrange)
