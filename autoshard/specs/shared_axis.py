"""A mesh axis whose ranks hold unequal shares of a dynamic size, such as of a batch (Whale, 3.3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from autoshard.size import DynamicSize, Ratio, Sizes, symbol


@dataclass(frozen=True, slots=True)
class SharedAxis:
    """Shares in place of equal blocks: the symbols of a program whose values differ from rank to rank.

    Attributes:
        axis: the index of the mesh axis.
        ranks: its size.
        whole: the dynamic size that is shared.
    """

    axis: int
    ranks: int
    whole: sympy.Symbol

    @property
    def own_share(self) -> sympy.Symbol:
        """The share of this rank."""
        return symbol(f"{self.whole}_own")

    @property
    def share_before(self) -> sympy.Symbol:
        """The sum of the shares of the ranks before this one."""
        return symbol(f"{self.whole}_before")

    @property
    def largest_share(self) -> sympy.Symbol:
        """The largest share of any rank."""
        return symbol(f"{self.whole}_most")

    def share_of_rank(self, rank: int) -> sympy.Expr:
        """Return the share of a rank."""
        if rank < self.ranks - 1:
            return symbol(f"{self.whole}_of_{rank}")
        # The last share has no symbol, so that the shares add up to the whole by construction.
        return self.whole - sum(self.share_of_rank(earlier_rank) for earlier_rank in range(rank))

    def sizes(self, counts: Sequence[int], rank: int) -> Sizes:
        """Return the values of the symbols on a rank, where the ranks hold `counts`."""
        shares: dict[sympy.Symbol, int] = {self.share_of_rank(place): count for place, count in enumerate(counts[:-1])}
        return {
            self.own_share: counts[rank],
            self.share_before: sum(counts[:rank]),
            self.largest_share: max(counts),
            **shares,
        }

    def example(self, sizes: Sizes) -> Sizes:
        """Return these sizes, with shares as equal as possible, on the last rank with a largest share."""
        least, more = divmod(sizes[self.whole], self.ranks)
        counts = [least + (rank < more) for rank in range(self.ranks)]
        # A rank with a largest share: programs are made at these sizes, and memory is counted for the largest.
        return {**sizes, **self.sizes(counts, max(more - 1, 0))}

    def with_share(self, number: int | float, sizes: Sizes) -> int | float:
        """Return a number with one rank's equal block replaced by its share.

        Args:
            number: a number that may depend on dynamic sizes.
            sizes: the values of all symbols, as `example` returns them.

        Raises:
            ValueError: the number is neither a multiple of a block or share nor a number of the whole.
        """
        if not isinstance(number, (DynamicSize, Ratio)):
            return number
        # Programs are made with equal blocks, the ceiling of the whole over the ranks; a share stands where such a
        # block stood.
        expr = number.expr.xreplace({sympy.ceiling(self.whole / self.ranks): self.own_share})
        steps = sympy.cancel(expr / self.own_share) if self.own_share in expr.free_symbols else expr
        # What still rounds the whole counts blocks of another kind, and has no counterpart in shares.
        rounded = any(self.whole in part.free_symbols for part in expr.atoms(sympy.floor, sympy.ceiling, sympy.Mod))
        if rounded or self.own_share in steps.free_symbols:
            raise ValueError(f"{number.expr} is neither a multiple of a rank's share nor a number of the whole")
        return number if expr == number.expr else type(number).of(expr, sizes)

    def is_multiple(self, size: int, blocks: int) -> bool:
        """Return True if a block, of `blocks` equal ones of `size`, is a multiple of the whole or independent of it."""
        return not self.is_of_whole(size) or bool(sympy.cancel(size.expr / self.whole / blocks).is_Integer)  # type: ignore[attr-defined]

    def is_shared(self, shape: Sequence[int]) -> bool:
        """Return True if some dim of a local shape depends on this rank's share."""
        return any(
            isinstance(size, (DynamicSize, Ratio)) and self.own_share in size.expr.free_symbols for size in shape
        )

    def is_whole(self, size: int) -> bool:
        """Return True if a size is the shared one."""
        return isinstance(size, DynamicSize) and size.expr == self.whole

    def is_of_whole(self, size: int) -> bool:
        """Return True if a size depends on the shared one."""
        return isinstance(size, DynamicSize) and self.whole in size.expr.free_symbols
