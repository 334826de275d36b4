"""The state graph of resharding: nodes are placements of one tensor, edges are single collectives (TensorOpt 4.2).

Whether two placements are one collective apart depends only on the nesting of mesh axes in every dim, not on sizes of
dims or prices. So graphs consist of nests, and all shapes with the same divisibility share one graph.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import Segment, canonical, padded_segments_of, spec_of
from autoshard.specs.spec import Spec

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "make_partial")
ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL, SLICE, MAKE_PARTIAL = range(len(KINDS))

# Most axes larger than 1 for which all orders of axes are plain nests: their number grows with the factorial.
_FULL_NESTING_AXES = 3

_LINEAR = frozenset({"sum", "avg"})
_OPERATIONS = _LINEAR | {"max", "min", "product"}


class ShardLoop(NamedTuple):
    """The loop of one dim that an axis shards.

    Attributes:
        axis: the mesh axis.
        outer: undistributed steps outside of it in the dim.
        block, total: the share of one rank in lowest terms where the axis does not divide its loop (see `Segment`).
    """

    axis: int
    outer: int
    block: int = 0
    total: int = 0

    def share(self, mesh: MeshShape) -> tuple[int, int]:
        """Return the share of the loop that one rank holds, as a fraction."""
        return (self.block, self.total) if self.total else (1, mesh.sizes[self.axis])


Nest = tuple[ShardLoop, ...]
"""The loops of one dim that axes shard, major to minor."""


@dataclass(frozen=True, slots=True)
class State:
    """One placement: a nest for every dim, and the pending reduction of every axis, None where there is none."""

    nests: tuple[Nest, ...]
    partial: tuple[str | None, ...]

    def place(self, axis: int) -> tuple[int, ShardLoop] | None:
        """Return the dim that `axis` shards and its loop there; None where it shards no dim."""
        for dim, nest in enumerate(self.nests):
            for loop in nest:
                if loop.axis == axis:
                    return dim, loop
        return None


def state_of(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> State | None:
    """Return the state of a spec; None where no path exists: uneven nests, mixed reductions, routed rows."""
    return _state_of(tuple(shape), spec, mesh)


@lru_cache(maxsize=1 << 17)
def _state_of(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> State | None:
    if spec.is_routed:
        return None
    try:
        layout = padded_segments_of(shape, spec, mesh)
    except ValueError:
        return None
    spec = canonical(shape, spec, mesh)
    partial: list[str | None] = [None] * mesh.ndim
    for axis in spec.partial_axes:
        partial[axis] = spec[axis].reduce_op  # type: ignore[attr-defined]
    return State(tuple(map(_nest_of, layout)), tuple(partial)) if _reducible(partial) else None


def _nest_of(segments: Sequence[Segment]) -> Nest:
    nest, outer = [], 1
    for segment in segments:
        if segment.axis is None:
            outer *= segment.size
        else:
            nest.append(ShardLoop(segment.axis, outer, segment.block, segment.total))
    return tuple(nest)


def _reducible(partial: Iterable[str | None]) -> bool:
    """Return True if the axes may be reduced in any order: a path chooses the order."""
    operations = {operation for operation in partial if operation is not None}
    return operations <= _OPERATIONS and (len(operations) < 2 or operations <= _LINEAR)


def spec_of_state(state: State, shape: Sequence[int], mesh: MeshShape) -> Spec:
    """Return the spec of a state of a tensor of `shape`."""
    layout = []
    for nest, size in zip(state.nests, shape, strict=True):
        segments, above = [], 1
        for loop in nest:
            segments += [
                Segment(loop.outer // above),
                Segment(mesh.sizes[loop.axis], loop.axis, loop.block, loop.total),
            ]
            above = loop.outer
        # The rest of the dim is the undistributed steps inside the innermost loop.
        held, parts = held_share(nest, mesh)
        layout.append((*segments, Segment(size * held // (parts * above))))
    partial = {axis: operation for axis, operation in enumerate(state.partial) if operation is not None}
    return spec_of(tuple(layout), partial, mesh)


def held_share(nest: Nest, mesh: MeshShape) -> tuple[int, int]:
    """Return the share of a padded dim that one rank holds, as a fraction."""
    shares = [loop.share(mesh) for loop in nest]
    return math.prod(block for block, _ in shares), math.prod(total for _, total in shares)


def without_axis(nest: Nest, axis: int, mesh: MeshShape) -> Nest:
    """Return the nest after an all-gather over `axis`."""
    result: list[ShardLoop] = []
    # The share of the gathered loop, whose steps are undistributed for the inner axes.
    block, total = 1, 1
    for loop in nest:
        if loop.axis == axis:
            block, total = loop.share(mesh)
        else:
            result.append(loop._replace(outer=loop.outer * total // block))
    return tuple(result)


def closure(nests: Iterable[Nest], mesh: MeshShape) -> frozenset[Nest]:
    """Return the nests, and all nests that remain when some of their axes are gathered."""
    closed: set[Nest] = set()
    waiting = list(nests)
    while waiting:
        nest = waiting.pop()
        if nest not in closed:
            closed.add(nest)
            waiting += [without_axis(nest, loop.axis, mesh) for loop in nest]
    return frozenset(closed)


def plain_nests(size: int, mesh: MeshShape) -> frozenset[Nest]:
    """Return the nests that every path may use on a dim of `size`: `Shard` over any axes in any order, closed.

    On meshes of four axes and more, `Shard` over at most two axes in mesh order, to keep the number of states small.
    Paths from and to specs with other nests may use these, too.
    """
    # Only divisibility by products of axis sizes matters, so all sizes with one gcd share a set. All axes divide 0.
    return _plain_nests(math.gcd(size, mesh.size) if size else mesh.size, mesh)


@lru_cache(maxsize=1 << 12)
def _plain_nests(divisor: int, mesh: MeshShape) -> frozenset[Nest]:
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    orders = (
        [order for count in range(len(axes) + 1) for order in itertools.permutations(axes, count)]
        if len(axes) <= _FULL_NESTING_AXES
        else [order for count in range(3) for order in itertools.combinations(axes, count)]
    )
    nests = [
        tuple(ShardLoop(axis, 1) for axis in order)
        for order in orders
        if divisor % math.prod(mesh.sizes[axis] for axis in order) == 0
    ]
    return closure(nests, mesh)


@lru_cache(maxsize=1 << 14)
def extra_nests(nest: Nest, size: int, mesh: MeshShape) -> frozenset[Nest]:
    """Return the nests that paths to or from `nest`, on a dim of `size`, may use besides the plain ones.

    These are the plain nests inside its outer loop, such as the 3 of a fused projection of queries, keys and values. If
    there is no such loop, they are the closure of `nest`. A plain nest needs none.
    """
    if nest in plain_nests(size, mesh):
        return frozenset()
    if any(loop.total for loop in nest):
        return closure([nest], mesh)
    top = nest[0].outer
    for outer in range(2, top + 1):
        if top % outer == 0 and size % outer == 0:
            family = {
                tuple(loop._replace(outer=loop.outer * outer) for loop in plain)
                for plain in plain_nests(size // outer, mesh)
            }
            # The same set for all nests inside that loop, so that few graphs serve many specs.
            if nest in family:
                return frozenset(family)
    return closure([nest], mesh)


@dataclass(frozen=True, slots=True)
class StateGraph:
    """All states over given nests, and all moves of one axis between them, ordered by target.

    Attributes:
        states: the nodes.
        nests: per dim, the nests that states may have.
        numbers: `[states, dims]`, the position of a state's nest in `nests`.
        index: position of every state.
        source, target: ends of every edge, positions in `states`; `target` ascends.
        kind, axis: collective (position in `KINDS`) and mesh axis of every edge.
        source_place, target_place: `[edges, 2]`, the dim that the axis shards at either end, -1 for no dim, and the
            undistributed steps outside of it.
        held, parts: `[states, dims]`, the share `held / parts` of every padded dim that one rank holds.
        padding: `[edges, 2]`, as a fraction, the length of all blocks of the axis at the target over that of its loop.
        by_degree: positions of all states, those with most incoming edges first.
        incoming: at position k, the k-th incoming edge of every state with more than k, in the order of `by_degree`.
    """

    states: tuple[State, ...]
    nests: tuple[tuple[Nest, ...], ...]
    numbers: NDArray[np.int64]
    index: dict[State, int]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    kind: NDArray[np.int8]
    axis: NDArray[np.int8]
    source_place: NDArray[np.int32]
    target_place: NDArray[np.int32]
    padding: NDArray[np.int64]
    held: NDArray[np.int64]
    parts: NDArray[np.int64]
    by_degree: NDArray[np.int64]
    incoming: tuple[NDArray[np.int64], ...]


@lru_cache(maxsize=1 << 10)
def state_graph(nests: tuple[frozenset[Nest], ...], operations: frozenset[str], mesh: MeshShape) -> StateGraph:
    """Return the graph of all combinations of one nest per dim, and reductions on axes that shard nothing.

    Args:
        nests: per dim, a set of nests closed under removal of axes.
        operations: reductions that a state may have pending.
        mesh: the mesh.
    """
    listed = tuple(tuple(sorted(choices)) for choices in nests)
    numbers, partials = _states(listed, operations, mesh)
    columns = [
        [choices[number] for number in column] for choices, column in zip(listed, numbers.T.tolist(), strict=True)
    ]
    states = tuple(map(State, zip(*columns, strict=True) if columns else [()] * len(partials), partials))
    index = {state: position for position, state in enumerate(states)}
    edges = [_moves(listed, numbers, partials, axis, mesh) for axis, size in enumerate(mesh.sizes) if size > 1]
    # Columns: target, source, kind, axis, source place (2), target place (2), padding (2).
    table = np.concatenate([*edges, np.zeros((0, 10), dtype=np.int64)])
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    degree = np.bincount(table[:, 0], minlength=len(states))
    first = np.cumsum(degree) - degree
    by_degree = np.argsort(-degree, kind="stable")
    shares = _nest_values(listed, numbers, lambda nest: held_share(nest, mesh), 2)
    return StateGraph(
        states=states,
        nests=listed,
        numbers=numbers,
        index=index,
        target=table[:, 0].astype(np.int32),
        source=table[:, 1].astype(np.int32),
        kind=table[:, 2].astype(np.int8),
        axis=table[:, 3].astype(np.int8),
        source_place=table[:, 4:6].astype(np.int32),
        target_place=table[:, 6:8].astype(np.int32),
        padding=table[:, 8:],
        held=shares[..., 0],
        parts=shares[..., 1],
        by_degree=by_degree,
        incoming=tuple(
            first[by_degree[: np.count_nonzero(degree > number)]] + number for number in range(int(degree.max()))
        ),
    )


def count_of_states(nests: Sequence[frozenset[Nest]], operations: frozenset[str], mesh: MeshShape) -> int:
    """Return an upper bound of the number of states of `state_graph`: mixed reductions are counted too."""
    # Sets of used axes, as bits -> number of combinations of nests.
    by_axes = Counter({0: 1})
    for choices in nests:
        more = Counter(_axes(nest) for nest in choices)
        pairs = [(used, axes) for used in by_axes for axes in more if not used & axes]
        sums: Counter[int] = Counter()
        for used, axes in pairs:
            sums[used | axes] += by_axes[used] * more[axes]
        by_axes = sums
    open_axes = sum(1 << axis for axis, size in enumerate(mesh.sizes) if size > 1)
    return sum(count * (1 + len(operations)) ** (open_axes & ~used).bit_count() for used, count in by_axes.items())


def _axes(nest: Nest) -> int:
    """Return the axes of a nest, as bits."""
    return sum(1 << loop.axis for loop in nest)


def _nest_values(
    listed: Sequence[Sequence[Nest]], numbers: NDArray[np.int64], value: Callable[[Nest], Sequence[int]], width: int
) -> NDArray[np.int64]:
    """Return `value` of the nest of every state in every dim, `[states, dims, width]`."""
    values = np.zeros((*numbers.shape, width), dtype=np.int64)
    for dim, choices in enumerate(listed):
        rows = np.array([value(nest) for nest in choices], dtype=np.int64).reshape(-1, width)
        values[:, dim] = rows[numbers[:, dim]]
    return values


def _states(
    listed: Sequence[Sequence[Nest]], operations: frozenset[str], mesh: MeshShape
) -> tuple[NDArray[np.int64], list[tuple[str | None, ...]]]:
    """Return all states: the number of the nest in every dim, `[states, dims]`, and the pending reductions.

    Their order depends on the arguments alone.
    """
    chosen, used = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
    for choices in listed:
        axes = np.array([_axes(nest) for nest in choices], dtype=np.int64)
        # Every axis shards one dim at most.
        rows, columns = np.nonzero((used[:, None] & axes[None, :]) == 0)
        chosen, used = np.column_stack([chosen[rows], columns]), used[rows] | axes[columns]
    open_choices: dict[int, list[tuple[str | None, ...]]] = {}
    for bits in np.unique(used).tolist():
        per_axis = [
            (None, *sorted(operations)) if size > 1 and not bits >> axis & 1 else (None,)
            for axis, size in enumerate(mesh.sizes)
        ]
        open_choices[bits] = [partial for partial in itertools.product(*per_axis) if _reducible(partial)]
    partials = [open_choices[bits] for bits in used.tolist()]
    return np.repeat(chosen, list(map(len, partials)), axis=0), list(itertools.chain.from_iterable(partials))


def _moves(
    listed: Sequence[Sequence[Nest]],
    numbers: NDArray[np.int64],
    partials: Sequence[tuple[str | None, ...]],
    axis: int,
    mesh: MeshShape,
) -> NDArray[np.int64]:
    """Return all edges that change the placement on `axis`, with the columns of `state_graph`'s table."""
    # A collective over an axis does not change the placements on others. So its edges are within a family: the states
    # that become equal when the axis is gathered.
    size = mesh.sizes[axis]
    left_over: dict[object, int] = {}

    def nest_after_gather(nest: Nest) -> tuple[int]:
        return (left_over.setdefault(without_axis(nest, axis, mesh), len(left_over)),)

    others: dict[object, int] = {}
    kept = [others.setdefault((partial[:axis], partial[axis + 1 :]), len(others)) for partial in partials]
    family = np.array(kept, dtype=np.int64)
    left_by_dim = _nest_values(listed, numbers, nest_after_gather, 1)[..., 0]
    # Renumber families after every dim, so that numbers do not overflow.
    for column in left_by_dim.T:
        family = np.unique(family * len(left_over) + column, return_inverse=True)[1].reshape(-1)

    def place(nest: Nest) -> tuple[int, ...]:
        loops = (loop for loop in nest if loop.axis == axis)
        return next(((1, loop.outer, loop.total, *loop.share(mesh)) for loop in loops), (0, 0, 0, 0, 0))

    places = _nest_values(listed, numbers, place, 5)
    sharded: NDArray[np.bool_] = np.asarray(places[..., 0].any(axis=1))
    dim = np.where(sharded, places[..., 0].argmax(axis=1) if listed else -1, -1)
    # The axis shards one dim at most, so the sum over dims is its loop.
    loops = np.where(sharded[:, None], places[..., 1:].sum(axis=1), (1, 0, *ShardLoop(axis, 1).share(mesh)))
    reduced = np.array([partial[axis] is not None for partial in partials], dtype=np.int64) - 1
    table = np.column_stack([family, reduced, dim, loops])
    source, target = _pairs(family)
    left, right = table[source], table[target]
    kind = _kinds(left, right, size)
    moves = kind >= 0
    source, target, left, right, kind = (part[moves] for part in (source, target, left, right, kind))
    share = np.where(right[:, 2:3] >= 0, right[:, 5:7], (1, size)) * (size, 1)
    axes = np.full(len(kind), axis)
    return np.column_stack([target, source, kind, axes, left[:, 2:4], right[:, 2:4], share])


def _pairs(family: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all ordered pairs of two different members of one family."""
    order = np.argsort(family, kind="stable")
    counts = np.bincount(family)
    start = np.cumsum(counts) - counts
    partners = counts[family[order]]
    first = np.repeat(np.arange(len(order)), partners)
    within = np.arange(len(first)) - np.repeat(np.cumsum(partners) - partners, partners)
    second = np.repeat(start[family[order]], partners) + within
    apart = first != second
    return order[first[apart]], order[second[apart]]


def _kinds(left: NDArray[np.int64], right: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the collective from one placement on an axis of `size` to another; -1 where no single one exists.

    Columns of both sides: family, reduction, dim, outer steps, total of the share; -1 for no reduction and no dim.
    """
    before, after = left[:, 1] >= 0, right[:, 1] >= 0
    sharded_before, sharded_after = left[:, 2] >= 0, right[:, 2] >= 0
    # An all-to-all within one dim needs pieces that divide it and do not overlap: else blocks would not be equal.
    even = (left[:, 4] == 0) & (right[:, 4] == 0)
    inside = (left[:, 3] % (right[:, 3] * size) == 0) | (right[:, 3] % (left[:, 3] * size) == 0)
    exchanged = (left[:, 2] != right[:, 2]) | (even & inside)
    return np.select(
        [
            sharded_before & sharded_after & exchanged,
            sharded_before & ~sharded_after & ~after,
            ~sharded_before & before & sharded_after,
            ~sharded_before & before & ~after,
            ~sharded_before & ~before & sharded_after,
            ~sharded_before & ~before & after,
        ],
        [ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SLICE, MAKE_PARTIAL],
        -1,
    )
