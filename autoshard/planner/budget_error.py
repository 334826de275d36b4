"""What to say where no plan fits: the smallest peak, what it is made of, and what would make it smaller."""

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
    """No plan of one graph fits a limit; what would make the peak smaller is not looked for yet, since that takes long.

    Args:
        planner: what planned.
        limit: bytes per device that are too few.
        least: the smallest peak that was found.
        wishes: under which it was found.
        prices: of memory that led to it.
        late: whether the time for the search was over.
    """

    def __init__(
        self, planner: PlanningContext, limit: int, least: Memory, wishes: Constraints, prices: np.ndarray, late: bool
    ) -> None:
        self._planner, self._limit, self._least = planner, limit, least
        self._wishes, self._prices, self._late = wishes, prices, late
        super().__init__(self._message(()), least.peak)

    def with_remedies(self) -> BudgetError:
        """The error that names the ways out too, each tried once."""
        outs = () if self._late else tuple(_find_remedies(self._planner, self._least, self._wishes, self._prices))
        return BudgetError(self._message(outs), self._least.peak)

    def _message(self, outs: Sequence[str]) -> str:
        planner, least = self._planner, self._least
        parts = ", ".join(f"{name} {format_bytes(held)}" for name, held in memory_parts(least).items())
        where = f"in the {least.phase}{f' of {least.module}' if least.module else ''}" if least.phase else ""
        said = "".join(f", {out}" for out in outs)
        shortened = (
            f" The search ended at time_limit={planner.settings.time_limit:g} s: a longer one may find a smaller peak."
            if self._late
            else ""
        )
        return (
            f"no plan fits in {format_bytes(self._limit)} per device on mesh {planner.mesh}: the smallest peak found "
            f"is {format_bytes(least.peak)}, {where} ({parts}). Raise memory_limit to {least.peak} bytes{said}, or "
            f"make the batch smaller.{shortened}"
        )


def _find_remedies(planner: PlanningContext, least: Memory, wishes: Constraints, prices: np.ndarray) -> Iterator[str]:
    """Texts of what makes the peak smaller, with the peaks that it was seen to lead to."""
    pinned = [source.name for source in planner.graph.inputs if source.kind == "parameter"]
    pinned = [name for name in pinned if name in wishes.pinned]
    if pinned:
        free = {name: pins for name, pins in wishes.pinned.items() if name not in pinned}
        parameters = frozenset(source.name for source in planner.graph.inputs if source.kind == "parameter")
        peak = _peak(planner, replace(wishes, pinned=free, forced=parameters), prices)
        if peak < least.peak:
            others = f" and {len(pinned) - 1} more" if len(pinned) > 1 else ""
            yield f"drop the hints (without that on {pinned[0]}{others}, {format_bytes(peak)} are enough)"
    layers = (
        recomputable(planner.graph) if planner.settings.recompute == "none" and not planner.graph.recomputed else ()
    )
    if layers:
        peak = _recompute_peak(planner, [layer.name for layer in layers], wishes)
        if peak < least.peak:
            yield f'allow recomputation (recompute="full" needs {format_bytes(peak)})'
    mesh = _double_largest_axis(planner.mesh)
    if (planner.cluster.count is not None and mesh.size > planner.cluster.count) or not _pins_fit(
        planner, wishes, mesh
    ):
        yield "add devices"
        return
    larger = type(planner)(planner.graph, mesh, planner.cluster, wishes, planner.settings)
    peak = _peak(larger, wishes, prices)
    yield f"add devices ({mesh} needs {format_bytes(peak)})" if peak < least.peak else "add devices"


def _recompute_peak(planner: PlanningContext, layers: Sequence[str], wishes: Constraints) -> float:
    """The peak where all layers are run again, at prices on the moments at which the fastest plan then holds most."""
    other = type(planner)(
        recompute_layers(planner.graph, layers), planner.mesh, planner.cluster, planner.constraints, planner.settings
    )
    other.deadline = planner.deadline
    try:
        fastest = other.solve(other.constraints)
    except AutoshardError:
        return float("inf")
    peak = fastest.memory.peak
    return min(
        peak,
        _peak(other, wishes, memory_prices(peak_weights(fastest.held_bytes), MEMORY_ONLY_STRENGTH, fastest.cost, peak)),
    )


def _peak(planner: PlanningContext, wishes: Constraints, prices: np.ndarray) -> float:
    """The peak of one plan under these wishes, at prices at which memory alone counts; infinite where there is none."""
    try:
        return planner.solve(wishes, prices=prices).memory.peak
    except AutoshardError:
        return float("inf")


def _pins_fit(planner: PlanningContext, wishes: Constraints, mesh: MeshShape) -> bool:
    """Whether what is pinned can lie so on another mesh."""
    shapes = {source.name: source.node.meta["val"].shape for source in planner.graph.inputs}
    pins = ((name, Spec.of(*(one or Replicate() for one in pins))) for name, pins in wishes.pinned.items())
    return all(is_placeable(shapes[name], spec, mesh) for name, spec in pins)


def _double_largest_axis(mesh: MeshShape) -> MeshShape:
    """The mesh with its largest axis twice as long."""
    longest = max(range(mesh.ndim), key=lambda axis: mesh.sizes[axis])
    sizes = [size * 2 if axis == longest else size for axis, size in enumerate(mesh.sizes)]
    return MeshShape.of(dict(zip(mesh.names, sizes, strict=True)))
