"""Gradients that wait, unreduced, until those of all microbatches are added up."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GradientSums:
    """Sums of what a program's backwards leave unreduced on this rank.

    Args:
        terms: how many backwards there are in a step; the last one takes the sums of the others.
    """

    def __init__(self, terms: int) -> None:
        self._terms = terms
        self._sums: list[torch.Tensor] = []
        self._added_count = 0
        self._deferred: Callable[[], None] | None = None

    @property
    def is_last_backward(self) -> bool:
        """Whether the next backward is the last."""
        return self._added_count == self._terms - 1

    def add(self, gradients: list[torch.Tensor]) -> None:
        """Add the gradients of one backward: as the program makes them, in the same order each time.

        The list is emptied.
        """
        if self._added_count == 0:
            self._sums = list(gradients)
        elif self._added_count == 1:
            # The first may be views of tensors that others hold: nothing is added in place before there is a copy.
            for place, gradient in enumerate(gradients):
                self._sums[place] = self._sums[place] + gradient
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.add_(gradient)
        gradients.clear()
        self._added_count += 1

    def take(self) -> list[torch.Tensor]:
        """The sums, which are given away: what follows is another step."""
        sums, self._sums, self._added_count = self._sums, [], 0
        return sums

    def defer(self, end: Callable[[], None]) -> None:
        """Let something be done at the end of the step."""
        self._deferred = end

    def run_deferred(self) -> None:
        """Do what was left for the end of the step, if that was anything."""
        end, self._deferred = self._deferred, None
        if end is not None:
            end()

    def clear(self) -> None:
        """Forget what a step that broke off has left."""
        self.take()
        self._deferred = None
