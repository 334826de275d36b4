"""Prices that no path between two specs is below: for bounds where the specs are too many for exact ones.

How axes are nested in a dim, and at which strides, is forgotten: what is left of a spec is, per mesh axis, which dim it
shards, or which reduction it leaves open. Every path of collectives between two specs is one between what is left of
them, no dearer, so that a shortest path there bounds all of them from below.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.reshard.path import Price
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import Spec, is_shard

Token = tuple[str, int]
"""What one axis does: ("shard", dim), ("partial", number of the reduction) or ("whole", 0)."""

_WHOLE: Token = ("whole", 0)
_REDUCTIONS = ("sum", "avg", "max", "min", "product")


class LooseResharder:
    """Stands in for a `Resharder` where prices need not be met, only never be passed.

    Args:
        mesh: the mesh.
        price: seconds of a collective, as for `Resharder`.
        gradient_price: the same for gradients on their way to the optimizer.

    Attributes:
        gradients: the one for gradients on their way to the optimizer.
    """

    def __init__(self, mesh: MeshShape, price: Price, gradient_price: Price | None = None) -> None:
        self.mesh = mesh
        self.gradients: LooseResharder = self if gradient_price is None else LooseResharder(mesh, gradient_price)
        self._price = price
        self._known: dict[object, tuple[dict[tuple[Token, ...], int], NDArray[np.float64]]] = {}
        self._tables: dict[object, NDArray[np.float64]] = {}

    def seconds(
        self, shape: Sequence[int], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        """At most the price of the cheapest path between every source and every target, `[sources, targets]`."""
        key = (tuple(shape), dtype_size, tuple(sources), tuple(targets))
        if key not in self._tables:
            rows, columns = ([self._tokens(spec, len(shape)) for spec in specs] for specs in (sources, targets))
            operations = tuple(sorted({token for tokens in (*rows, *columns) if tokens for token in tokens} - {_WHOLE}))
            partial = tuple(token for token in operations if token[0] == "partial")
            index, distances = self._distances(tuple(shape), dtype_size, partial)
            known = [[index[tokens] if tokens else -1 for tokens in ends] for ends in (rows, columns)]
            table = distances[np.ix_(*known)]
            table[[place < 0 for place in known[0]], :] = 0.0
            table[:, [place < 0 for place in known[1]]] = 0.0
            self._tables[key] = table
        return self._tables[key]

    def _tokens(self, spec: Spec, dims: int) -> tuple[Token, ...] | None:
        """What is left of a spec; nothing where the data says which rows a rank holds, which is priced at nothing."""
        if spec.is_routed:
            return None
        partial = set(spec.partial_axes)
        return tuple(
            ("partial", _REDUCTIONS.index(placement.reduce_op))  # type: ignore[attr-defined]
            if axis in partial
            else ("shard", dim_of(placement, dims))
            if is_shard(placement)
            else _WHOLE
            for axis, placement in enumerate(spec)
        )

    def _distances(
        self, shape: tuple[int, ...], dtype_size: int, partial: tuple[Token, ...]
    ) -> tuple[dict[tuple[Token, ...], int], NDArray[np.float64]]:
        """Every state, and the shortest distances between all of them."""
        key = (shape, dtype_size, partial)
        if key not in self._known:
            tokens = (_WHOLE, *partial, *(("shard", dim) for dim in range(len(shape))))
            choices = [tokens if size > 1 else (_WHOLE,) for size in self.mesh.sizes]
            index = {state: number for number, state in enumerate(itertools.product(*choices))}
            total = float(np.prod(shape, dtype=np.float64)) * dtype_size
            self._known[key] = index, _shortest(self._moves(index, total))
        return self._known[key]

    def _moves(self, index: dict[tuple[Token, ...], int], total: float) -> NDArray[np.float64]:
        """Prices of single collectives; `inf` between states that no single one joins."""
        moves = np.full((len(index), len(index)), np.inf)
        np.fill_diagonal(moves, 0.0)
        for state, number in index.items():
            held = total
            for token, size in zip(state, self.mesh.sizes, strict=True):
                held /= size if token[0] == "shard" else 1
            for axis, before in enumerate(state):
                for after in {other[axis] for other in index} - {before} if self.mesh.sizes[axis] > 1 else ():
                    kind = _KINDS.get((before[0], after[0]))
                    if kind is not None:
                        target = index[(*state[:axis], after, *state[axis + 1 :])]
                        moves[number, target] = self._price(kind, int(held), axis)
        return moves


_KINDS = {
    ("shard", "whole"): "all_gather",
    ("shard", "shard"): "all_to_all",
    ("partial", "whole"): "all_reduce",
    ("partial", "shard"): "reduce_scatter",
    ("whole", "shard"): "slice",
    ("whole", "partial"): "make_partial",
}


def _shortest(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shortest distances between all pairs (Floyd and Warshall)."""
    for middle in range(len(distances)):
        np.minimum(distances, distances[:, middle, None] + distances[None, middle, :], out=distances)
    return distances
