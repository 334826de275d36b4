"""Dotted names of parameters and modules: globs, suggestions of close names, and equal layers as one name."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

Key = TypeVar("Key")

# "3", or "encoder_layer_3" as torchvision names its layers.
_INDEXED = re.compile(r"(?P<prefix>(?:.*_)?)(?P<index>\d+)")


def matching(glob: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a glob matches, in their order; `*` matches any text, dots included."""
    return tuple(name for name in names if fnmatchcase(name, glob))


def matching_paths(glob: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of inputs or outputs that a glob matches; brackets stand for themselves, as in `output[0]`."""
    return matching(glob.replace("[", "[[]"), names)


def ancestors(name: str) -> Iterator[str]:
    """Yield every module path above a dotted name, the nearest first, without the root (an empty path)."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def suggestion(name: str, known: Collection[str]) -> str:
    """Return a sentence that offers the known names nearest to `name`."""
    if not known:
        return "There are none to choose from."
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if close:
        return f"Close ones are {', '.join(close)}."
    some = sorted(known)[:3]
    return f"There are {', '.join(some)}{' and others' if len(known) > len(some) else ''}."


def index_of(part: str) -> tuple[str, int] | None:
    """Return prefix and index of a name part that numbers a layer (`3`, `encoder_layer_3`); else None."""
    match = _INDEXED.fullmatch(part)
    return None if match is None else (match["prefix"], int(match["index"]))


@dataclass(frozen=True, slots=True)
class Group(Generic[Key]):
    """Names that differ only in indices and share a key, with one text for all of them (`layers.*.weight`)."""

    text: str
    names: tuple[str, ...]
    key: Key


def group_names(items: Mapping[str, Key]) -> tuple[Group[Key], ...]:
    """Group the names that differ only in indices and have equal keys, in the order of their first names.

    An index is shown as itself where it has one value in the group, as `*` where the group has all its values, and as
    the set of its values (`layers.{0-3,7}.weight`) where other groups have the rest.
    """
    members: dict[tuple[str, Key], list[str]] = {}
    patterns: dict[str, list[str]] = {}
    for name, key in items.items():
        pattern = ".".join(_INDEXED.sub(r"\g<prefix>*", part) if index_of(part) else part for part in name.split("."))
        members.setdefault((pattern, key), []).append(name)
        patterns.setdefault(pattern, []).append(name)
    return tuple(
        Group(_text(pattern, names, patterns[pattern]), tuple(names), key) for (pattern, key), names in members.items()
    )


def _text(pattern: str, names: list[str], family: list[str]) -> str:
    """Replace the stars of a pattern by the indices of `names`; `family` is all names of the pattern."""
    parts = pattern.split(".")
    for position, part in enumerate(parts):
        if part.endswith("*"):
            found = ([index_of(name.split(".")[position]) for name in some] for some in (names, family))
            indices, others = ({item[1] for item in some if item} for some in found)
            if len(indices) == 1:
                parts[position] = names[0].split(".")[position]
            elif indices != others:
                parts[position] = f"{part[:-1]}{{{','.join(_runs(sorted(indices)))}}}"
    return ".".join(parts)


def _runs(values: list[int]) -> Iterator[str]:
    """Yield sorted numbers as texts, consecutive ones as a range."""
    # In one run, value - position is constant.
    for _, group in itertools.groupby(enumerate(values), key=lambda item: item[1] - item[0]):
        run = [value for _, value in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
