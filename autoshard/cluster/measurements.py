"""What was measured of a cluster: collectives by how they group the devices, operators by the work they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.cluster.curve import Curve
from autoshard.cluster.operator_curves import curve_data, curve_of, from_records, operator_seconds, to_records


@dataclass(frozen=True, slots=True)
class Grouping:
    """How a mesh axis splits all devices into groups: `size` devices each, whose ranks lie `stride` apart."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of collectives and operators on all devices at once.

    Attributes:
        devices: how many took part.
        collectives: by kind and grouping, seconds by the bytes that one rank holds before; all groups at once.
        operators: seconds on one device while all others do the same (`operator_curves.OperatorCurves`).
    """

    devices: int
    collectives: dict[tuple[str, Grouping], Curve] = field(hash=False)
    operators: dict[tuple[str, str, str], Curve] = field(hash=False)

    def operator_seconds(self, operator: str, flops: float, bytes: float, dtype: torch.dtype) -> float | None:
        """Seconds of one operator (`operator_curves.operator_seconds`); None where nothing like it was measured."""
        return operator_seconds(self.operators, operator, flops, bytes, dtype)

    def to_data(self) -> dict[str, Any]:
        """The measurements as JSON data."""
        return {
            "devices": self.devices,
            "collectives": [
                {"kind": kind, "size": grouping.size, "stride": grouping.stride, **curve_data(curve)}
                for (kind, grouping), curve in self.collectives.items()
            ],
            "operators": to_records(self.operators),
        }

    @staticmethod
    def from_data(data: dict[str, Any]) -> Measurements:
        """The measurements in JSON data that follows the schema.

        Raises:
            ValueError: amounts do not rise, seconds fall, or devices are grouped as so many cannot be; the message says
                where.
        """
        collectives = {}
        for index, record in enumerate(data["collectives"]):
            grouping = Grouping(record["size"], record["stride"])
            if data["devices"] % (grouping.size * grouping.stride):
                raise ValueError(
                    f"measured.collectives.{index}: {data['devices']} devices cannot be split into groups of "
                    f"{grouping.size} whose ranks lie {grouping.stride} apart; was this measured on another mesh?"
                )
            collectives[record["kind"], grouping] = curve_of(record, f"measured.collectives.{index}")
        return Measurements(data["devices"], collectives, from_records(data["operators"], "measured.operators"))
