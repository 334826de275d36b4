"""Tables of the edges of a problem: made once for equal tensors and equal options, and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from autoshard.patterns.rule import TensorMeta
from autoshard.planner.regather import RegatherEdge, regather_edge, tie_costs
from autoshard.planner.strategy_tables import SpecList
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.reshard.path import Resharder
from autoshard.specs.axes import MeshShape


class EdgeTables:
    """Seconds of reshards between all options of two variables.

    Args:
        resharder: prices them.
    """

    def __init__(self, resharder: Resharder | LowerBoundResharder) -> None:
        self.resharder = resharder
        self._reshard_seconds: dict[tuple[object, ...], np.ndarray] = {}
        self._copy_bytes: dict[tuple[object, ...], np.ndarray] = {}
        self._regather_edges: dict[tuple[object, ...], RegatherEdge] = {}
        self._tie_costs: dict[int, np.ndarray] = {}

    def reshard_seconds(
        self, meta: TensorMeta, sources: SpecList, targets: SpecList, gradient: bool = False
    ) -> np.ndarray:
        """Seconds to reshard a tensor between all specs of two lists; `gradient`: on its way to the optimizer."""
        key = (meta.shape, meta.dtype.itemsize, id(sources), id(targets), gradient)
        if key not in self._reshard_seconds:
            resharder: Resharder | LowerBoundResharder = self.resharder.gradients if gradient else self.resharder
            distinct = resharder.seconds(meta.shape, meta.dtype.itemsize, sources.distinct, targets.distinct)
            self._reshard_seconds[key] = distinct[np.ix_(sources.index, targets.index)]
        return self._reshard_seconds[key]

    def copy_bytes(self, meta: TensorMeta, sources: SpecList, targets: SpecList, mesh: MeshShape) -> np.ndarray:
        """Bytes of the copy that a reshard makes between all specs of two lists; zero where it makes none."""
        key = (meta.shape, meta.dtype.itemsize, id(sources), id(targets))
        if key not in self._copy_bytes:
            self._copy_bytes[key] = targets.bytes(meta, mesh) * _needs_copy(sources, targets)
        return self._copy_bytes[key]

    def regather_edge(
        self, meta: TensorMeta, sources: SpecList, hub: SpecList, mesh: MeshShape, *, own: bool
    ) -> RegatherEdge:
        """The edge from where a tensor lies to the hub of the backward half.

        Args:
            meta: of the tensor.
            sources: how it lies.
            hub: the specs of both hubs.
            mesh: the mesh axes.
            own: whether it has memory of its own, which is held for the backward half alone.
        """
        key = (meta.shape, meta.dtype.itemsize, id(sources), id(hub), own)
        if key not in self._regather_edges:
            self._regather_edges[key] = regather_edge(
                self.reshard_seconds(meta, sources, hub),
                self.copy_bytes(meta, sources, hub, mesh),
                sources.bytes(meta, mesh) * own,
            )
        return self._regather_edges[key]

    def tie_costs(self, specs: int) -> np.ndarray:
        """What ties the hub of the backward half to that of the forward half, each with so many specs."""
        if specs not in self._tie_costs:
            self._tie_costs[specs] = tie_costs(specs)
        return self._tie_costs[specs]


def _needs_copy(sources: SpecList, targets: SpecList) -> np.ndarray:
    """For all pairs of two lists, whether one spec is not the other: whether a copy is made."""
    distinct = np.array([[float(source is not target) for target in targets.distinct] for source in sources.distinct])
    return distinct[np.ix_(sources.index, targets.index)]


def _reduced_before(sources: SpecList, targets: SpecList) -> np.ndarray:
    """What is cast for the optimizer is reduced before."""
    partial = np.array([bool(spec.partial_axes) for spec in sources.distinct])
    return np.where(partial[sources.index], np.inf, 0.0)[:, None]


def _reduced_later(sources: SpecList, targets: SpecList) -> np.ndarray:
    """What is cast for its reduction is not reduced before."""
    reduced = [
        [not set(source.partial_axes) <= set(target.partial_axes) for target in targets.distinct]
        for source in sources.distinct
    ]
    return np.where(np.array(reduced)[np.ix_(sources.index, targets.index)], np.inf, 0.0)


FORBIDDEN: Mapping[str, Callable[[SpecList, SpecList], np.ndarray]] = {
    "reduced before": _reduced_before,
    "reduced later": _reduced_later,
}
"""Infinite where a gradient would be reduced in another dtype than the policy of precisions asks for."""
