"""Propagation of facts about the dims of a joint graph, from operator to operator along common factors.

`CutPropagation` finds where dims are cut: where a view splits a dim, every operator that touches it may split it
(Rhino 4.3.3). `DimPropagation` finds the loops over given dims of the graph's inputs, such as the batch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from autoshard.patterns.rule import Rule
from autoshard.specs.axes import MeshShape

_LONGEST_CHAIN = 6  # every part of a factor is one more strategy on every axis

DimFactors = tuple[fx.Node, tuple[int, ...]]
"""An operator that touches a dim of a tensor, and the factors of the dim in its rule, major to minor."""

_FactorOf = tuple[fx.Node, int]
_Span = tuple[int, int]
"""The part of a dim that is followed: the number of steps outside of it, and its own number of steps."""


class Worklist:
    """A first-in, first-out queue of distinct numbers.

    Iterating removes them until none is left, including those added meanwhile.
    """

    # Not a dict whose first key is removed: that gets slower with every key removed before.

    def __init__(self, numbers: Iterable[int]) -> None:
        self._order: deque[int] = deque()
        self._waiting: set[int] = set()
        self.add(numbers)

    def add(self, numbers: Iterable[int]) -> None:
        """Append the numbers that are not in the queue."""
        for number in numbers:
            if number not in self._waiting:
                self._waiting.add(number)
                self._order.append(number)

    def __iter__(self) -> Iterator[int]:
        while self._order:
            number = self._order.popleft()
            self._waiting.remove(number)
            yield number


def _positions_by_factor(dims: Sequence[Sequence[DimFactors]]) -> dict[_FactorOf, list[int]]:
    """Return, for every factor of an operator, the positions of the dims that it is part of."""
    positions: dict[_FactorOf, list[int]] = defaultdict(list)
    for position, dim in enumerate(dims):
        for node, factors in dim:
            for factor in factors:
                positions[node, factor].append(position)
    return positions


class CutPropagation:
    """Propagates cuts along dims with common factors until nothing changes."""

    def __init__(
        self,
        dims: Iterable[Sequence[DimFactors]],
        rules: Mapping[fx.Node, Rule],
        first: Mapping[fx.Node, Mapping[int, tuple[int, ...]]],
    ) -> None:
        self.dims = [dim for dim in dims if len(dim) > 1]
        self.rules = rules
        self.chains: dict[fx.Node, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for node, chains in first.items():
            self.chains[node] = dict(chains)
        self.touching = _positions_by_factor(self.dims)

    def solve(self) -> dict[fx.Node, dict[int, tuple[int, ...]]]:
        """Return the cuts of every operator's factors, as `rule.refine` takes them."""
        pending = Worklist(
            position
            for position, dim in enumerate(self.dims)
            if any(len(factors) > 1 or node in self.chains for node, factors in dim)
        )
        for position in pending:
            for changed in self._propagate(self.dims[position]):
                # This dim has already propagated its cuts.
                pending.add(other for other in self.touching[changed] if other != position)
        return self.chains

    def _propagate(self, dim: Sequence[DimFactors]) -> list[_FactorOf]:
        """Cut the factors of a dim wherever one of its descriptions cuts it; return the factors that changed."""
        points = sorted({point for node, factors in dim for point in self._points(node, factors)})
        changed = []
        for node, factors in dim if points else ():
            rule, left = self.rules[node], 1
            for factor in factors:
                loop = rule.factors[factor]
                inside = [point // left for point in points if left < point < left * loop.size and point % left == 0]
                # The inner part of a cut is a strided shard, which a contiguous factor does not allow.
                if inside and loop.shardable and not loop.contiguous and self._add(node, factor, loop.size, inside):
                    changed.append((node, factor))
                left *= loop.size
        return changed

    def _points(self, node: fx.Node, factors: tuple[int, ...]) -> Iterator[int]:
        """Yield the products of outer parts at which this description cuts the dim."""
        left, chains = 1, self.chains.get(node, {})
        for factor in factors:
            if left > 1:
                yield left
            for cut in chains.get(factor, ()):
                yield left * cut
            left *= self.rules[node].factors[factor].size

    def _add(self, node: fx.Node, factor: int, size: int, points: list[int]) -> bool:
        """Add the points that fit to a factor's cuts; return True if there are any."""
        chain = self.chains.get(node, {}).get(factor, ())
        grown = list(chain)
        for point in points:
            if point in grown or size % point or len(grown) >= _LONGEST_CHAIN:
                continue
            # Cuts of a factor are a divisor chain: cuts of views that do not nest have no common parts.
            if all(max(point, other) % min(point, other) == 0 for other in grown):
                grown.append(point)
        if len(grown) == len(chain):
            return False
        self.chains[node][factor] = tuple(sorted(grown))
        return True


def useful_cuts(
    cuts: Mapping[fx.Node, Mapping[int, tuple[int, ...]]], rules: Mapping[fx.Node, Rule], mesh: MeshShape
) -> dict[fx.Node, dict[int, tuple[int, ...]]]:
    """Return the cuts without those whose parts an axis does not divide, though it divides the whole factor.

    A dim of 8 that a view cuts into 2 x 4 cannot be sharded over an axis of 8; uncut it can.
    """
    largest = max(mesh.sizes)

    def is_useful(size: int, chain: tuple[int, ...]) -> bool:
        parts = [outer // inner for inner, outer in itertools.pairwise((1, *chain, size))]
        return size % largest != 0 or any(part % largest == 0 for part in parts)

    return {
        node: {
            factor: chain
            for factor, chain in chains.items()
            if chain and is_useful(rules[node].factors[factor].size, chain)
        }
        for node, chains in cuts.items()
    }


class DimPart(NamedTuple):
    """A part of a dim of a placeholder, made of blocks.

    Attributes:
        node: the placeholder.
        dim: its dim.
        outer: the number of equal stretches of the dim, each cut into the same blocks.
        blocks: the number of blocks of each stretch, such as the shards over a mesh axis; None for all of the dim.
    """

    node: fx.Node
    dim: int
    outer: int = 1
    blocks: int | None = None


class DimPropagation:
    """Finds the loops of operators that have given dims of placeholders outermost.

    A dim is followed from operator to operator, along dims of common tensors and factors of their rules.
    """

    def __init__(self, dims: Iterable[Sequence[DimFactors]], rules: Mapping[fx.Node, Rule]) -> None:
        self.rules = rules
        self.dims = list(dims)
        self.touching = _positions_by_factor(self.dims)
        self.steps: dict[_FactorOf, int] = {}  # factor -> number of its outermost steps that are followed

    def solve(self, parts: Iterable[DimPart]) -> dict[fx.Node, frozenset[int]]:
        """Return, for every operator, its factors over parts of dims."""
        marks: dict[_FactorOf, int] = {}
        for node, dim, outer, blocks in parts:
            dims = self.rules[node].results[0]
            if dims is not None:
                marks |= self.marks((node, dims[dim]), outer, blocks)
        return self.follow(marks)

    def marks(self, dim: DimFactors, outer: int = 1, blocks: int | None = None) -> dict[_FactorOf, int]:
        """Return the marks for `follow` of a part of a dim; none if no factors make up such blocks.

        Args:
            dim: an operator, and the factors of the dim in its rule.
            outer, blocks: as in `DimPart`.
        """
        (node, factors), marks, left = dim, {}, 1
        for factor in factors:
            size = self._size(node, factor)
            steps = size if blocks is None else _steps_inside((outer, blocks), left, size)
            if blocks is None or steps > 1:
                marks[node, factor] = steps
            left *= size
        return marks

    def follow(self, marks: Mapping[_FactorOf, int]) -> dict[fx.Node, frozenset[int]]:
        """Return, for every operator, its factors over the same dims as the marked factors.

        Args:
            marks: an operator and its factor -> number of its outermost steps that are followed.
        """
        self.steps = dict(marks)
        waiting = Worklist(position for start in marks for position in self.touching[start])
        for position in waiting:
            for changed in self._propagate(self.dims[position]):
                waiting.add(self.touching[changed])
        factors: dict[fx.Node, set[int]] = defaultdict(set)
        for node, factor in self.steps:
            factors[node].add(factor)
        return {node: frozenset(some) for node, some in factors.items()}

    def _size(self, node: fx.Node, factor: int) -> int:
        # A plain number: arithmetic on dynamic sizes is slow, and the example's values suffice for nesting.
        return int(self.rules[node].factors[factor].size)

    def _propagate(self, dim: Sequence[DimFactors]) -> Iterator[_FactorOf]:
        """Propagate the followed spans of a dim to all of its descriptions; yield the factors whose marks grow."""
        # A list, since the loop below changes the marks that spans are computed from.
        for span in list(dict.fromkeys(span for description in dim for span in self._spans(description))):
            for node, factors in dim:
                left = 1
                for factor in factors:
                    size = self._size(node, factor)
                    inside = _steps_inside(span, left, size)
                    if inside > self.steps.get((node, factor), 1):
                        self.steps[node, factor] = inside
                        yield node, factor
                    left *= size

    def _spans(self, description: DimFactors) -> Iterator[_Span]:
        """Yield the spans of a dim that a description marks as followed; adjacent factors are one span."""
        node, factors = description
        left, start, steps = 1, 1, 1
        for factor in factors:
            size = self._size(node, factor)
            marked = self.steps.get((node, factor), 1)
            if marked > 1:
                start = left if steps == 1 else start
                steps *= marked
            # A factor with only its outermost steps marked ends the span.
            if steps > 1 and marked < size:
                yield start, steps
                steps = 1
            left *= size
        if steps > 1:
            yield start, steps


def _steps_inside(span: _Span, left: int, size: int) -> int:
    """Return the outermost steps of a factor of `size`, with `left` steps outside of it, that are within a span."""
    start, end = span[0], span[0] * span[1]
    if start > left or left % start or end <= left:
        return 1
    steps = min(end // left, size)
    return steps if end % (left * steps) == 0 and size % steps == 0 else 1
