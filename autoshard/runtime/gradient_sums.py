"""Sums of unreduced gradients over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GradientSums:
    """Sums of the gradients that a program's backwards leave unreduced on this rank.

    A step has `terms` backwards, of which the last one takes the sums of the others.
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

    def add(self, gradients: list[torch.Tensor]) -> None:
        """Add the gradients of one backward, in the same order each time; the list is emptied."""
        if self._added_count == 0:
            self._sums = list(gradients)
        elif self._added_count == 1:
            # The first gradients may be views of tensors that others hold, so this sum is not in place.
            for place, gradient in enumerate(gradients):
                self._sums[place] = self._sums[place] + gradient
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.add_(gradient)
        # The caller's list would keep the first tensors alive.
        gradients.clear()
        self._added_count += 1

    def take(self) -> list[torch.Tensor]:
        """Return the sums, and begin another step."""
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
        """Forget the sums of a step that was not finished."""
        self.take()
        self._deferred = None
