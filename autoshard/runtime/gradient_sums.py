"""Sums of unreduced gradients: over the microbatches of a pipeline, and over backwards in `autoshard.no_sync`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set

import torch

from autoshard.errors import InputError


class GradientSums:
    """Sums of the gradients that a program's backwards compute without reducing them over ranks.

    A step has `terms` backwards; the last one adds the sums of the others to its own gradients.
    """

    def __init__(self, terms: int) -> None:
        self._terms = terms
        self._sums: list[torch.Tensor] = []
        self._added_count = 0
        self._deferred: Callable[[], None] | None = None

    @property
    def is_last_backward(self) -> bool:
        """True if the next backward is the last."""
        return self._added_count == self._terms - 1

    @property
    def is_empty(self) -> bool:
        """True if no backward has added gradients."""
        return self._added_count == 0

    def add(self, gradients: list[torch.Tensor]) -> None:
        """Add the gradients of one backward, in the same order each time, and empty the list."""
        if self._added_count == 0:
            self._sums = list(gradients)
        elif self._added_count == 1:
            # Not in place: the first gradients may be views of tensors that are used elsewhere.
            for place, gradient in enumerate(gradients):
                self._sums[place] = self._sums[place] + gradient
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.add_(gradient)
        # Otherwise the caller's list would keep the first tensors alive.
        gradients.clear()
        self._added_count += 1

    def take(self) -> list[torch.Tensor]:
        """Return the sums, and begin the next step."""
        sums, self._sums, self._added_count = self._sums, [], 0
        return sums

    def defer(self, end: Callable[[], None]) -> None:
        """Set the function that is called at the end of the step."""
        self._deferred = end

    def run_deferred(self) -> None:
        """Call the function that was set for the end of the step, if any."""
        end, self._deferred = self._deferred, None
        if end is not None:
            end()

    def clear(self) -> None:
        """Drop the sums of an unfinished step."""
        self.take()
        self._deferred = None


class Accumulation:
    """Gradients of a module that backwards in `autoshard.no_sync` compute without reducing them over ranks.

    Attributes:
        active: True in the context.
    """

    def __init__(self) -> None:
        self.active = False
        self._unreduced: list[OpenSums] = []

    @contextlib.contextmanager
    def without_reductions(self) -> Iterator[None]:
        """Return a context in which backwards accumulate gradients without reducing them; contexts may be nested."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def note(self, sums: OpenSums) -> None:
        """Note that a program has unreduced sums."""
        if sums not in self._unreduced:
            self._unreduced.append(sums)

    def forget_zeroed(self) -> None:
        """Drop sums of parameters whose gradients were set to None since, as by `zero_grad`."""
        self._unreduced = [sums for sums in self._unreduced if not sums.is_empty]
        for sums in self._unreduced:
            if sums.is_zeroed:
                sums.clear()

    def reduce_rest(self) -> None:
        """Reduce the remaining sums, and add them to `.grad`; all ranks call this together."""
        self.forget_zeroed()
        for sums in self._unreduced:
            if not sums.is_empty:
                sums.reduce()

    def check_reduced(self) -> None:
        """Raise an `InputError` if unreduced sums exist: an optimizer's step would miss them."""
        self.forget_zeroed()
        if any(not sums.is_empty for sums in self._unreduced):
            raise InputError(
                "optimizer.step() while gradients are not reduced: all backwards since the last reduction ran in "
                "autoshard.no_sync. Run the forward and backward of the step's last microbatch outside of it, or drop "
                "the gradients with optimizer.zero_grad()."
            )


class OpenSums(GradientSums):
    """Sums of one program over any number of backwards, up to the first one outside `autoshard.no_sync`.

    Attributes:
        names: the parameters that have gradients in the sums.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        super().__init__(terms=0)
        self.names: set[str] = set()
        self._accumulation = accumulation
        self._witness: torch.Tensor | None = None
        self._reduce: Callable[[], None] | None = None

    @property
    def is_last_backward(self) -> bool:
        """True outside `autoshard.no_sync`."""
        return not self._accumulation.active

    @property
    def is_zeroed(self) -> bool:
        """True if the gradient of the witness was set to None."""
        return self._witness is not None and self._witness.grad is None

    def keep(self, names: Set[str], witness: torch.Tensor, reduce: Callable[[], None]) -> None:
        """Keep the sums until they are reduced.

        Args:
            names: the parameters with gradients in the last term.
            witness: one of them, with a `.grad` now: if it is None later, `zero_grad` was called.
            reduce: reduces the sums and adds them to `.grad`.
        """
        self.names |= names
        self._witness, self._reduce = witness, reduce
        self._accumulation.note(self)

    def reduce(self) -> None:
        """Reduce the sums separately, and add them to `.grad`."""
        assert self._reduce is not None
        self._reduce()

    def take(self) -> list[torch.Tensor]:
        """Return the sums, and begin the next step."""
        self.names, self._witness, self._reduce = set(), None, None
        return super().take()
