"""The text that names the devices of a cluster, such as `"8xV100-32GB + 8xP100-16GB"`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.errors import BudgetError, MeshError
from autoshard.units import parse_bytes

_PART = re.compile(r"(?P<count>\d+)\s*[xX*×]\s*(?P<kind>[A-Za-z]\w*)(?:-(?P<memory>[\d.]+\s*\w+))?")


@dataclass(frozen=True, slots=True)
class Devices:
    """Some devices of one kind, as a text names them.

    Attributes:
        count: number of devices, at least 1.
        kind: name of a preset, in lower case.
        memory: bytes of each; None for those of the preset.
        text: the part of the text, without the count.
    """

    count: int
    kind: str
    memory: int | None
    text: str


def is_devices(text: str) -> bool:
    """Return True if a text counts devices, False if it may be the name of a preset."""
    return "+" in text or text.strip()[:1].isdigit()


def parse_devices(text: str) -> tuple[Devices, ...]:
    """Return the devices that a text names, in its order (`Cluster.parse`).

    Raises:
        MeshError: a part does not parse; the message quotes it.
    """
    return tuple(_parse_part(part.strip(), text) for part in text.split("+"))


def _parse_part(part: str, text: str) -> Devices:
    example = 'write a count and a preset, such as "8xV100" or "8xV100-16GB", and + between kinds'
    match = _PART.fullmatch(part)
    if match is None:
        raise MeshError(f"{part!r} in the cluster {text!r} names no devices: {example}.")
    count = int(match["count"])
    if count < 1:
        raise MeshError(f"{part!r} in the cluster {text!r} is no device at all: the count must be 1 or more.")
    try:
        memory = None if match["memory"] is None else parse_bytes(match["memory"])
    except BudgetError as error:
        raise MeshError(f"{part!r} in the cluster {text!r}: {error}") from error
    name = match["kind"] if match["memory"] is None else f"{match['kind']}-{match['memory']}"
    return Devices(count, match["kind"].lower(), memory, name)
