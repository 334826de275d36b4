"""Cuts of factors, which travel along the dims that operators share: where a view splits a dim, all may split it."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from autoshard.patterns.rule import Rule
from autoshard.specs.axes import MeshShape

_LONGEST_CHAIN = 6


class Worklist:
    """Numbers that wait, the first come first; one that waits already does not wait twice.

    Iterating takes them out until none is left, those that are added meanwhile too. (The first key of a dictionary
    would do the same, and take the longer to find the more were taken out before it.)
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._order: deque[int] = deque()
        self._waiting: set[int] = set()
        self.add(numbers)

    def add(self, numbers: Iterable[int]) -> None:
        """Put some at the end."""
        for number in numbers:
            if number not in self._waiting:
                self._waiting.add(number)
                self._order.append(number)

    def __iter__(self) -> Iterator[int]:
        while self._order:
            number = self._order.popleft()
            self._waiting.remove(number)
            yield number


class CutPropagation:
    """Split points travel along dims that are the same factor until nothing changes (Rhino 4.3.3)."""

    def __init__(
        self,
        links: Iterable[list[tuple[fx.Node, tuple[int, ...]]]],
        rules: dict[fx.Node, Rule],
        first: Mapping[fx.Node, Mapping[int, tuple[int, ...]]],
    ) -> None:
        self.links = [link for link in links if len(link) > 1]
        self.rules = rules
        self.chains: dict[fx.Node, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for node, chains in first.items():
            self.chains[node] = dict(chains)
        self.touching: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
        for position, link in enumerate(self.links):
            for node, factors in link:
                for factor in factors:
                    self.touching[node, factor].append(position)

    def solve(self) -> dict[fx.Node, dict[int, tuple[int, ...]]]:
        pending = Worklist(
            place
            for place, link in enumerate(self.links)
            if any(len(dims) > 1 or node in self.chains for node, dims in link)
        )
        for position in pending:
            for changed in self._propagate(self.links[position]):
                pending.add(other for other in self.touching[changed] if other != position)
        return self.chains

    def _propagate(self, link: list[tuple[fx.Node, tuple[int, ...]]]) -> list[tuple[fx.Node, int]]:
        cut_points: set[int] = set()
        for node, factors in link:
            if len(factors) > 1 or node in self.chains:
                cut_points.update(self._points(node, factors))
        points, changed = sorted(cut_points), []
        for node, factors in link if points else ():
            rule, left = self.rules[node], 1
            for factor in factors:
                loop = rule.factors[factor]
                inside = [point // left for point in points if left < point < left * loop.size and point % left == 0]
                if inside and loop.shardable and not loop.contiguous and self._add(node, factor, loop.size, inside):
                    changed.append((node, factor))
                left *= loop.size
        return changed

    def _points(self, node: fx.Node, factors: tuple[int, ...]) -> Iterator[int]:
        """Products of outer parts at which this description cuts the dim."""
        left, chains = 1, self.chains.get(node, {})
        for factor in factors:
            if left > 1:
                yield left
            for cut in chains.get(factor, ()):
                yield left * cut
            left *= self.rules[node].factors[factor].size

    def _add(self, node: fx.Node, factor: int, size: int, points: list[int]) -> bool:
        chain = self.chains.get(node, {}).get(factor, ())
        grown = list(chain)
        for point in points:
            if point in grown or size % point or len(grown) >= _LONGEST_CHAIN:
                continue
            if all(max(point, other) % min(point, other) == 0 for other in grown):
                grown.append(point)
        if len(grown) == len(chain):
            return False
        self.chains[node][factor] = tuple(sorted(grown))
        return True


def useful_cuts(
    cuts: dict[fx.Node, dict[int, tuple[int, ...]]], rules: dict[fx.Node, Rule], mesh: MeshShape
) -> dict[fx.Node, dict[int, tuple[int, ...]]]:
    """The cuts without those that leave an axis no part to divide, where it divides the whole factor.

    A dim of 8 cut into 2 x 4 for the sake of a view is of no use to an axis of 8, and whole it is.
    """
    sizes = sorted({size for size in mesh.sizes if size > 1}, reverse=True)

    def useful_chain(size: int, chain: tuple[int, ...]) -> tuple[int, ...]:
        bounds = (1, *chain, size)
        parts = [outer // inner for inner, outer in itertools.pairwise(bounds)]
        blocked = any(size % axis == 0 and all(part % axis for part in parts) for axis in sizes[:1])
        return () if blocked else chain

    return {
        node: {
            factor: chain
            for factor, cut in chains.items()
            if (chain := useful_chain(rules[node].factors[factor].size, cut))
        }
        for node, chains in cuts.items()
    }
