"""The error of a memory limit that no plan fits: the smallest peak, its parts, and what would make it smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch.distributed.tensor import Replicate

from autoshard.capture.recomputation import recomputable, recompute_layers
from autoshard.errors import AutoshardError, BudgetError
from autoshard.memory.budget import MEMORY_ONLY_STRENGTH, memory_prices, peak_weights
from autoshard.memory.footprint import Memory
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.plan_rows import memory_parts
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import is_placeable
from autoshard.specs.spec import Spec
from autoshard.units import format_bytes


class ShortfallError(BudgetError):
    """No plan of one graph fits a limit; the remedies are not known yet, since finding them takes long.

    Args:
        planner: the planner.
        limit: the memory limit in bytes per device.
        least: the memory of the plan with the smallest peak.
        constraints: the constraints under which it was found.
        prices: the prices of memory that led to it.
        late: True if the search ended at its time limit.
    """

    def __init__(
        self,
        planner: PlanningContext,
        limit: int,
        least: Memory,
        constraints: Constraints,
        prices: np.ndarray,
        late: bool,
    ) -> None:
        self._planner, self._limit, self._least = planner, limit, least
        self._constraints, self._prices, self._late = constraints, prices, late
        super().__init__(self._message(()), least.peak)

    def with_remedies(self) -> BudgetError:
        """Return the error that also names the remedies, each tried once."""
        # If time is up, so is the time for remedies.
        remedies = () if self._late else tuple(self._find_remedies())
        return BudgetError(self._message(remedies), self._least.peak)

    def _message(self, remedies: Sequence[str]) -> str:
        planner, least = self._planner, self._least
        parts = ", ".join(f"{name} {format_bytes(held)}" for name, held in memory_parts(least).items())
        where = f"in the {least.phase}{f' of {least.module}' if least.module else ''}" if least.phase else ""
        listed = "".join(f", {remedy}" for remedy in remedies)
        shortened = (
            f" The search ended at time_limit={planner.settings.time_limit:g} s: a longer one may find a smaller peak."
            if self._late
            else ""
        )
        return (
            f"no plan fits in {format_bytes(self._limit)} per device on mesh {planner.mesh}: the smallest peak found "
            f"is {format_bytes(least.peak)}, {where} ({parts}). Raise memory_limit to {least.peak} bytes{listed}, or "
            f"make the batch smaller.{shortened}"
        )

    def _find_remedies(self) -> Iterator[str]:
        """Return texts of changes that make the peak smaller, with the peaks that they were seen to lead to."""
        planner, constraints, least = self._planner, self._constraints, self._least.peak
        parameters = [source.name for source in planner.graph.inputs if source.kind == "parameter"]
        pinned = [name for name in parameters if name in constraints.pinned]
        if pinned:
            free = {name: pins for name, pins in constraints.pinned.items() if name not in pinned}
            unpinned = replace(constraints, pinned=free, forced=frozenset(parameters))
            peak = _smallest_peak(planner, unpinned, self._prices)
            if peak < least:
                others = f" and {len(pinned) - 1} more" if len(pinned) > 1 else ""
                yield f"drop the hints (without that on {pinned[0]}{others}, {format_bytes(peak)} are enough)"
        if planner.settings.recompute == "none" and not planner.graph.recomputed:
            layers = recomputable(planner.graph)
            peak = _recompute_peak(planner, [layer.name for layer in layers], constraints) if layers else float("inf")
            if peak < least:
                yield f'allow recomputation (recompute="full" needs {format_bytes(peak)})'
        # The cluster may be a list of devices, of which there are no more.
        mesh = _double_largest_axis(planner.mesh)
        if (planner.cluster.count is not None and mesh.size > planner.cluster.count) or not _pins_fit(
            planner, constraints, mesh
        ):
            yield "add devices"
            return
        larger = type(planner)(planner.graph, mesh, planner.cluster, constraints, planner.settings)
        peak = _smallest_peak(larger, constraints, self._prices)
        yield f"add devices ({mesh} needs {format_bytes(peak)})" if peak < least else "add devices"


def _recompute_peak(planner: PlanningContext, layers: Sequence[str], constraints: Constraints) -> float:
    """Return the peak if all layers run again, with memory priced where the fastest such plan holds most."""
    graph = recompute_layers(planner.graph, layers)
    recomputing = type(planner)(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings)
    recomputing.deadline = planner.deadline
    try:
        fastest = recomputing.solve(recomputing.constraints)
    except AutoshardError:
        return float("inf")
    peak = fastest.memory.peak
    prices = memory_prices(peak_weights(fastest.held_bytes), MEMORY_ONLY_STRENGTH, fastest.cost, peak)
    return min(peak, _smallest_peak(recomputing, constraints, prices))


def _smallest_peak(planner: PlanningContext, constraints: Constraints, prices: np.ndarray) -> float:
    """Return the peak of the plan at prices at which memory alone counts; infinite if there is no plan."""
    try:
        return planner.solve(constraints, prices=prices).memory.peak
    except AutoshardError:
        return float("inf")


def _pins_fit(planner: PlanningContext, constraints: Constraints, mesh: MeshShape) -> bool:
    """Return True if the pinned placements are possible on another mesh."""
    shapes = {source.name: source.node.meta["val"].shape for source in planner.graph.inputs}
    specs = {name: Spec.of(*(pin or Replicate() for pin in pins)) for name, pins in constraints.pinned.items()}
    return all(is_placeable(shapes[name], spec, mesh) for name, spec in specs.items())


def _double_largest_axis(mesh: MeshShape) -> MeshShape:
    longest = max(range(mesh.ndim), key=lambda axis: mesh.sizes[axis])
    sizes = [size * 2 if axis == longest else size for axis, size in enumerate(mesh.sizes)]
    return MeshShape.of(dict(zip(mesh.names, sizes, strict=True)))
