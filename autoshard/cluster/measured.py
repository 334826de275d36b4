"""What was measured of a cluster: collectives by how they group the devices, operators by the work they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.cluster.curve import Curve
from autoshard.cluster.operators import family

FLOPS, BYTES, INTENSITY = "flops", "bytes", "flops_per_byte"

_LIKE = {"float16": "bfloat16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class Grouping:
    """How a mesh axis splits all devices into groups: `size` devices each, whose ranks lie `stride` apart."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of collectives and operators on all devices at once.

    Attributes:
        devices: how many took part.
        collectives: by kind and grouping, seconds by the bytes that one rank holds before; all groups at once.
        operators: by name of the family, dtype and what the amounts are, seconds on one device while all others do the
            same. Amounts are `FLOPS`, for operators that compute more than they move; `BYTES` read and written, for all
            others; `INTENSITY`, operations per byte, where the seconds are those of one byte.
    """

    devices: int
    collectives: dict[tuple[str, Grouping], Curve] = field(hash=False)
    operators: dict[tuple[str, str, str], Curve] = field(hash=False)

    def operator_seconds(self, operator: str, flops: float, bytes: float, dtype: torch.dtype) -> float | None:
        """Seconds of one operator; None where neither it nor any like it was measured.

        Args:
            operator: its name without namespace and overload, such as `"mm"`.
            flops: floating-point operations, 0 for an operator whose time is that of its bytes.
            bytes: read and written.
            dtype: of the operands; one that was not measured runs as the nearest that was.

        Returns:
            Without flops, the seconds of its bytes. With flops the largest of: the seconds of its operations, those of
            moving its bytes, and those of operators with as few operations for every byte, as a product of narrow
            matrices has.
        """
        name = str(dtype).removeprefix("torch.")
        name = name if ("add", name, BYTES) in self.operators else _LIKE.get(name, "float32")
        moved = self._curve("add", name, BYTES)
        if not flops:
            curve = self._curve(family(operator, "add"), name, BYTES) or moved
            return None if curve is None else curve.at(bytes)
        kind = family(operator, "mm")
        work = self._curve(kind, name, FLOPS) or self._curve("mm", name, FLOPS)
        narrow = self._curve(kind, name, INTENSITY)
        if work is None or moved is None:
            return None
        by_intensity = bytes * narrow.at(flops / bytes) if narrow is not None and bytes else 0.0
        return max(work.at(flops), moved.at(bytes), by_intensity)

    def _curve(self, operator: str, dtype: str, amounts: str) -> Curve | None:
        return self.operators.get((operator, dtype, amounts)) or self.operators.get((operator, "float32", amounts))

    def to_data(self) -> dict[str, Any]:
        """The measurements as JSON data."""
        return {
            "devices": self.devices,
            "collectives": [
                {"kind": kind, "size": grouping.size, "stride": grouping.stride, **_points(curve)}
                for (kind, grouping), curve in self.collectives.items()
            ],
            "operators": [
                {"operator": operator, "dtype": dtype, "amounts_are": unit, **_points(curve)}
                for (operator, dtype, unit), curve in self.operators.items()
            ],
        }

    @staticmethod
    def from_data(data: dict[str, Any]) -> Measured:
        """The measurements in JSON data that follows the schema.

        Raises:
            ValueError: amounts do not rise, seconds fall, or devices are grouped as so many cannot be; the message says
                where.
        """
        collectives, operators = {}, {}
        for index, record in enumerate(data["collectives"]):
            grouping = Grouping(record["size"], record["stride"])
            if data["devices"] % (grouping.size * grouping.stride):
                raise ValueError(
                    f"collectives.{index}: {data['devices']} devices cannot be split into groups of {grouping.size} "
                    f"whose ranks lie {grouping.stride} apart; was this measured on another mesh?"
                )
            collectives[record["kind"], grouping] = _curve(record, f"collectives.{index}")
        for index, record in enumerate(data["operators"]):
            key = record["operator"], record["dtype"], record["amounts_are"]
            operators[key] = _curve(record, f"operators.{index}")
        return Measured(data["devices"], collectives, operators)


def _points(curve: Curve) -> dict[str, list[float]]:
    return {"amounts": list(curve.amounts), "seconds": list(curve.seconds)}


def _curve(record: dict[str, Any], place: str) -> Curve:
    try:
        return Curve(tuple(record["amounts"]), tuple(record["seconds"]))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
