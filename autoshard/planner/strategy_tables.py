"""Tables of strategies and edges: the specs and prices of an operator's strategies, and of pairs of options of an edge.

There is one for every distinct rule and call, or for equal tensors and equal options, so equal layers share them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from autoshard.capture.host_copies import HOST_COPIES, TO_HOST
from autoshard.cluster.cost import CostModel, Work, work_of_call
from autoshard.patterns.padding import MASK_VECTOR_OPS, masks
from autoshard.patterns.rule import Dims, OpCall, Rule, TensorMeta
from autoshard.patterns.strategy import (
    WHOLE,
    Choices,
    axis_choices,
    fitting_choices,
    is_evenly_split,
    is_plain,
    keeps_shares,
    local_shape,
    local_sizes,
    operand_specs,
    resolve_variant,
    result_specs,
    splits_evenly,
    work_split,
)
from autoshard.planner.regather import MADE_ONCE, Origin, RegatherEdge, regather_edge, rerun_edge, tie_costs
from autoshard.planner.task_graph_restrictions import Restriction
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.reshard.path import Resharder
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.layout import local_shape as spec_shape
from autoshard.specs.spec import Spec

# Kind of an exchange in a rule -> the collective that prices it; other kinds are names of collectives.
_COLLECTIVES = {
    "gather_of_each": "all_gather",
    "exchange_of_each": "all_to_all",
    "ring": "shift",
    "ring_and_home": "shift",
}
_PART_EXCHANGES = ("all_gather", "all_to_all", "ring", "ring_and_home")  # a rank starts with its part of the bytes


def _times_read(rule: Rule, dims: Dims) -> int:
    """Return how often a tensor is read: once per step of the sequential loops that none of its dims has."""
    present = {factor for dim in dims for factor in dim}
    return math.prod(
        factor.size for index, factor in enumerate(rule.factors) if factor.sequential and index not in present
    )


def _tensors(call: OpCall, rule: Rule) -> Iterator[tuple[Dims, TensorMeta]]:
    """Return operands and results of a call, with the factors of their dims."""
    for dims, meta in (*zip(rule.operands, call.operands, strict=True), *zip(rule.results, call.results, strict=True)):
        if dims is not None and meta is not None:
            yield dims, meta


def whole_work(call: OpCall) -> Work:
    """Return the work of a whole call."""
    return work_of_call(call.op, call.operands, [meta for meta in call.results if meta is not None], call.args)


@dataclass(frozen=True, eq=False)
class SpecList:
    """The specs of one tensor under every strategy of its operator, with distinct specs stored once."""

    distinct: tuple[Spec, ...]
    index: np.ndarray
    _bytes: dict[tuple[tuple[int, ...], int], np.ndarray] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(specs: Sequence[Spec]) -> SpecList:
        positions: dict[Spec, int] = {}
        index = np.array([positions.setdefault(spec, len(positions)) for spec in specs], dtype=np.intp)
        return SpecList(tuple(positions), index)

    def __getitem__(self, strategy: int) -> Spec:
        return self.distinct[self.index[strategy]]

    def bytes(self, meta: TensorMeta, mesh: MeshShape) -> np.ndarray:
        """Return the bytes of one rank's shard of a tensor under every strategy."""
        # Equal layers share their lists, and have tensors of one shape.
        key = (meta.shape, meta.dtype.itemsize)
        if key not in self._bytes:
            distinct = [math.prod(spec_shape(meta.shape, spec, mesh)) * meta.dtype.itemsize for spec in self.distinct]
            self._bytes[key] = np.array(distinct, dtype=np.float64)[self.index]
        return self._bytes[key]


@dataclass(frozen=True, eq=False)
class OperatorStrategies:
    """Strategies of an operator: choices, and the resulting specs of operands and results."""

    choices: tuple[Choices, ...]
    operands: tuple[SpecList, ...]
    results: tuple[SpecList, ...]


class StrategyTables:
    """`OperatorStrategies` and their prices, cached for every distinct rule and call.

    Args:
        cost: the prices of compute and collectives.
        shared: the mesh axis whose ranks have shares of the batch, if there is one. On that axis, tensors with a batch
            dim are split along that dim or not at all.
    """

    def __init__(self, cost: CostModel, shared: SharedAxis | None = None) -> None:
        self.cost = cost
        self.shared = shared
        self.mesh = cost.mesh
        self._options: dict[tuple[int, tuple[int | None, ...] | None, tuple[Restriction, ...]], OperatorStrategies] = {}
        self._seconds: dict[tuple[int, int, int, tuple[bool, ...]], np.ndarray] = {}
        self._single: dict[tuple[int, int, Choices, tuple[bool, ...]], float] = {}
        self._result_bytes: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self._keep_alive: list[object] = []  # objects whose identity is a key above

    def options(
        self, rule: Rule, fixed: tuple[int | None, ...] | None = None, restricted: tuple[Restriction, ...] = ()
    ) -> OperatorStrategies:
        """Return the strategies of a rule.

        Args:
            rule: the rule.
            fixed: the choice on every axis; None on an axis where all choices are allowed.
            restricted: the restrictions of a task graph.
        """
        key = (id(rule), fixed, restricted)
        if key not in self._options:
            self._keep_alive.append(rule)
            self._options[key] = self._make(rule, fixed, restricted)
        return self._options[key]

    def _make(
        self, rule: Rule, fixed: tuple[int | None, ...] | None, restricted: tuple[Restriction, ...]
    ) -> OperatorStrategies:
        per_axis = [axis_choices(rule, size) for size in self.mesh.sizes]
        if self.shared is not None:
            axis = self.shared.axis
            per_axis[axis] = tuple(choice for choice in per_axis[axis] if keeps_shares(rule, choice, self.shared))
        if fixed is not None:
            per_axis = [open_ if choice is None else (choice,) for open_, choice in zip(per_axis, fixed, strict=True)]
        choices = fitting_choices(rule, per_axis, self.mesh)
        if self.shared is not None:
            choices = tuple(strategy for strategy in choices if splits_evenly(rule, strategy, self.shared, self.mesh))
        for restriction in restricted:
            choices = restriction.filter_strategies(choices)
        mesh = self.mesh
        return OperatorStrategies(
            choices,
            tuple(SpecList.of(operand_specs(rule, choices, mesh, index)) for index in range(len(rule.operands))),
            tuple(SpecList.of(result_specs(rule, choices, mesh, index)) for index in range(len(rule.results))),
        )

    def seconds(
        self, call: OpCall, rule: Rule, options: OperatorStrategies, zeros: tuple[bool, ...] = ()
    ) -> np.ndarray:
        """Return the seconds of compute, and of collectives inside the local program, of every strategy.

        Args:
            call: the call.
            rule: its rule.
            options: the strategies.
            zeros: for every operand, True if its padding is known to be zero; by default none is.
        """
        key = (id(call), id(rule), id(options), zeros)
        if key not in self._seconds:
            self._keep_alive += [call, options]
            self._seconds[key] = self._all_seconds(call, rule, options, zeros)
        return self._seconds[key]

    def _all_seconds(
        self, call: OpCall, rule: Rule, options: OperatorStrategies, zeros: tuple[bool, ...]
    ) -> np.ndarray:
        # The reshape gives an empty table its second dim.
        table = np.array(options.choices, dtype=np.int64).reshape(-1, self.mesh.ndim)
        # Strategies without padding and exchanges are priced together: many have equal work and bytes.
        simple = np.zeros(len(table), dtype=np.bool_)
        seconds = np.zeros(len(table))
        if is_plain(rule) and not any(factor.exchanges for factor in rule.factors) and call.op not in HOST_COPIES:
            simple = is_evenly_split(rule, table, self.mesh)
            seconds[simple] = self._even_seconds(call, rule, table[simple])
        for place in np.flatnonzero(~simple):
            seconds[place] = self.strategy_seconds(call, rule, options.choices[place], zeros)
        return seconds

    def _even_seconds(self, call: OpCall, rule: Rule, table: np.ndarray) -> np.ndarray:
        """Return the compute seconds of strategies of a plain rule without padding, `[strategies, axes]`."""
        if rule.free:
            return np.zeros(len(table))
        local = local_sizes(rule, table, self.mesh)
        moved = np.zeros(len(table), dtype=np.int64)
        for dims, meta in _tensors(call, rule):
            held = np.full(len(table), meta.dtype.itemsize * _times_read(rule, dims), dtype=np.int64)
            for dim, size in zip(dims, meta.shape, strict=True):
                held *= local[:, list(dim)].prod(axis=1) if dim else int(size)
            moved += held
        work = whole_work(call)
        # A dim of size 0 has no work: 1 keeps the quotient finite.
        shares = np.prod([max(factor.size, 1) for factor in rule.factors] / np.maximum(local, 1), axis=1)
        # Strategies with equal work and bytes are priced once.
        columns = np.column_stack([work.flops / shares, moved, work.streamed / shares])
        loads, places = np.unique(columns, axis=0, return_inverse=True)
        prices = [
            self.cost.compute(operations, int(bytes), work.dtype, work.operator, streamed)
            for operations, bytes, streamed in loads.tolist()
        ]
        return np.array(prices)[places.reshape(-1)]

    def result_bytes(self, call: OpCall, options: OperatorStrategies) -> tuple[np.ndarray, ...]:
        """Return for every result its bytes under every strategy; zeros for a result that is no tensor."""
        key = (id(call), id(options))
        if key not in self._result_bytes:
            self._keep_alive += [call, options]
            nothing = np.zeros(len(options.choices))
            self._result_bytes[key] = tuple(
                nothing if meta is None else specs.bytes(meta, self.mesh)
                for meta, specs in zip(call.results, options.results, strict=True)
            )
        return self._result_bytes[key]

    def strategy_seconds(self, call: OpCall, rule: Rule, choices: Choices, zeros: Sequence[bool] = ()) -> float:
        """Return the seconds of compute and of inner collectives of one strategy."""
        key = (id(call), id(rule), choices, tuple(zeros))
        if key not in self._single:
            self._keep_alive += [call, rule]
            sent = Counter(self.exchanges(rule, choices))  # a recurrence has many equal exchanges
            inner = sum(times * self.cost.collective(kind, bytes, axis) for (kind, axis, bytes), times in sent.items())
            inner += self._copy_seconds(call, rule, choices)
            self._single[key] = inner + self.compute_seconds(call, rule, choices, zeros)
        return self._single[key]

    def compute_seconds(self, call: OpCall, rule: Rule, choices: Choices, zeros: Sequence[bool] = ()) -> float:
        """Return the compute seconds of one rank, by its share of the work and its bytes, and those of its masks."""
        rule, choices = resolve_variant(rule, choices)
        if rule.free or call.op in HOST_COPIES:
            return 0.0
        moved = 0
        for dims, meta in _tensors(call, rule):
            held = math.prod(local_shape(rule, dims, choices, self.mesh, meta.shape)) * meta.dtype.itemsize
            moved += held * _times_read(rule, dims)
        work, parts = whole_work(call), work_split(rule, choices, self.mesh)
        seconds = self.cost.compute(work.flops / parts, moved, work.dtype, work.operator, work.streamed / parts)
        return seconds + self._mask_seconds(call, rule, choices, zeros)

    def _copy_seconds(self, call: OpCall, rule: Rule, choices: Choices) -> float:
        """Return the seconds of the copies of a value to the host and back, if compute hides none of them."""
        if call.op is not TO_HOST:
            return 0.0  # the copy to the host counts both ways
        dims, meta = rule.results[0], call.results[0]
        assert dims is not None
        assert meta is not None
        held = math.prod(local_shape(rule, dims, choices, self.mesh, meta.shape)) * meta.dtype.itemsize
        return 2 * self.cost.host_copy(held)

    def _mask_seconds(self, call: OpCall, rule: Rule, choices: Choices, zeros: Sequence[bool]) -> float:
        """Return the seconds of the masks that replace the padding of operands before the operator runs."""
        seconds = 0.0
        for mask in masks(call, rule, choices, self.mesh):
            if mask.fill == 0 and zeros and zeros[mask.operand]:
                continue
            meta = call.operands[mask.operand]
            held = math.prod(local_shape(rule, rule.operands[mask.operand], choices, self.mesh, meta.shape))
            # The operand is read and written once. The mask is as long as one dim, so costs only launches.
            seconds += self.cost.compute(0.0, 2 * held * meta.dtype.itemsize, meta.dtype)
            seconds += MASK_VECTOR_OPS * self.cost.compute(0.0, 0.0, meta.dtype)
        return seconds

    def exchanges(self, rule: Rule, choices: Choices) -> list[tuple[str, int, int]]:
        """Return the collectives inside the local program as (kind, axis, input bytes of a rank)."""
        rule, choices = resolve_variant(rule, choices)
        collectives = []
        for axis, choice in enumerate(choices):
            for kind, bytes, *times in rule.factors[choice].exchanges if choice >= 0 else ():
                # A rank that starts with its part is split along the exchanged factor too; one with a sum is not.
                splitting = choices
                if kind not in _PART_EXCHANGES:
                    splitting = tuple(WHOLE if other == choice else other for other in choices)
                held = math.ceil(bytes / work_split(rule, splitting, self.mesh))
                collective = (_COLLECTIVES.get(kind, kind), axis, held)
                collectives += [collective] * math.prod((self._collective_count(kind, choices, axis), *times))
        return collectives

    def _collective_count(self, kind: str, choices: Choices, axis: int) -> int:
        """Return the number of collectives of one exchange: a ring runs once for every rank of the axes outside it."""
        size = self.mesh.sizes[axis]
        # Outer axes that split the same factor: their ranks pass their parts round this ring in turn.
        outside = math.prod(
            outer for outer, choice in zip(self.mesh.sizes[:axis], choices, strict=False) if choice == choices[axis]
        )
        match kind:
            case "ring":
                return (size - 1) * outside
            case "ring_and_home":
                return (size - 1) * outside + (outside % size > 0)
        return 1


_NEXT_TO_NOTHING = 1e-12  # the fraction of its bytes that a fused copy counts: a copy must have more than zero bytes


class EdgeTables:
    """Tables over all pairs of options of two variables.

    Args:
        resharder: prices the reshards.
    """

    def __init__(self, resharder: Resharder | LowerBoundResharder) -> None:
        self.resharder = resharder
        # Lists of specs are interned and compared by identity.
        self._reshard_seconds: dict[tuple[object, ...], np.ndarray] = {}
        self._copy_bytes: dict[tuple[object, ...], np.ndarray] = {}
        self._regather_edges: dict[tuple[object, ...], RegatherEdge] = {}
        self._rerun_edges: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._with_absence: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._moves: dict[tuple[object, ...], np.ndarray] = {}
        self.tie_costs = cache(tie_costs)

    def reshard_seconds(
        self, meta: TensorMeta, sources: SpecList, targets: SpecList, gradient: bool = False
    ) -> np.ndarray:
        """Return the seconds of the reshards of a tensor; `gradient` is True if an optimizer gets the result."""
        key = (meta.shape, meta.dtype.itemsize, sources, targets, gradient)
        if key not in self._reshard_seconds:
            resharder: Resharder | LowerBoundResharder = self.resharder.gradients if gradient else self.resharder
            distinct = resharder.seconds(meta.shape, meta.dtype.itemsize, sources.distinct, targets.distinct)
            self._reshard_seconds[key] = distinct[np.ix_(sources.index, targets.index)]
        return self._reshard_seconds[key]

    def copy_bytes(
        self, meta: TensorMeta, sources: SpecList, targets: SpecList, mesh: MeshShape, fused: bool = False
    ) -> np.ndarray:
        """Return the bytes of the copy that a reshard makes; zero if both specs are the same.

        With `fused`, copies without communication take almost no bytes: kernels may make them where they read them.
        """
        key = (meta.shape, meta.dtype.itemsize, sources, targets, fused)
        if key not in self._copy_bytes:

            def share(source: Spec, target: Spec) -> float:
                is_piece = all(one == other or one.is_replicate() for one, other in zip(source, target, strict=True))
                return 0.0 if source is target else _NEXT_TO_NOTHING if fused and is_piece else 1.0

            distinct = [[share(source, target) for target in targets.distinct] for source in sources.distinct]
            copies = np.array(distinct)[np.ix_(sources.index, targets.index)]
            self._copy_bytes[key] = targets.bytes(meta, mesh) * copies
        return self._copy_bytes[key]

    def regather_edge(
        self,
        meta: TensorMeta,
        sources: SpecList,
        hub: SpecList,
        mesh: MeshShape,
        origins: tuple[Origin, ...] = MADE_ONCE,
        *,
        allocated: bool,
        moves: np.ndarray | None = None,
        fused: bool = False,
    ) -> RegatherEdge:
        """Return the edge from a tensor to the hub of the backward half.

        Args:
            meta: shape and dtype of the tensor.
            sources: the specs of the tensor.
            hub: the specs of both hubs.
            mesh: the mesh axes.
            origins: the origins of the options of the hub of the backward half.
            allocated: True if the step allocates memory for the tensor, held only for the backward half.
            moves: seconds of its copies to the host and back, as for `regather.regather_edge`; one array for equal
                tensors.
            fused: as for `copy_bytes`.
        """
        key = (meta.shape, meta.dtype.itemsize, sources, hub, origins, allocated, id(moves), fused)
        if key not in self._regather_edges:
            self._regather_edges[key] = regather_edge(
                self.reshard_seconds(meta, sources, hub),
                self.copy_bytes(meta, sources, hub, mesh, fused),
                sources.bytes(meta, mesh) * allocated,
                origins,
                moves,
            )
        return self._regather_edges[key]

    def move_seconds(self, meta: TensorMeta, specs: SpecList, cost: CostModel, price: float) -> np.ndarray:
        """Return the seconds of a tensor's copies to the host and back under every spec, each counted `price` times."""
        key = (meta.shape, meta.dtype.itemsize, specs, price)
        if key not in self._moves:
            seconds = [2 * price * cost.host_copy(int(held)) for held in specs.bytes(meta, cost.mesh)]
            self._moves[key] = np.array(seconds)
        return self._moves[key]

    def rerun_edge(
        self,
        meta: TensorMeta,
        sources: SpecList,
        hub: SpecList,
        mesh: MeshShape,
        origins: tuple[Origin, ...],
        *,
        fused: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds and bytes of the edge from an optional second operator to the hub of its value."""
        key = (meta.shape, meta.dtype.itemsize, sources, hub, origins, fused)
        if key not in self._rerun_edges:
            seconds = self.reshard_seconds(meta, sources, hub)
            self._rerun_edges[key] = rerun_edge(seconds, self.copy_bytes(meta, sources, hub, mesh, fused), origins)
        return self._rerun_edges[key]

    def with_absence(self, table: np.ndarray, *, source: bool, target: bool, forbidden: float) -> np.ndarray:
        """Return a table for an edge with an end that may be absent.

        Args:
            table: the table of pairs of options; absence is the last option of the source, if it may be absent.
            source: True if the source may be absent, which then can't serve a present target.
            target: True if the target may be absent: a last option, missing in the table, with costs of zero.
            forbidden: the entry of forbidden pairs.
        """
        key = (id(table), source, target, forbidden)
        if key not in self._with_absence:
            padded = np.hstack([table, np.zeros((len(table), 1))]) if target else table.copy()
            if source:
                padded[-1, : table.shape[1]] = forbidden
            self._with_absence[key] = table, padded  # keeps the table alive, since its identity is in the key
        return self._with_absence[key][1]


def _reduced_before(sources: SpecList, _: SpecList) -> np.ndarray:
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
"""Tables that are infinite where a gradient would be reduced in another dtype than that of the precision policy."""
