"""What is still to be looked at, each once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


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
