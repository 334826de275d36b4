"""The sizes of calls that have programs of their own: what each program took, and which option would spare the rest."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping

from autoshard.capture.dynamic import Dynamic

_log = logging.getLogger("autoshard")

MOST_PROGRAMS = 32
"""Kinds of calls whose programs a module keeps: those not used for longest go."""

_ADVISE_AT = 3  # sizes of calls that are alike but for these

_NAMES = {0: "batch", 1: "length"}

Shapes = Mapping[str, tuple[int, ...]]


class CallSizes:
    """What calls of a module came with that were captured and planned anew.

    Args:
        module: name of its class.
        dynamic: the sizes that calls may change, which ask for no program of their own.
        quiet: whether another rank tells the same.
    """

    def __init__(self, module: str, dynamic: Dynamic, *, quiet: bool) -> None:
        self._module = module
        self._dynamic = dynamic
        self._quiet = quiet
        self._shapes_by_kind: dict[Hashable, list[Shapes]] = {}
        self._seconds = 0.0
        self._has_advised = False

    def record(self, kind: Hashable, shapes: Shapes, seconds: float) -> None:
        """Tell of a program that was made, and once, where that is the third of its kind, of how to make do with one.

        Args:
            kind: all of the call that is no size and no plain value.
            shapes: of its tensors by name.
            seconds: that the program took.
        """
        met = self._shapes_by_kind.setdefault(kind, [])
        met.append(dict(shapes))
        self._seconds += seconds
        if self._quiet:
            return
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        programs = sum(map(len, self._shapes_by_kind.values()))
        _log.info("%s: program %d, for %s, was made in %.1f s", self._module, programs, said or "no tensors", seconds)
        if len(met) == _ADVISE_AT and not self._has_advised:
            self._has_advised = True
            self._suggest(met)

    def _suggest(self, met: list[Shapes]) -> None:
        """A warning that names `dynamic`, or the plain values that differ where no size does."""
        cost = f"{self._module}: {len(met)} calls that differ in little have programs of their own, made in "
        cost += f"{self._seconds:.1f} s so far. "
        changing = self._changing_dims(met)
        if changing:
            advice = f"One serves all with autoshard.parallelize(..., dynamic={changing})."
            _log.warning("%s%s", cost, advice)
        elif all(shapes == met[0] for shapes in met):
            _log.warning("%sWhat differs is a plain argument, such as a number: pass it as a tensor.", cost)

    def _changing_dims(self, met: list[Shapes]) -> dict[str, dict[int, str]]:
        """The dims that were of several sizes, as `dynamic` takes them; those of equal sizes have one name."""
        names: dict[tuple[int, ...], str] = {}
        changing: dict[str, dict[int, str]] = {}
        for name, shape in met[0].items():
            for dim in range(len(shape)):
                sizes = tuple(shapes[name][dim] for shapes in met)
                if len(set(sizes)) > 1 and dim not in self._dynamic.get(name, {}):
                    own = _NAMES.get(dim, f"size{dim}")
                    free = own if own not in names.values() else f"{own}{len(names)}"
                    changing.setdefault(name, {})[dim] = names.setdefault(sizes, free)
        return changing
