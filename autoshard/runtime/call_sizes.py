"""Log of the programs that were made for calls of different sizes, and advice on the option that makes one of them."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping

from autoshard.capture.dynamic import Dynamic

_log = logging.getLogger("autoshard")

# Signatures whose programs a module keeps; the one that was not used for longest goes first. Not tuned.
MOST_PROGRAMS = 32

# Two sizes are usual: full batches and the last one, or training and evaluation. A third may be one of many.
_ADVISE_AT = 3

# Names for dims in the advice, by the customary order.
_NAMES = {0: "batch", 1: "length"}

Shapes = Mapping[str, tuple[int, ...]]


class CallSizes:
    """Shapes of the calls of a module for which programs were made.

    Args:
        module: name of its class.
        dynamic: the sizes that calls may change without a new program.
        quiet: True if another rank logs the same.
    """

    def __init__(self, module: str, dynamic: Dynamic, *, quiet: bool) -> None:
        self._module = module
        self._dynamic = dynamic
        self._quiet = quiet
        self._shapes_by_kind: dict[Hashable, list[Shapes]] = {}
        self._seconds = 0.0
        self._has_advised = False

    def record(self, kind: Hashable, shapes: Shapes, seconds: float) -> None:
        """Log a new program. The first time that one is the third of its kind, also warn of how one could serve all.

        Args:
            kind: everything of the call but sizes and plain values.
            shapes: of its tensors by name.
            seconds: the time that it took to make the program.
        """
        calls = self._shapes_by_kind.setdefault(kind, [])
        calls.append(dict(shapes))
        self._seconds += seconds
        if self._quiet:
            return
        text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        programs = sum(map(len, self._shapes_by_kind.values()))
        _log.info("%s: program %d, for %s, was made in %.1f s", self._module, programs, text or "no tensors", seconds)
        if len(calls) != _ADVISE_AT or self._has_advised:
            return
        self._has_advised = True
        cost = f"{self._module}: {len(calls)} calls that differ in little have programs of their own, made in "
        cost += f"{self._seconds:.1f} s so far. "
        changing = self._changing_dims(calls)
        if changing:
            _log.warning("%sOne serves all with autoshard.parallelize(..., dynamic=%s).", cost, changing)
        elif all(shapes == calls[0] for shapes in calls):
            _log.warning("%sWhat differs is a plain argument, such as a number: pass it as a tensor.", cost)

    def _changing_dims(self, calls: list[Shapes]) -> dict[str, dict[int, str]]:
        """Return the dims that had several sizes, as `dynamic` takes them; dims with the same sizes have one name."""
        names: dict[tuple[int, ...], str] = {}
        changing: dict[str, dict[int, str]] = {}
        for name, shape in calls[0].items():
            for dim in range(len(shape)):
                sizes = tuple(shapes[name][dim] for shapes in calls)
                if len(set(sizes)) > 1 and dim not in self._dynamic.get(name, {}):
                    default = _NAMES.get(dim, f"size{dim}")
                    free = default if default not in names.values() else f"{default}{len(names)}"
                    changing.setdefault(name, {})[dim] = names.setdefault(sizes, free)
        return changing
