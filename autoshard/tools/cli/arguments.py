"""Arguments of the command: their errors, and what every verb does with them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import autoshard
from autoshard import AutoshardError, InputError

# `--version` and `--help` import this module, and neither needs torch.
if TYPE_CHECKING:
    from rich.console import Console

_AXIS = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<size>\d+)\s*")

# The result of `add_subparsers`, whose class has no public name.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class UsageError(InputError):
    """An argument of the command is not valid; found before anything is planned. The exit status is 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Context in which errors of autoshard are those of an argument."""
    try:
        yield
    except AutoshardError as error:
        raise UsageError(str(error)) from error


def parse_mesh(text: str) -> dict[str, int]:
    """Return the names and sizes of the axes in a text such as `"dp=8,tp=8"`.

    Raises:
        UsageError: the text does not parse, an axis occurs twice, or a size is not valid.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part)
        if match is None:
            raise UsageError(
                f"--mesh {text}: {part.strip()!r} is not the name and the size of an axis. Write, for example, "
                "--mesh dp=8,tp=8."
            )
        if match["name"] in axes:
            raise UsageError(f"--mesh {text}: axis {match['name']!r} occurs twice. Give every axis a name of its own.")
        axes[match["name"]] = int(match["size"])
    with usage_errors():
        autoshard.MeshShape.of(axes)
    return axes


def parse_hints(texts: Iterable[str], mesh: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the hints in texts such as `"layers.*.up.weight=tp:S(0)"` or `"layers.*.mlp=split(tp)"`.

    Args:
        texts: globs and their values, as `autoshard.parse_hint` reads them.
        mesh: sizes of the axes, by the names that texts have; None if there are several meshes.

    Raises:
        UsageError: a text does not parse, a glob occurs twice, or the mesh has no such axis.
    """
    hints: dict[str, Any] = {}
    for text in texts:
        # A glob has no such sign, and S(0,f=3) has.
        glob, sign, value = text.partition("=")
        if not glob or not sign:
            raise UsageError(
                f"the hint {text!r} has no glob or no placements: write, for example, '*.up.weight=tp:S(0)'."
            )
        if glob in hints:
            raise UsageError(f"the hint {text!r}: the glob {glob!r} occurs twice. Write its placements in one hint.")
        with usage_errors():
            placements = hints[glob] = autoshard.parse_hint(value)
        if isinstance(placements, Mapping) and mesh is not None:
            unknown = [axis for axis in placements if axis not in mesh]
            if unknown:
                raise UsageError(
                    f"the hint {text!r} names the axis {unknown[0]!r}; the axes of the mesh are "
                    f"{autoshard.MeshShape.of(mesh)}."
                )
    return hints


def check_output(option: str, path: Path | None) -> None:
    """Raise a `UsageError` unless a file can be written at the path, if there is one."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}. Make it, or name another file.")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: name a file in it.")


def add_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    details: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add the parser of a verb to the command, and return it.

    Args:
        verbs: the result of `add_subparsers`.
        name: of the verb.
        run: called with the parsed options; returns the exit status, or None for 0.
        details: for the help of the verb, in lines of less than 80 characters.
        example: a command, for the help of the verb.
    """
    parser = verbs.add_parser(
        name,
        description=details,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def console() -> Console:
    """Return standard output, wide enough for the tables where it is a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def print_line(text: str) -> None:
    """Print a line in which brackets, as in paths, are no markup."""
    console().print(text, markup=False, highlight=False)


def print_error(error: Exception) -> None:
    """Print an error on standard error."""
    sys.stderr.write(f"autoshard: {error}\n")
