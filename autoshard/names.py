"""Dotted names of parameters and modules: globs over them, close ones, and layers shown as one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

Key = TypeVar("Key")


def matching(glob: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a glob matches, in their order; `*` matches any text, dots included."""
    return tuple(name for name in names if fnmatchcase(name, glob))


def ancestors(name: str) -> Iterator[str]:
    """Every module path above a dotted name, the nearest first, the root (an empty path) left out."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def suggestion(name: str, known: Collection[str]) -> str:
    """A sentence that offers the known names nearest to `name`."""
    if not known:
        return "There are none to choose from."
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if close:
        return f"Close ones are {', '.join(close)}."
    some = sorted(known)[:3]
    return f"There are {', '.join(some)}{' and others' if len(known) > len(some) else ''}."


@dataclass(frozen=True, slots=True)
class Group(Generic[Key]):
    """Names that differ in indices alone and share a key, with one text for them all (`layers.*.weight`)."""

    text: str
    names: tuple[str, ...]
    key: Key


def group_names(items: Mapping[str, Key]) -> tuple[Group[Key], ...]:
    """Put together the names that differ in indices alone and have equal keys, in the order of their first names.

    An index is shown as `*` where the group takes all its values, as itself where there is one, and as the set of its
    values (`layers.{0-3,7}.weight`) where other groups have the others.
    """
    members: dict[tuple[str, Key], list[str]] = {}
    patterns: dict[str, list[str]] = {}
    for name, key in items.items():
        pattern = _pattern(name)
        members.setdefault((pattern, key), []).append(name)
        patterns.setdefault(pattern, []).append(name)
    return tuple(
        Group(_text(pattern, names, patterns[pattern]), tuple(names), key) for (pattern, key), names in members.items()
    )


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _text(pattern: str, names: list[str], family: list[str]) -> str:
    """The pattern with every index written as `grouped` says; `family` is all names of the pattern."""
    parts = pattern.split(".")
    for position, part in enumerate(parts):
        if part == "*":
            own = {int(name.split(".")[position]) for name in names}
            others = {int(name.split(".")[position]) for name in family}
            parts[position] = _indices(own, others)
    return ".".join(parts)


def _indices(own: set[int], family: set[int]) -> str:
    if len(own) == 1:
        return str(next(iter(own)))
    if own == family:
        return "*"
    return "{" + ",".join(_runs(sorted(own))) + "}"


def _runs(values: list[int]) -> Iterator[str]:
    """Sorted numbers as texts, consecutive ones as a range."""
    start = previous = values[0]
    for value in [*values[1:], None]:
        if value is None or value != previous + 1:
            yield str(start) if start == previous else f"{start}-{previous}"
            start = value if value is not None else start
        previous = value if value is not None else previous
