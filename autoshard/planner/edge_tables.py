"""Tables of the edges of a problem, made once for equal tensors and equal options, so that all layers share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from autoshard.patterns.rule import TensorMeta
from autoshard.planner.regather import RegatherEdge, regather_edge, tie_costs
from autoshard.planner.strategy_tables import SpecList
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.reshard.path import Resharder
from autoshard.specs.axes import MeshShape


class EdgeTables:
    """Tables over all pairs of options of two variables.

    Args:
        resharder: prices the reshards.
    """

    def __init__(self, resharder: Resharder | LowerBoundResharder) -> None:
        self.resharder = resharder
        # Lists of specs are interned, and compared by identity.
        self._reshard_seconds: dict[tuple[object, ...], np.ndarray] = {}
        self._copy_bytes: dict[tuple[object, ...], np.ndarray] = {}
        self._regather_edges: dict[tuple[object, ...], RegatherEdge] = {}
        self.tie_costs = cache(tie_costs)

    def reshard_seconds(
        self, meta: TensorMeta, sources: SpecList, targets: SpecList, gradient: bool = False
    ) -> np.ndarray:
        """Return the seconds of the reshards of a tensor; `gradient` is True on the way to the optimizer."""
        key = (meta.shape, meta.dtype.itemsize, sources, targets, gradient)
        if key not in self._reshard_seconds:
            resharder: Resharder | LowerBoundResharder = self.resharder.gradients if gradient else self.resharder
            distinct = resharder.seconds(meta.shape, meta.dtype.itemsize, sources.distinct, targets.distinct)
            self._reshard_seconds[key] = distinct[np.ix_(sources.index, targets.index)]
        return self._reshard_seconds[key]

    def copy_bytes(self, meta: TensorMeta, sources: SpecList, targets: SpecList, mesh: MeshShape) -> np.ndarray:
        """Return the bytes of the copy that a reshard makes; zero where both specs are the same."""
        key = (meta.shape, meta.dtype.itemsize, sources, targets)
        if key not in self._copy_bytes:
            distinct = [[float(source is not target) for target in targets.distinct] for source in sources.distinct]
            copies = np.array(distinct)[np.ix_(sources.index, targets.index)]
            self._copy_bytes[key] = targets.bytes(meta, mesh) * copies
        return self._copy_bytes[key]

    def regather_edge(
        self, meta: TensorMeta, sources: SpecList, hub: SpecList, mesh: MeshShape, *, allocated: bool
    ) -> RegatherEdge:
        """Return the edge from a tensor to the hub of the backward half.

        Args:
            meta: shape and dtype of the tensor.
            sources: the specs of the tensor.
            hub: the specs of both hubs.
            mesh: the mesh axes.
            allocated: True if the step allocates memory for the tensor, held for the backward half alone.
        """
        key = (meta.shape, meta.dtype.itemsize, sources, hub, allocated)
        if key not in self._regather_edges:
            self._regather_edges[key] = regather_edge(
                self.reshard_seconds(meta, sources, hub),
                self.copy_bytes(meta, sources, hub, mesh),
                sources.bytes(meta, mesh) * allocated,
            )
        return self._regather_edges[key]


def _reduced_before(sources: SpecList, targets: SpecList) -> np.ndarray:
    """Forbid partial sources: a gradient is reduced before it is cast for the optimizer."""
    partial = np.array([bool(spec.partial_axes) for spec in sources.distinct])
    return np.where(partial[sources.index], np.inf, 0.0)[:, None]


def _reduced_later(sources: SpecList, targets: SpecList) -> np.ndarray:
    """Forbid reductions: a gradient is cast before it is reduced."""
    reduced = [
        [not set(source.partial_axes) <= set(target.partial_axes) for target in targets.distinct]
        for source in sources.distinct
    ]
    return np.where(np.array(reduced)[np.ix_(sources.index, targets.index)], np.inf, 0.0)


FORBIDDEN: Mapping[str, Callable[[SpecList, SpecList], np.ndarray]] = {
    "reduced before": _reduced_before,
    "reduced later": _reduced_later,
}
"""Tables that are infinite where a gradient would be reduced in another dtype than the precision policy asks for."""
