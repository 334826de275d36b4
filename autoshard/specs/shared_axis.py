"""A mesh axis whose ranks hold shares of their own of a dynamic size, such as of a batch (Whale, 3.3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from autoshard.size import DynamicSize, Ratio, Sizes, symbol


@dataclass(frozen=True, slots=True)
class SharedAxis:
    """Shares in place of equal blocks: the symbols that a program has for them, whose values differ from rank to rank.

    Attributes:
        axis: of the mesh.
        ranks: its size.
        whole: the dynamic size that is shared.
    """

    axis: int
    ranks: int
    whole: sympy.Symbol

    @property
    def own_share(self) -> sympy.Symbol:
        """What this rank holds."""
        return symbol(f"{self.whole}_own")

    @property
    def share_before(self) -> sympy.Symbol:
        """What the ranks before it hold together."""
        return symbol(f"{self.whole}_before")

    @property
    def largest_share(self) -> sympy.Symbol:
        """What the rank with the largest share holds."""
        return symbol(f"{self.whole}_most")

    def share_of_rank(self, rank: int) -> sympy.Expr:
        """What a rank holds; the last one, what the others leave."""
        if rank < self.ranks - 1:
            return symbol(f"{self.whole}_of_{rank}")
        return self.whole - sum(self.share_of_rank(other) for other in range(rank))

    def sizes(self, counts: Sequence[int], rank: int) -> Sizes:
        """The values of the symbols on a rank, where the ranks hold `counts`."""
        given: dict[sympy.Symbol, int] = {self.share_of_rank(place): count for place, count in enumerate(counts[:-1])}
        return {
            self.own_share: counts[rank],
            self.share_before: sum(counts[:rank]),
            self.largest_share: max(counts),
            **given,
        }

    def example(self, sizes: Sizes) -> Sizes:
        """These sizes, with shares as equal as they can be, on a rank with one of the largest."""
        least, more = divmod(sizes[self.whole], self.ranks)
        counts = [least + (rank < more) for rank in range(self.ranks)]
        return {**sizes, **self.sizes(counts, max(more - 1, 0))}

    def with_share(self, number: int | float, sizes: Sizes) -> int | float:
        """A number with what one rank holds of equal blocks replaced by its share.

        Args:
            number: what may depend on dynamic sizes.
            sizes: the values of all symbols, as `example` has them.

        Raises:
            ValueError: it is no multiple of a block or a share, and so tells blocks from the whole in a way that shares
                have no counterpart of.
        """
        if not isinstance(number, (DynamicSize, Ratio)):
            return number
        expr = number.expr.xreplace({sympy.ceiling(self.whole / self.ranks): self.own_share})
        steps = sympy.cancel(expr / self.own_share) if self.own_share in expr.free_symbols else expr
        rounded = any(self.whole in part.free_symbols for part in expr.atoms(sympy.floor, sympy.ceiling, sympy.Mod))
        if rounded or self.own_share in steps.free_symbols:
            raise ValueError(f"{number.expr} is neither a multiple of a rank's share nor a number of the whole")
        return number if expr == number.expr else type(number).of(expr, sizes)

    def is_multiple(self, size: int, blocks: int) -> bool:
        """Whether every one of so many equal blocks of a size is a multiple of the shared one, or has nothing of it."""
        return not self.is_of_whole(size) or bool(sympy.cancel(size.expr / self.whole / blocks).is_Integer)  # type: ignore[attr-defined]

    def is_shared(self, shape: Sequence[int]) -> bool:
        """Whether some dim of a local shape is a rank's share."""
        return any(
            isinstance(size, (DynamicSize, Ratio)) and self.own_share in size.expr.free_symbols for size in shape
        )

    def is_whole(self, size: int) -> bool:
        """Whether a size is the one that is shared."""
        return isinstance(size, DynamicSize) and size.expr == self.whole

    def is_of_whole(self, size: int) -> bool:
        """Whether a size depends on the one that is shared."""
        return isinstance(size, DynamicSize) and self.whole in size.expr.free_symbols
