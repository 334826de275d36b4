"""Shortest paths of collectives between specs, priced (TensorOpt 4.2), and the prices of many pairs from one graph.

The path of a pair may use only the plain nests and those of its two ends, so that it depends on nothing else. Tensors
of many dims have so many groups of specs that a graph for every two of them takes minutes. The graph of all nests
contains the graphs of all pairs. If one of its shortest paths uses only the nests of a pair, that path is the pair's.
The other pairs are solved separately, without the states that they may not use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.reshard.states import (
    ALL_GATHER,
    ALL_TO_ALL,
    KINDS,
    REDUCE_SCATTER,
    Nest,
    State,
    StateGraph,
    count_of_states,
    extra_nests,
    plain_nests,
    spec_of_state,
    state_graph,
    state_of,
)
from autoshard.size import Sizes, at
from autoshard.solver.jit import compiled_when_called
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.layout import canonical
from autoshard.specs.spec import Spec
from autoshard.units import format_bytes

Extra = frozenset[tuple[int, frozenset[Nest]]]
"""The dims, each with its nests other than the plain ones, that the paths from or to some specs may use."""

# Bits of a word: groups of targets that are propagated together.
_WORD = 64


@dataclass(frozen=True, slots=True)
class PairEnds:
    """One side of many pairs.

    Attributes:
        rows: positions of the specs in the table of prices.
        states: the states of the specs.
        places: positions of the states in the graph.
        groups: for every state, the position in `extras` of the nests that its paths may use besides the plain ones.
        extras: these nests.
    """

    rows: tuple[int, ...]
    states: tuple[State, ...]
    places: NDArray[np.int64]
    groups: NDArray[np.int64]
    extras: tuple[Extra, ...]

    @staticmethod
    def of(graph: StateGraph, by_extra: Mapping[Extra, Sequence[tuple[int, State]]]) -> PairEnds:
        """Return the states in the order of their groups."""
        listed = [(row, state, group) for group, rows in enumerate(by_extra.values()) for row, state in rows]
        rows, states, groups = zip(*listed, strict=True) if listed else ((), (), ())
        places = np.array([graph.index[state] for state in states], dtype=np.int64)
        return PairEnds(rows, states, places, np.array(groups, dtype=np.int64), tuple(by_extra))


def distances_of_pairs(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    plain: Sequence[frozenset[Nest]],
    sources: PairEnds,
    targets: PairEnds,
) -> NDArray[np.float64]:
    """Return the seconds of the cheapest path of every pair that uses only plain nests and those of its ends.

    Args:
        graph: the graph of all nests.
        seconds: of its edges.
        distance: `[sources, states]`, seconds of the cheapest path in the graph.
        plain: per dim, the nests that all paths may use.
        sources, targets: the ends.
    """
    closed_to = _closed_dims(graph, plain, sources.extras), _closed_dims(graph, plain, targets.extras)
    # Lower bounds: these paths may use any nest.
    prices = distance[:, targets.places]
    # If there is no path in the larger graph, there is none in the smaller one.
    proved = np.isinf(prices)
    for first in range(0, len(targets.extras), _WORD):
        of_word = (targets.groups >= first) & (targets.groups < first + _WORD)
        reached = _reachable_groups(
            graph, seconds, distance, sources, closed_to[0], closed_to[1][first : first + _WORD]
        )
        bits = np.uint64(1) << (targets.groups[of_word] - first).astype(np.uint64)
        proved[:, of_word] |= (reached[:, targets.places[of_word]] & bits) != 0
    if proved.all():
        return prices
    # A search from one source serves all targets of a group.
    unproved = np.zeros((len(prices), len(targets.extras)), dtype=np.bool_)
    rows, columns = np.nonzero(~proved)
    unproved[rows, targets.groups[columns]] = True
    order = np.argsort(targets.groups, kind="stable")
    begins = np.searchsorted(targets.groups[order], np.arange(len(targets.extras) + 1))
    _price_within(
        graph.source,
        np.searchsorted(graph.target, np.arange(len(graph.states) + 1)),
        seconds,
        *closed_to,
        np.argwhere(unproved),
        sources.groups,
        sources.places,
        targets.places,
        order,
        begins,
        prices,
    )
    return prices


def _closed_dims(graph: StateGraph, plain: Sequence[frozenset[Nest]], extras: Sequence[Extra]) -> NDArray[np.uint64]:
    """Return as bits, `[extras, states]`, the dims whose nest is neither a plain one nor one of the group's."""
    dims = np.zeros((len(extras), len(graph.states)), dtype=np.uint64)
    for number, extra in enumerate(extras):
        more = dict(extra)
        for dim, choices in enumerate(graph.nests):
            usable = plain[dim] | more.get(dim, frozenset())
            closed = np.array([nest not in usable for nest in choices])[graph.numbers[:, dim]]
            dims[number] |= closed.astype(np.uint64) << np.uint64(dim)
    return dims


def _reachable_groups(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    sources: PairEnds,
    from_source: NDArray[np.uint64],
    to_target: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Return as bits, `[sources, states]`, the groups of targets for which a shortest path to a state is allowed."""
    shifts = np.uint64(1) << np.arange(len(to_target), dtype=np.uint64)
    # A pair may use a state if each dim is open to one of its ends: no dim is closed to both.
    allowed = np.stack(
        [np.bitwise_or.reduce(((closed & to_target) == 0) * shifts[:, None], axis=0) for closed in from_source]
    )[sources.groups]
    count = len(graph.states)
    with np.errstate(invalid="ignore"):
        # Edges of shortest paths. Distances are sums in the order of the path, so equality is exact.
        before = distance[:, graph.source]
        tight = (before + seconds == distance[:, graph.target]) & np.isfinite(before)
    row, edge = np.nonzero(tight)
    # `end` ascends, as targets do.
    start, end = row * count + graph.source[edge], row * count + graph.target[edge]
    first = np.flatnonzero(np.diff(end, prepend=-1))
    ends, limit = end[first], allowed.reshape(-1)
    reached = np.zeros(len(distance) * count, dtype=np.uint64)
    begin = np.arange(len(distance)) * count + sources.places
    reached[begin] = limit[begin]
    # Propagate bits along these edges until nothing changes; a state passes on only bits of groups that may use it.
    while len(first):
        more = reached[ends] | (np.bitwise_or.reduceat(reached[start], first) & limit[ends])
        if np.array_equal(more, reached[ends]):
            break
        reached[ends] = more
    return reached.reshape(-1, count)


@compiled_when_called
def _price_within(  # pragma: no cover
    source: NDArray[np.int32],
    into: NDArray[np.int64],
    seconds: NDArray[np.float64],
    from_source: NDArray[np.uint64],
    to_target: NDArray[np.uint64],
    tasks: NDArray[np.int64],
    groups: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    prices: NDArray[np.float64],
) -> None:
    """Write the price of the cheapest path over the states that both ends may use into a table.

    Args:
        source: the states where edges begin; edges are ordered by the state where they end.
        into: the first edge into every state, and the number of edges.
        seconds: of the edges.
        from_source, to_target: `_closed_dims` of the groups of either end.
        tasks: pairs of a row of the table and a group of targets.
        groups, starts: the group and the state of every row.
        ends: the state of every column.
        order, first: the columns by group, and the beginning of every group in them.
        prices: the table.
    """
    distance = np.empty(len(into) - 1)
    usable = np.empty(len(into) - 1, dtype=np.int64)
    for task in range(len(tasks)):
        row, target = tasks[task]
        source_closed, target_closed = from_source[groups[row]], to_target[target]
        distance[:] = np.inf
        distance[starts[row]] = 0.0
        count = 0
        for state in range(len(distance)):
            if source_closed[state] & target_closed[state] == 0:
                usable[count] = state
                count += 1
        # Bellman-Ford, in place: within a sweep, later states see the gains of earlier ones.
        closer = True
        while closer:
            closer = False
            for state in usable[:count]:
                for edge in range(into[state], into[state + 1]):
                    through = distance[source[edge]] + seconds[edge]
                    if through < distance[state]:
                        distance[state] = through
                        closer = True
        for column in order[first[target] : first[target + 1]]:
            prices[row, column] = distance[ends[column]]


Price = Callable[[str, int, int], float]
"""Seconds of a collective: kind, bytes that a rank holds before it, mesh axis."""

# Distances [states, sources] computed together: 4 MiB.
_CHUNK_ENTRIES = 1 << 19
# Bits for bytes in a key that packs kind, axis and bytes in 64 bits.
_BYTES_BITS = 52
# Of one graph for all pairs.
_MOST_STATES = 1 << 12


class NoPathError(ValueError):
    """No path of collectives leads from one spec to another."""


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, or one local move, over one mesh axis.

    Attributes:
        kind: one of `KINDS`.
        axis: the mesh axis.
        source, target: the spec before and after.
        bytes: held by one rank before the step, with padding of the blocks that it sends.
        seconds: the price, including the local copies that the step needs.
    """

    kind: str
    axis: int
    source: Spec
    target: Spec
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """The cheapest steps that take a tensor of `shape` from `source` to `target`; no steps where they are equal."""

    shape: tuple[int, ...]
    source: Spec
    target: Spec
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def at(self, sizes: Sizes) -> Path:
        """Return the same steps with dynamic sizes replaced by `sizes`; the path itself if `sizes` is empty."""
        if not sizes:
            return self
        steps = (replace(step, source=step.source.at(sizes), target=step.target.at(sizes)) for step in self.steps)
        return Path(at(self.shape, sizes), self.source.at(sizes), self.target.at(sizes), tuple(steps))


@dataclass(frozen=True, slots=True)
class _PricedGraph:
    """A state graph for one shape and element size: bytes and seconds per edge, and the distances known so far.

    `rows` holds, by source, the seconds to every state.
    """

    graph: StateGraph
    bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    rows: dict[State, NDArray[np.float64]]


class Resharder:
    """Prices and finds paths between specs of one mesh, with a cache of its results.

    A path depends only on shape, element size, source and target, never on earlier queries: ranks that ask in
    different order issue the same collectives.

    Args:
        mesh: the mesh.
        price: seconds of a collective from its kind, the bytes a rank holds before it, and the mesh axis. Kinds are
            those of `Step`, and "copy" for a local copy into the order that a collective needs.
        gradient_price: the same for gradients on their way to the optimizer; `price` by default.
        shared: the axis whose ranks hold unequal shares of a dynamic size, if there is one: on it, tensors with such a
            dim are only gathered and sliced.

    Attributes:
        gradients: the resharder for gradients on their way to the optimizer.
    """

    def __init__(
        self, mesh: MeshShape, price: Price, gradient_price: Price | None = None, shared: SharedAxis | None = None
    ) -> None:
        self.mesh = mesh
        self.shared = shared
        self.gradients: Resharder = self if gradient_price is None else Resharder(mesh, gradient_price, shared=shared)
        self._price = price
        # Keys are those of `_prices_of`.
        self._prices: dict[int, float] = {}
        self._graphs: dict[tuple[tuple[int, ...], int, frozenset[str], Extra], _PricedGraph] = {}
        self._tables: dict[object, NDArray[np.float64]] = {}
        self._states: dict[tuple[int, ...], dict[Spec, tuple[State, Extra] | None]] = {}
        self._paths: dict[object, Path] = {}

    def seconds(
        self, shape: Sequence[int], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        """Return the prices of the cheapest paths between every source and every target.

        Args:
            shape: global shape of the tensor.
            dtype_size: bytes of one element.

        Returns:
            `[sources, targets]` seconds, read-only; inf where no path exists.
        """
        key = (tuple(shape), dtype_size, tuple(sources), tuple(targets))
        if key not in self._tables:
            table = self._table(*key)
            table.flags.writeable = False
            self._tables[key] = table
        return self._tables[key]

    def same_graph_positions(self, shape: Sequence[int], specs: Sequence[Spec], which: int) -> list[int]:
        """Return the positions of the specs that are priced in the same graphs as the spec at `which`."""
        extras = [None if state is None else state[1] for state in self._states_and_extras(tuple(shape), specs)]
        # A spec that has no state is priced alone.
        same = [position for position, extra in enumerate(extras) if extra is not None and extra == extras[which]]
        return same or [which]

    def path(self, shape: Sequence[int], dtype_size: int, source: Spec, target: Spec) -> Path:
        """Return the cheapest path from `source` to `target`, with the fewest steps of equally cheap paths.

        Raises:
            NoPathError: no path exists.
        """
        key = (tuple(shape), dtype_size, source, target)
        if key not in self._paths:
            self._paths[key] = self._find(*key)
        return self._paths[key]

    def _table(
        self, shape: tuple[int, ...], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        """Return the prices of all pairs, each as in the graph of the plain nests and those of its two ends."""
        table = np.full((len(sources), len(targets)), np.inf)
        for row, source in enumerate(sources):
            # Routed rows cannot be resharded.
            if source.is_routed:
                table[row, [target is source for target in targets]] = 0.0
        sources_by, targets_by = self._group_by_extra(shape, sources), self._group_by_extra(shape, targets)
        operations = _operations(state for group in (*sources_by.values(), *targets_by.values()) for _, state in group)
        if len({source | target for source in sources_by for target in targets_by}) > 1:
            # One graph of all nests, where it is not too large, in place of a graph for every pair of groups.
            all_extra: Extra = frozenset().union(*sources_by, *targets_by)
            if count_of_states(self._nests(shape, all_extra), operations, self.mesh) <= _MOST_STATES:
                priced = self._graph(shape, dtype_size, operations, all_extra)
                starts, ends = PairEnds.of(priced.graph, sources_by), PairEnds.of(priced.graph, targets_by)
                distances = _distances(priced, starts.states)
                plain = [plain_nests(size, self.mesh) for size in shape]
                prices = distances_of_pairs(priced.graph, priced.seconds, distances, plain, starts, ends)
                table[np.ix_(starts.rows, ends.rows)] = prices
                return table
        for source_extra, rows in sources_by.items():
            for target_extra, columns in targets_by.items():
                priced = self._graph(shape, dtype_size, operations, source_extra | target_extra)
                distances = _distances(priced, [state for _, state in rows])
                places = [priced.graph.index[state] for _, state in columns]
                table[np.ix_([row for row, _ in rows], [column for column, _ in columns])] = distances[:, places]
        return table

    def _group_by_extra(self, shape: tuple[int, ...], specs: Sequence[Spec]) -> dict[Extra, list[tuple[int, State]]]:
        """Return positions and states of the specs that have a state, by their nests other than the plain ones."""
        groups: dict[Extra, list[tuple[int, State]]] = {}
        for position, pair in enumerate(self._states_and_extras(shape, specs)):
            if pair is not None:
                state, extra = pair
                groups.setdefault(extra, []).append((position, state))
        return groups

    def _states_and_extras(self, shape: tuple[int, ...], specs: Sequence[Spec]) -> list[tuple[State, Extra] | None]:
        """Return, for every spec, its state and its extra nests; None without a state."""
        states_of_shape = self._states.setdefault(shape, {})
        for spec in specs:
            if spec not in states_of_shape:
                state = state_of(shape, spec, self.mesh)
                states_of_shape[spec] = None if state is None else (state, self._extra(shape, state))
        return [states_of_shape[spec] for spec in specs]

    def _extra(self, shape: tuple[int, ...], state: State) -> Extra:
        """Return the dims, each with its nests, that only paths from or to such a state may use."""
        extras = ((dim, extra_nests(nest, shape[dim], self.mesh)) for dim, nest in enumerate(state.nests))
        return frozenset((dim, nests) for dim, nests in extras if nests)

    def _graph(self, shape: tuple[int, ...], dtype_size: int, operations: frozenset[str], extra: Extra) -> _PricedGraph:
        key = (shape, dtype_size, operations, extra)
        if key not in self._graphs:
            graph = state_graph(self._nests(shape, extra), operations, self.mesh)
            self._graphs[key] = self._price_graph(graph, shape, dtype_size)
        return self._graphs[key]

    def _nests(self, shape: tuple[int, ...], extra: Extra) -> tuple[frozenset[Nest], ...]:
        """Return per dim the plain nests and the extra ones."""
        nests = [set(plain_nests(size, self.mesh)) for size in shape]
        for dim, more in extra:
            nests[dim] |= more
        return tuple(map(frozenset, nests))

    def _price_graph(self, graph: StateGraph, shape: tuple[int, ...], dtype_size: int) -> _PricedGraph:
        """Return the graph with bytes and seconds of every edge for one shape.

        Raises:
            InputError: such a tensor has more bytes than the keys of prices have room for.
        """
        whole = math.prod(shape) * dtype_size
        if whole >> _BYTES_BITS:
            raise InputError(
                f"a tensor of shape {shape} has {format_bytes(whole)}, and {format_bytes(1 << _BYTES_BITS)} are the "
                "most that can be planned. Look at the sizes of the example inputs, and at those of the model."
            )
        # [states, dims], padded.
        local = np.array(shape, dtype=np.int64) * graph.held // graph.parts
        local_bytes = local.prod(axis=1) * dtype_size
        above = np.concatenate([np.ones((len(local), 1), np.int64), local.cumprod(axis=1)], axis=1)
        before = local_bytes[graph.source]
        # The collectives that send padded blocks.
        pads = np.isin(graph.kind, (REDUCE_SCATTER, ALL_TO_ALL))
        before[pads] = before[pads] * graph.padding[pads, 0] // graph.padding[pads, 1]
        seconds = self._prices_of(graph.kind, before, graph.axis)
        # A collective moves blocks that are contiguous in memory. Where the axis's loop is not the outermost one of
        # the local tensor, packing before the collective or unpacking after it costs a local copy.
        unpacked = np.isin(graph.kind, (ALL_GATHER, ALL_TO_ALL)) & _inner(graph.source, graph.source_place, above)
        packed = np.isin(graph.kind, (REDUCE_SCATTER, ALL_TO_ALL)) & _inner(graph.target, graph.target_place, above)
        for copied, amount in ((unpacked, local_bytes[graph.target]), (packed, before)):
            # The number of "copy", after all others.
            kinds = np.full(int(copied.sum()), len(KINDS), dtype=np.int8)
            seconds[copied] += self._prices_of(kinds, amount[copied], graph.axis[copied])
        # Unequal shares cannot be the equal blocks of these collectives.
        if self.shared is not None and any(map(self.shared.is_of_whole, shape)):
            seconds[pads & (graph.axis == self.shared.axis)] = np.inf
        return _PricedGraph(graph, before, seconds, {})

    def _prices_of(
        self, kinds: NDArray[np.int8], amounts: NDArray[np.int64], axes: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """Return the prices of many collectives, calling `price` once for equal ones."""
        # Most edges of a graph share prices: call the model once per distinct packed key.
        keys = ((kinds.astype(np.int64) * self.mesh.ndim + axes) << _BYTES_BITS) | amounts
        distinct, inverse = np.unique(keys, return_inverse=True)
        prices = np.empty(len(distinct))
        for position, key in enumerate(distinct.tolist()):
            if key not in self._prices:
                kind, axis = divmod(key >> _BYTES_BITS, self.mesh.ndim)
                amount = key & ((1 << _BYTES_BITS) - 1)
                self._prices[key] = float(self._price((*KINDS, "copy")[kind], amount, axis))
            prices[position] = self._prices[key]
        return prices[inverse]

    def _find(self, shape: tuple[int, ...], dtype_size: int, source: Spec, target: Spec) -> Path:
        start, end = state_of(shape, source, self.mesh), state_of(shape, target, self.mesh)
        if start is None or end is None:
            raise NoPathError(
                f"a tensor of shape {shape} can not lie as {source if start is None else target} in a program on mesh "
                f"{self.mesh}, or no path leads there: a dim is not divided evenly by several axes or a strided shard, "
                "or reductions of different kinds are open whose order matters, or the data decides which rows a rank "
                "holds."
            )
        ends = canonical(shape, source, self.mesh), canonical(shape, target, self.mesh)
        # Different specs may be equivalent.
        if start == end:
            return Path(shape, *ends, ())
        extra = self._extra(shape, start) | self._extra(shape, end)
        priced = self._graph(shape, dtype_size, _operations((start, end)), extra)
        edges = _edges_between(priced, start, end)
        if edges is None:
            raise NoPathError(
                f"no path of collectives leads from {source} to {target} (tensor of shape {shape}, mesh {self.mesh}): "
                "a sharded tensor never becomes partial. Reshard to a spec without Partial."
            )
        return Path(shape, *ends, tuple(self._step(priced, shape, edge) for edge in edges))

    def _step(self, priced: _PricedGraph, shape: tuple[int, ...], edge: int) -> Step:
        graph = priced.graph
        return Step(
            kind=KINDS[graph.kind[edge]],
            axis=int(graph.axis[edge]),
            source=spec_of_state(graph.states[graph.source[edge]], shape, self.mesh),
            target=spec_of_state(graph.states[graph.target[edge]], shape, self.mesh),
            bytes=int(priced.bytes[edge]),
            seconds=float(priced.seconds[edge]),
        )


def _inner(states: NDArray[np.int32], places: NDArray[np.int32], above: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True where the axis's loop is inside others of the local tensor: earlier dims, or outer steps."""
    dims, outer = places[:, 0], places[:, 1]
    return np.asarray(above[states, np.maximum(dims, 0)] * outer > 1)


def _operations(states: Iterable[State]) -> frozenset[str]:
    return frozenset(operation for state in states for operation in state.partial if operation is not None)


def _distances(priced: _PricedGraph, sources: Sequence[State]) -> NDArray[np.float64]:
    """Return the seconds from every source to every state of the graph, `[sources, states]`."""
    wanted = sorted({priced.graph.index[state] for state in sources if state not in priced.rows})
    step = max(1, _CHUNK_ENTRIES // len(priced.graph.states))
    for first in range(0, len(wanted), step):
        chunk = wanted[first : first + step]
        for position, row in zip(chunk, _sweeps(priced, chunk)[-1].T, strict=True):
            priced.rows[priced.graph.states[position]] = row
    return np.stack([priced.rows[state] for state in sources])


def _sweeps(priced: _PricedGraph, sources: Sequence[int]) -> list[NDArray[np.float64]]:
    """Return distances `[states, sources]` over paths of at most 0, 1, 2, ... steps, until no more steps help.

    This is Bellman-Ford over all sources at once. Paths have few steps, so a few sweeps over the edges suffice.
    """
    graph = priced.graph
    distance = np.full((len(graph.states), len(sources)), np.inf)
    distance[list(sources), range(len(sources))] = 0.0
    rounds = [distance]
    order = np.argsort(graph.by_degree)
    while True:
        closer = distance[graph.by_degree]
        # For each k, one vectorised minimum over the k-th incoming edges of all states with that many.
        for edges in graph.incoming:
            through = distance[graph.source[edges]]
            through += priced.seconds[edges, None]
            reached = closer[: len(edges)]
            np.minimum(reached, through, out=reached)
        closer = closer[order]
        # Distances are sums in the order of their path, so a useless sweep changes no bit.
        if np.array_equal(closer, distance):
            return rounds
        distance = closer
        rounds.append(distance)


def _edges_between(priced: _PricedGraph, start: State, end: State) -> list[int] | None:
    """Return the edges of a shortest path with the fewest steps; None where no path exists."""
    graph = priced.graph
    rounds = [distance[:, 0] for distance in _sweeps(priced, [graph.index[start]])]
    place = graph.index[end]
    if np.isinf(rounds[-1][place]):
        return None
    edges: list[int] = []
    for number in range(len(rounds) - 1, 0, -1):
        if rounds[number][place] == rounds[number - 1][place]:
            # A path of fewer steps is as cheap.
            continue
        incoming = np.flatnonzero(graph.target == place)
        through = rounds[number - 1][graph.source[incoming]] + priced.seconds[incoming]
        edge = int(incoming[int(np.argmin(through))])
        edges.append(edge)
        place = int(graph.source[edge])
    return edges[::-1]
