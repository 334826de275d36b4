"""Dotted names of parameters and modules: globs over them, close ones, and layers shown as one."""

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
    # The cutoff is a guess that works.
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if close:
        return f"Close ones are {', '.join(close)}."
    some = sorted(known)[:3]
    return f"There are {', '.join(some)}{' and others' if len(known) > len(some) else ''}."


def index_of(part: str) -> tuple[str, int] | None:
    """Return the prefix and the index of a part of a name that counts layers (`3`, `encoder_layer_3`); else None."""
    match = _INDEXED.fullmatch(part)
    return None if match is None else (match["prefix"], int(match["index"]))


@dataclass(frozen=True, slots=True)
class Group(Generic[Key]):
    """Names that differ in indices alone and share a key, with one text for them all (`layers.*.weight`)."""

    text: str
    names: tuple[str, ...]
    key: Key


def group_names(items: Mapping[str, Key]) -> tuple[Group[Key], ...]:
    """Group the names that differ in indices alone and have equal keys, in the order of their first names.

    An index is shown as `*` where the group takes all its values, as itself where there is one, and as the set of its
    values (`layers.{0-3,7}.weight`) where other groups have the others.
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
    """Return the pattern with the names' indices in place of its stars; `family` is all names of the pattern."""
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
    # Numbers of one run have the same distance from their positions.
    for _, group in itertools.groupby(enumerate(values), key=lambda item: item[1] - item[0]):
        run = [value for _, value in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
