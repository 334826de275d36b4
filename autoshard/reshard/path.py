"""Shortest paths of collectives between specs, priced (TensorOpt 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.reshard.pairs import Extra, PairEnds, distances_of_pairs
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
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical
from autoshard.specs.shared_axis import SharedAxis
from autoshard.specs.spec import Spec

Price = Callable[[str, int, int], float]
"""Seconds of a collective: kind, bytes that a rank holds before it, mesh axis."""

_CHUNK_ENTRIES = 1 << 19
_BYTES_BITS = 52

_MOST_STATES = 1 << 12  # of one graph for all pairs


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, or one local move, over one mesh axis.

    Attributes:
        kind: one of all_gather, all_reduce, reduce_scatter, all_to_all, slice, make_partial.
        axis: the mesh axis.
        source, target: the spec before and after.
        bytes: what one rank holds before, blocks that it sends padded.
        seconds: its price, local copies that it needs included.
    """

    kind: str
    axis: int
    source: Spec
    target: Spec
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """The cheapest steps that take a tensor of `shape` from `source` to `target`; none where they are equal."""

    shape: tuple[int, ...]
    source: Spec
    target: Spec
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def at(self, sizes: Sizes) -> Path:
        """The same steps for a tensor whose dynamic sizes are taken at `sizes`; itself without any."""
        if not sizes:
            return self
        steps = (replace(step, source=step.source.at(sizes), target=step.target.at(sizes)) for step in self.steps)
        return Path(at(self.shape, sizes), self.source.at(sizes), self.target.at(sizes), tuple(steps))


@dataclass(frozen=True, slots=True)
class _PricedGraph:
    """A state graph for one shape and element size: bytes that move and seconds, per edge."""

    graph: StateGraph
    bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    rows: dict[State, NDArray[np.float64]]


class Resharder:
    """Prices and finds paths between specs of one mesh; remembers what it was asked.

    A path depends on shape, element size, source and target alone, never on what was asked before: ranks that ask
    in different order issue the same collectives.

    Args:
        mesh: the mesh.
        price: seconds of a collective from its kind, the bytes a rank holds before it, and the mesh axis. Kinds are
            those of `Step`, and "copy" for the local copy that brings bytes into the order that a collective needs.
        gradient_price: the same for gradients on their way to the optimizer; as any other by default.
        shared: the axis of which ranks hold shares of their own of a size, if there is one: what has such a dim is
            gathered and cut on it, and moved in no other way.

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
        self._prices: dict[tuple[str, int, int], float] = {}
        self._graphs: dict[tuple[tuple[int, ...], int, frozenset[str], Extra], _PricedGraph] = {}
        self._tables: dict[object, NDArray[np.float64]] = {}
        self._states: dict[tuple[int, ...], dict[Spec, tuple[State, Extra] | None]] = {}
        self._paths: dict[object, Path] = {}

    def seconds(
        self, shape: Sequence[int], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        """Price of the cheapest path between every source and every target.

        Args:
            shape: global shape of the tensor.
            dtype_size: bytes of one element.
            sources, targets: specs.

        Returns:
            `[len(sources), len(targets)]` seconds, read-only; inf where no path leads.
        """
        key = (tuple(shape), dtype_size, tuple(sources), tuple(targets))
        if key not in self._tables:
            table = self._table(*key)
            table.flags.writeable = False
            self._tables[key] = table
        return self._tables[key]

    def same_graph_positions(self, shape: Sequence[int], specs: Sequence[Spec], which: int) -> list[int]:
        """Positions of the specs that are priced along with one of them, which is found in the same graphs."""
        extras = [None if placed is None else placed[1] for placed in self._states_and_extras(tuple(shape), specs)]
        return [position for position, extra in enumerate(extras) if extra is not None and extra == extras[which]] or [
            which
        ]

    def path(self, shape: Sequence[int], dtype_size: int, source: Spec, target: Spec) -> Path:
        """The cheapest path from `source` to `target`; of equally cheap ones, one of the fewest steps.

        Raises:
            ValueError: no path leads from source to target.
        """
        key = (tuple(shape), dtype_size, source, target)
        if key not in self._paths:
            self._paths[key] = self._find(*key)
        return self._paths[key]

    def _table(
        self, shape: tuple[int, ...], dtype_size: int, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> NDArray[np.float64]:
        """Rows and columns are grouped by the nests they need beyond the plain ones, so that each pair is priced in
        the graph that its own path is found in; or in one of all nests, as if it were that."""
        table = np.full((len(sources), len(targets)), np.inf)
        for row, source in enumerate(sources):
            if source.is_routed:  # may stay as it is, and nothing else
                table[row, [target is source for target in targets]] = 0.0
        sources_by, targets_by = self._group_by_extra(shape, sources), self._group_by_extra(shape, targets)
        operations = _operations(state for group in (*sources_by.values(), *targets_by.values()) for _, state in group)
        if len({one | other for one in sources_by for other in targets_by}) > 1:
            every: Extra = frozenset().union(*sources_by, *targets_by)
            if count_of_states(self._nests(shape, every), operations, self.mesh) <= _MOST_STATES:
                priced = self._graph(shape, dtype_size, operations, every)
                starts, ends = PairEnds.of(priced.graph, sources_by), PairEnds.of(priced.graph, targets_by)
                distances = _distances(priced, starts.states)
                plain = [plain_nests(size, self.mesh) for size in shape]
                found = distances_of_pairs(priced.graph, priced.seconds, distances, plain, starts, ends)
                table[np.ix_(starts.rows, ends.rows)] = found
                return table
        for source_extra, rows in sources_by.items():
            for target_extra, columns in targets_by.items():
                priced = self._graph(shape, dtype_size, operations, source_extra | target_extra)
                distances = _distances(priced, [state for _, state in rows])
                places = [priced.graph.index[state] for _, state in columns]
                table[np.ix_([row for row, _ in rows], [column for column, _ in columns])] = distances[:, places]
        return table

    def _group_by_extra(self, shape: tuple[int, ...], specs: Sequence[Spec]) -> dict[Extra, list[tuple[int, State]]]:
        """Positions and states of the specs that exist for `shape`, by their nests beyond the plain ones."""
        groups: dict[Extra, list[tuple[int, State]]] = {}
        for position, placed in enumerate(self._states_and_extras(shape, specs)):
            if placed is not None:
                state, extra = placed
                groups.setdefault(extra, []).append((position, state))
        return groups

    def _states_and_extras(self, shape: tuple[int, ...], specs: Sequence[Spec]) -> list[tuple[State, Extra] | None]:
        """For every spec its state, and the nests beyond the plain ones that its paths may use; None where the spec
        does not exist."""
        known = self._states.setdefault(shape, {})
        for spec in specs:
            if spec not in known:
                state = state_of(shape, spec, self.mesh)
                known[spec] = None if state is None else (state, self._extra(shape, state))
        return [known[spec] for spec in specs]

    def _extra(self, shape: tuple[int, ...], state: State) -> Extra:
        """The dims, and the nests there, that only paths from or to such a state may use."""
        found = ((dim, extra_nests(nest, shape[dim], self.mesh)) for dim, nest in enumerate(state.nests))
        return frozenset((dim, nests) for dim, nests in found if nests)

    def _graph(self, shape: tuple[int, ...], dtype_size: int, operations: frozenset[str], extra: Extra) -> _PricedGraph:
        key = (shape, dtype_size, operations, extra)
        if key not in self._graphs:
            graph = state_graph(self._nests(shape, extra), operations, self.mesh)
            self._graphs[key] = self._price_graph(graph, shape, dtype_size)
        return self._graphs[key]

    def _nests(self, shape: tuple[int, ...], extra: Extra) -> tuple[frozenset[Nest], ...]:
        """Per dim, the plain nests, and those beside them."""
        nests = [set(plain_nests(size, self.mesh)) for size in shape]
        for dim, more in extra:
            nests[dim] |= more
        return tuple(map(frozenset, nests))

    def _price_graph(self, graph: StateGraph, shape: tuple[int, ...], dtype_size: int) -> _PricedGraph:
        """Bytes and seconds of every edge for one shape.

        A collective moves blocks that are contiguous in memory: where the axis's piece is not the outermost loop of
        the local tensor, packing before it or unpacking after it costs a local copy.
        """
        local = np.array(shape, dtype=np.int64) * graph.held // graph.parts  # [states, dims], padded
        held = local.prod(axis=1) * dtype_size
        above = np.concatenate([np.ones((len(local), 1), np.int64), local.cumprod(axis=1)], axis=1)
        before = held[graph.source]
        pads = np.isin(graph.kind, (REDUCE_SCATTER, ALL_TO_ALL))  # the blocks for all ranks, before they are sent
        before[pads] = before[pads] * graph.padding[pads, 0] // graph.padding[pads, 1]
        seconds = self._prices_of(graph.kind, before, graph.axis)
        copies = len(KINDS)
        unpacked = np.isin(graph.kind, (ALL_GATHER, ALL_TO_ALL)) & _inner(graph.source, graph.source_place, above)
        packed = np.isin(graph.kind, (REDUCE_SCATTER, ALL_TO_ALL)) & _inner(graph.target, graph.target_place, above)
        for chosen, amount in ((unpacked, held[graph.target]), (packed, before)):
            kinds = np.full(int(chosen.sum()), copies, dtype=np.int8)
            seconds[chosen] += self._prices_of(kinds, amount[chosen], graph.axis[chosen])
        if self.shared is not None and any(map(self.shared.is_of_whole, shape)):
            seconds[pads & (graph.axis == self.shared.axis)] = np.inf
        return _PricedGraph(graph, before, seconds, {})

    def _prices_of(
        self, kinds: NDArray[np.int8], amounts: NDArray[np.int64], axes: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """Prices of many collectives, asking once for those that are alike."""
        keys = ((kinds.astype(np.int64) * self.mesh.ndim + axes) << _BYTES_BITS) | amounts
        distinct, inverse = np.unique(keys, return_inverse=True)
        prices = np.empty(len(distinct))
        for position, key in enumerate(distinct.tolist()):
            kind, axis = divmod(key >> _BYTES_BITS, self.mesh.ndim)
            prices[position] = self._price_of((*KINDS, "copy")[kind], key & ((1 << _BYTES_BITS) - 1), axis)
        return prices[inverse]

    def _price_of(self, kind: str, amount: int, axis: int) -> float:
        key = (kind, amount, axis)
        if key not in self._prices:
            self._prices[key] = float(self._price(kind, amount, axis))
        return self._prices[key]

    def _find(self, shape: tuple[int, ...], dtype_size: int, source: Spec, target: Spec) -> Path:
        start, end = state_of(shape, source, self.mesh), state_of(shape, target, self.mesh)
        if start is None or end is None:
            raise ValueError(_no_state(shape, source if start is None else target, self.mesh))
        ends = canonical(shape, source, self.mesh), canonical(shape, target, self.mesh)
        if start == end:
            return Path(shape, *ends, ())
        extra = self._extra(shape, start) | self._extra(shape, end)
        priced = self._graph(shape, dtype_size, _operations((start, end)), extra)
        edges = _edges_between(priced, start, end)
        if edges is None:
            raise ValueError(
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
    """Where the axis's piece lies inside other loops of the local tensor (dims before it, or steps above it)."""
    dims, outer = places[:, 0], places[:, 1]
    return np.asarray(above[states, np.maximum(dims, 0)] * outer > 1)


def _operations(states: Iterable[State]) -> frozenset[str]:
    return frozenset(operation for state in states for operation in state.partial if operation is not None)


def _distances(priced: _PricedGraph, sources: Sequence[State]) -> NDArray[np.float64]:
    """Seconds from every source to every state of the graph, `[sources, states]`.

    Bellman-Ford over all sources at once: paths have few steps, so that a few sweeps over the edges suffice.
    """
    wanted = sorted({priced.graph.index[state] for state in sources if state not in priced.rows})
    step = max(1, _CHUNK_ENTRIES // len(priced.graph.states))
    for first in range(0, len(wanted), step):
        chunk = wanted[first : first + step]
        for position, row in zip(chunk, _sweeps(priced, chunk)[-1].T, strict=True):
            priced.rows[priced.graph.states[position]] = row
    return np.stack([priced.rows[state] for state in sources])


def _sweeps(priced: _PricedGraph, sources: Sequence[int]) -> list[NDArray[np.float64]]:
    """Distances `[states, sources]` over paths of at most 0, 1, 2, ... steps, until no more steps help."""
    graph = priced.graph
    distance = np.full((len(graph.states), len(sources)), np.inf)
    distance[list(sources), range(len(sources))] = 0.0
    rounds = [distance]
    order = np.argsort(graph.by_degree)
    while True:
        closer = distance[graph.by_degree]
        for edges in graph.incoming:
            through = distance[graph.source[edges]]
            through += priced.seconds[edges, None]
            reached = closer[: len(edges)]
            np.minimum(reached, through, out=reached)
        closer = closer[order]
        if np.array_equal(closer, distance):
            return rounds
        distance = closer
        rounds.append(distance)


def _edges_between(priced: _PricedGraph, start: State, end: State) -> list[int] | None:
    """Edges of a shortest path; None where there is none. Read backwards from the sweep that reached the end first."""
    graph = priced.graph
    rounds = [distance[:, 0] for distance in _sweeps(priced, [graph.index[start]])]
    place = graph.index[end]
    if np.isinf(rounds[-1][place]):
        return None
    edges: list[int] = []
    for number in range(len(rounds) - 1, 0, -1):
        if rounds[number][place] == rounds[number - 1][place]:
            continue
        incoming = np.flatnonzero(graph.target == place)
        through = rounds[number - 1][graph.source[incoming]] + priced.seconds[incoming]
        edge = int(incoming[int(np.argmin(through))])
        edges.append(edge)
        place = int(graph.source[edge])
    return edges[::-1]


def _no_state(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> str:
    return (
        f"a tensor of shape {shape} can not lie as {spec} in a program on mesh {mesh}, or no path leads there: a dim "
        "is not divided evenly by several axes or a strided shard, or reductions of different kinds are open whose "
        "order matters, or the data decides which rows a rank holds."
    )
