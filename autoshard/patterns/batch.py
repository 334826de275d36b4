"""The loops of a step's operators that run over some dim of its inputs or parameters, such as the batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from autoshard.patterns.cuts import Worklist
from autoshard.patterns.graph_rules import GraphRules, Value

_DimFactors = tuple[fx.Node, tuple[int, ...]]
"""An operator that touches a dim of a tensor, and the factors that it takes the dim for, major to minor."""
_Span = tuple[int, int]
"""Of a dim: how many steps of what is outside the dim that is followed, and how many of that, before the rest."""


def batch_factors(rules: GraphRules) -> dict[fx.Node, frozenset[int]]:
    """Return for every operator those of its factors whose splitting splits the batch.

    The batch is the first dim of the inputs: of those whose first dim has the size that most of them have. It is
    followed along dims that are the same factor, through views, into results and gradients, to where it is summed. A
    factor that stands for the batch and for dims inside it (rows of a flattened batch of sequences) is the batch's: its
    blocks are of whole samples first. One that has the batch inside is not.

    Source: Whale 3.1.2: each replica consumes its part of the mini-batch.
    """
    inputs = [source.node for source in rules.graph.inputs if source.kind == "input"]
    firsts = {node: int(Value(node).meta.shape[0]) for node in inputs if Value(node).meta.shape}
    sizes = Counter(size for size in firsts.values() if size > 1).most_common(1)
    return factors_along(rules, [(node, 0) for node, first in firsts.items() if sizes and first == sizes[0][0]])


def factors_along(rules: GraphRules, dims: Iterable[tuple[fx.Node, int]]) -> dict[fx.Node, frozenset[int]]:
    """Return for every operator those of its factors that run over one of these dims of placeholders, outermost.

    A dim is followed from operator to operator, along dims of tensors that they share and factors that they loop over.
    """
    return _DimPropagation(rules, dims).solve()


class _DimPropagation:
    def __init__(self, rules: GraphRules, dims: Iterable[tuple[fx.Node, int]]) -> None:
        self.rules = rules
        self.starts = dims
        self.dims = [dim for dim in rules.dims() if dim]
        self.touching: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        for position, dim in enumerate(self.dims):
            for node, factors in dim:
                for factor in factors:
                    self.touching[node, factor].append(position)
        self.steps: dict[tuple[fx.Node, int], int] = {}  # of a factor, how many of its steps, the outermost, are meant

    def solve(self) -> dict[fx.Node, frozenset[int]]:
        waiting = Worklist(position for start in self._mark_starts() for position in self.touching[start])
        for position in waiting:
            for changed in self._propagate(self.dims[position]):
                waiting.add(self.touching[changed])
        factors: dict[fx.Node, set[int]] = defaultdict(set)
        for node, factor in self.steps:
            factors[node].add(factor)
        return {node: frozenset(some) for node, some in factors.items()}

    def _mark_starts(self) -> Iterator[tuple[fx.Node, int]]:
        """Mark the factors of the dims that are followed, and yield them."""
        for node, dim in self.starts:
            dims = self.rules.rules[node].results[0]
            for factor in dims[dim] if dims is not None else ():
                self.steps[node, factor] = int(self.rules.rules[node].factors[factor].size)
                yield node, factor

    def _propagate(self, dim: Sequence[_DimFactors]) -> Iterator[tuple[fx.Node, int]]:
        """Pass on the places in a dim that some operators know to be followed; yield the factors that learn of more."""
        for outside, steps in list(dict.fromkeys(span for description in dim for span in self._spans(description))):
            for node, factors in dim:
                left = 1
                for factor in factors:
                    size = int(self.rules.rules[node].factors[factor].size)
                    inside = _steps_inside((outside, steps), left, size)
                    if inside > self.steps.get((node, factor), 1):
                        self.steps[node, factor] = inside
                        yield node, factor
                    left *= size

    def _spans(self, description: _DimFactors) -> Iterator[_Span]:
        """Yield the places that a description of a dim marks as followed; neighbouring factors are one span."""
        node, factors = description
        left, start, steps = 1, 1, 1
        for factor in factors:
            size = int(self.rules.rules[node].factors[factor].size)
            marked = self.steps.get((node, factor), 1)
            if marked > 1:
                start = left if steps == 1 else start
                steps *= marked
            if steps > 1 and marked < size:
                yield start, steps
                steps = 1
            left *= size
        if steps > 1:
            yield start, steps


def _steps_inside(span: _Span, left: int, size: int) -> int:
    """Return the steps of a factor of `size`, `left` to its left, that are a span's, if they are its outermost."""
    start, end = span[0], span[0] * span[1]
    if start > left or left % start or end <= left:
        return 1
    steps = min(end // left, size)
    return steps if end % (left * steps) == 0 and size % steps == 0 else 1
