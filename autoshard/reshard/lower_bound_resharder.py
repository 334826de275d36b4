"""Lower bounds of the prices of paths, for problems with too many specs for exact prices.

A spec is simplified to one token per mesh axis: the piece of a dim that the axis shards, or its pending reduction. A
piece is identified by the steps outside of it in the whole dim, which moves of other axes do not change. So a
collective over an axis changes the token of that axis only, and one small graph serves all specs of a tensor.

Shortest paths in this graph are never more expensive than exact ones: a pair may use the placements of all other pairs,
and a piece without a place in its dim costs no more than the cheapest piece of that dim.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from autoshard.reshard.path import Price
from autoshard.reshard.states import ALL_GATHER, ALL_TO_ALL, KINDS, REDUCE_SCATTER, Nest, state_of
from autoshard.solver.jit import compiled_when_called
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec

_MOST_CELLS = 1 << 17
"""Number of combinations of tokens above which all pieces of a dim become one token."""


@dataclass(frozen=True, slots=True, order=True)
class Token:
    """The placement of one axis.

    Attributes:
        kind: "whole", "partial" or "shard".
        detail: the reduction if partial.
        dim: the dim if sharded, otherwise -1.
        above: steps of the whole dim outside of the piece; 0 for a piece anywhere in the dim.
        share: the share of one rank where the axis does not divide the piece, otherwise 0.
    """

    kind: str
    detail: str = ""
    dim: int = -1
    above: Fraction = Fraction(0)
    share: Fraction = Fraction(0)


Tokens = tuple[int, ...]
"""The number of every axis's token (see `_TokenTable`)."""


class _TokenTable:
    """Interned tokens: they are compared and looked up very often, and fractions are slow to compare."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._numbers: dict[Token, int] = {}
        self.whole = self.number(Token("whole"))

    def number(self, token: Token) -> int:
        if token not in self._numbers:
            self._numbers[token] = len(self._tokens)
            self._tokens.append(token)
        return self._numbers[token]

    def __getitem__(self, number: int) -> Token:
        return self._tokens[number]

    def sort_ids(self, numbers: Iterable[int]) -> Tokens:
        """Sort numbers by their tokens, so that the order does not depend on earlier queries."""
        return tuple(sorted(numbers, key=self.__getitem__))

    def coarse(self, number: int) -> int:
        """Return a piece of a dim without its place there."""
        token = self[number]
        return self.number(Token("shard", dim=token.dim)) if token.kind == "shard" else number


_MOVES = {
    ("shard", "whole"): "all_gather",
    ("shard", "shard"): "all_to_all",
    ("partial", "whole"): "all_reduce",
    ("partial", "shard"): "reduce_scatter",
    ("whole", "shard"): "slice",
    ("whole", "partial"): "make_partial",
}


@dataclass(eq=False)
class _TokenGraph:
    """States of one tensor, one token per axis, and the collectives between them.

    Attributes:
        number: [tokens of axis 0, tokens of axis 1, ...] -> number of the state; -1 where pieces overlap.
        place: per axis, the position of every token.
        source, target: ends of every move.
        seconds: the price of every move.
        columns: source state -> column of `reached`, for the sources so far.
        reached: seconds to all states, `[states, columns]`.
    """

    number: NDArray[np.int64]
    place: tuple[dict[int, int], ...]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    seconds: NDArray[np.float64]
    columns: dict[int, int] = field(default_factory=dict)
    reached: NDArray[np.float64] | None = None

    def states(self, ends: Sequence[Tokens]) -> NDArray[np.int64]:
        """Return the numbers of states given by their tokens."""
        by_axis = zip(*ends, strict=True)
        places = [[place[token] for token in tokens] for place, tokens in zip(self.place, by_axis, strict=True)]
        return self.number[tuple(places)]

    def distances(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds between states, `[sources, targets]`."""
        # Rows of earlier queries are kept, since a tensor's specs are paired with those of many operators.
        wanted = np.array(sorted(set(sources.tolist()) - self.columns.keys()), dtype=np.int64)
        if len(wanted) or self.reached is None:
            reached = np.full((int(self.number.max()) + 1, len(wanted)), np.inf)
            reached[wanted, np.arange(len(wanted))] = 0.0
            _relax(self.source, self.target, self.seconds, reached)
            self.columns |= {state: len(self.columns) + place for place, state in enumerate(wanted.tolist())}
            self.reached = reached if self.reached is None else np.concatenate([self.reached, reached], axis=1)
        columns = np.array([self.columns[source] for source in sources.tolist()], dtype=np.int64)
        return self.reached[np.ix_(targets, columns)].T


class LowerBoundResharder:
    """A `Resharder` whose prices are lower bounds.

    Args:
        mesh: the mesh.
        price: seconds of a collective, as for `Resharder`.
        gradient_price: the same for gradients on their way to the optimizer.

    Attributes:
        gradients: the resharder for gradients on their way to the optimizer.
    """

    def __init__(self, mesh: MeshShape, price: Price, gradient_price: Price | None = None) -> None:
        self.mesh = mesh
        self.gradients: LowerBoundResharder = (
            self if gradient_price is None else LowerBoundResharder(mesh, gradient_price)
        )
        self._price = price
        self._graphs: dict[object, _TokenGraph] = {}
        self._tokens_of_shape: dict[tuple[int, ...], dict[Spec, Tokens | None]] = defaultdict(dict)
        self._nests: dict[tuple[int, Nest], list[tuple[int, int]]] = {}
        self._token_table = _TokenTable()
        self._tables: dict[object, NDArray[np.float64]] = {}

    def seconds(
        self, shape: Sequence[int], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        """Return lower bounds of the prices between every source and every target, `[sources, targets]`."""
        key = (tuple(shape), dtype_size, tuple(sources), tuple(targets))
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return self._tables[key]

    def _table(
        self, shape: tuple[int, ...], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        rows, columns = ([self._tokens(shape, spec) for spec in specs] for specs in (sources, targets))
        interned, all_tokens = self._token_table, {tokens for tokens in (*rows, *columns) if tokens is not None}
        by_axis = []
        for axis, size in enumerate(self.mesh.sizes):
            used = {interned.whole, *(tokens[axis] for tokens in all_tokens)}
            # Intermediate specs of a path may shard any dim, in ways that no spec of the query has.
            anywhere = {interned.number(Token("shard", dim=dim)) for dim in range(len(shape) if size > 1 else 0)}
            by_axis.append(interned.sort_ids(used) + interned.sort_ids(anywhere))
        if math.prod(map(len, by_axis)) > _MOST_CELLS:
            rows, columns = (
                [tokens and tuple(map(interned.coarse, tokens)) for tokens in ends] for ends in (rows, columns)
            )
            # Coarser tokens allow more moves, so prices are still lower bounds.
            by_axis = [interned.sort_ids({*map(interned.coarse, tokens)}) for tokens in by_axis]
        graph = self._graph(shape, dtype_size, tuple(by_axis))
        # Specs without a state get 0, a lower bound of any price.
        table = np.zeros((len(rows), len(columns)))
        row_places, column_places = ([at for at, tokens in enumerate(ends) if tokens] for ends in (rows, columns))
        if row_places and column_places:
            starts = graph.states([tokens for tokens in rows if tokens])
            ends = graph.states([tokens for tokens in columns if tokens])
            table[np.ix_(row_places, column_places)] = graph.distances(starts, ends)
        return table

    def _tokens(self, shape: tuple[int, ...], spec: Spec) -> Tokens | None:
        """Return the tokens of a spec; None if it has no state."""
        tokens_of_spec = self._tokens_of_shape[shape]
        if spec not in tokens_of_spec:
            tokens_of_spec[spec] = self._compute_tokens(shape, spec)
        return tokens_of_spec[spec]

    def _compute_tokens(self, shape: tuple[int, ...], spec: Spec) -> Tokens | None:
        state = state_of(shape, spec, self.mesh)
        if state is None:
            return None
        interned = self._token_table
        tokens = [interned.whole if kind is None else interned.number(Token("partial", kind)) for kind in state.partial]
        for dim, nest in enumerate(state.nests):
            for axis, token in self._pieces(dim, nest) if nest else ():
                tokens[axis] = token
        return tuple(tokens)

    def _pieces(self, dim: int, nest: Nest) -> list[tuple[int, int]]:
        """Return the axes that shard a dim, each with the token of its piece."""
        if (dim, nest) not in self._nests:
            # Distributed steps outside of the loop.
            pieces, steps = [], Fraction(1)
            for loop in nest:
                block, total = loop.share(self.mesh)
                share = Fraction(block, total) if loop.total else Fraction(0)
                token = Token("shard", "", dim, loop.outer * steps, share)
                pieces.append((loop.axis, self._token_table.number(token)))
                steps = steps * total / block
            self._nests[dim, nest] = pieces
        return self._nests[dim, nest]

    def _graph(self, shape: tuple[int, ...], dtype_size: int, tokens: tuple[Tokens, ...]) -> _TokenGraph:
        key = (shape, dtype_size, tokens)
        if key not in self._graphs:
            self._graphs[key] = self._build_graph(shape, dtype_size, tokens)
        return self._graphs[key]

    def _build_graph(self, shape: tuple[int, ...], dtype_size: int, numbers: tuple[Tokens, ...]) -> _TokenGraph:
        tokens = tuple(tuple(map(self._token_table.__getitem__, by_axis)) for by_axis in numbers)
        number = self._number_states(tokens)
        states = np.argwhere(number >= 0)
        sharded = [np.array([token.kind == "shard" for token in by_axis]) for by_axis in tokens]
        # The bytes of a rank depend only on the set of axes that shard (one bit each), not on their dims.
        holding = sum(sharded[axis][states[:, axis]].astype(np.int64) << axis for axis in range(self.mesh.ndim))
        holding = np.asarray(holding, dtype=np.int64).reshape(len(states))
        inner = self._inner(shape, tokens, states)
        parts = []
        for axis, size in enumerate(self.mesh.sizes):
            if size > 1:
                # A line contains the states that differ only in this axis; moves over the axis are within lines.
                lines = np.moveaxis(number, axis, 0).reshape(len(tokens[axis]), -1)
                kinds = np.array([[_kind(first, second) for second in tokens[axis]] for first in tokens[axis]])
                usable = (kinds >= 0)[:, :, None] & (lines >= 0)[:, None, :] & (lines >= 0)[None, :, :]
                before, after, line = np.nonzero(usable)
                source, target, kind = lines[before, line], lines[after, line], kinds[before, after]
                price = self._prices(shape, dtype_size, axis)
                seconds = price[kind, holding[source]]
                unpacked = np.isin(kind, (ALL_GATHER, ALL_TO_ALL)) & inner[source, axis]
                packed = np.isin(kind, (REDUCE_SCATTER, ALL_TO_ALL)) & inner[target, axis]
                seconds = seconds + unpacked * price[-1, holding[target]] + packed * price[-1, holding[source]]
                parts.append((source, target, seconds))
        nothing = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
        source, target, seconds = map(np.concatenate, zip(nothing, *parts, strict=True))
        # Moves from one state read its row of `reached` while it is cached.
        order = np.argsort(source, kind="stable")
        places = tuple({token: place for place, token in enumerate(by_axis)} for by_axis in numbers)
        return _TokenGraph(number, places, source[order], target[order], seconds[order])

    def _number_states(self, tokens: tuple[tuple[Token, ...], ...]) -> NDArray[np.int64]:
        """Number the states: all combinations in which no two axes shard overlapping pieces of a dim."""
        apart = np.ones(tuple(map(len, tokens)), dtype=bool)
        sizes = self.mesh.sizes
        for first, second in itertools.combinations(range(len(tokens)), 2):
            pairs = [
                [_may_coexist(left, sizes[first], right, sizes[second]) for right in tokens[second]]
                for left in tokens[first]
            ]
            view = [1] * len(tokens)
            view[first], view[second] = len(tokens[first]), len(tokens[second])
            apart &= np.array(pairs).reshape(view)
        number = np.full(apart.shape, -1, dtype=np.int64)
        number[apart] = np.arange(np.count_nonzero(apart))
        return number

    def _inner(
        self, shape: tuple[int, ...], tokens: tuple[tuple[Token, ...], ...], states: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return `[states, axes]`, True where an axis's piece is certainly inside other loops of the local tensor."""
        dims = [np.array([token.dim for token in row])[states[:, axis]] for axis, row in enumerate(tokens)]
        above = [np.array([float(token.above) for token in row])[states[:, axis]] for axis, row in enumerate(tokens)]
        # Outside of a piece are the dims before it and its outer steps, less those that other axes distribute.
        inner = np.zeros(states.shape, dtype=bool)
        for axis in range(len(tokens)):
            outside = np.ones(len(states))
            for dim, size in enumerate(shape):
                outside *= np.where(dims[axis] > dim, float(size), 1.0)
            outside *= np.maximum(above[axis], 1.0)
            for other_axis, size in enumerate(self.mesh.sizes):
                same = (dims[other_axis] == dims[axis]) & (above[other_axis] < above[axis])
                outside /= np.where(
                    (dims[other_axis] >= 0) & ((dims[other_axis] < dims[axis]) | same), float(size), 1.0
                )
            # 1e-9 for rounding of products and quotients.
            inner[:, axis] = (dims[axis] >= 0) & (outside > 1.0 + 1e-9)
        return inner

    def _prices(self, shape: tuple[int, ...], dtype_size: int, axis: int) -> NDArray[np.float64]:
        """Return seconds of collectives over an axis, `[kinds, sets of axes that shard]`; the last kind is a copy."""
        tensor_bytes = math.prod(map(int, shape)) * dtype_size
        local_bytes = [
            tensor_bytes
            // math.prod(size for axis_of_bit, size in enumerate(self.mesh.sizes) if bits >> axis_of_bit & 1)
            for bits in range(1 << self.mesh.ndim)
        ]
        return np.array([[self._price(kind, amount, axis) for amount in local_bytes] for kind in (*KINDS, "copy")])


def _kind(before: Token, after: Token) -> int:
    """Return the collective between two tokens of an axis; -1 where there is none."""
    kind = _MOVES.get((before.kind, after.kind))
    return -1 if kind is None or before == after else KINDS.index(kind)


def _may_coexist(first: Token, size: int, second: Token, second_size: int) -> bool:
    """Return False if the pieces of two axes certainly overlap: both are evenly divided pieces of one dim."""
    if first.kind != "shard" or first.dim != second.dim:
        return True
    if not first.above or not second.above or first.share or second.share:
        return True
    (above, length), (below, _) = sorted(((first.above, size), (second.above, second_size)))
    # True if the outer piece ends where the inner one may begin: they are different loops of the dim.
    return below % (above * length) == 0


@compiled_when_called
def _relax(source, target, seconds, reached):  # type: ignore[no-untyped-def] # pragma: no cover
    """Shorten `reached`, `[states, columns]`, over all moves until none helps (Bellman-Ford)."""
    states, columns = reached.shape
    # States whose distance fell in the last round: only their moves can help.
    fresh = np.zeros(states, dtype=np.bool_)
    for state in range(states):
        fresh[state] = reached[state].min() < np.inf if columns else False
    changed = True
    while changed:
        changed, later = False, np.zeros(states, dtype=np.bool_)
        for move in range(len(source)):
            if not (fresh[source[move]] or later[source[move]]):
                continue
            start, end, price = reached[source[move]], reached[target[move]], seconds[move]
            closer = 0
            # Branch-free, so that the loop is vectorised.
            for column in range(columns):
                through = start[column] + price
                closer += through < end[column]
                end[column] = min(end[column], through)
            if closer > 0:
                changed = later[target[move]] = True
        fresh = later
