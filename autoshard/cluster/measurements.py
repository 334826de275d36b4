"""Measurements of a cluster: collectives by the groups of devices, operators by their work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.cluster.curve import Curve
from autoshard.cluster.operator_curves import curve_data, curve_of, from_records, to_records


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups into which a mesh axis splits all devices: `size` devices each, whose ranks lie `stride` apart."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of collectives and operators on all devices at once.

    Attributes:
        devices: number of devices that took part.
        collectives: by kind and grouping, seconds by the bytes that one rank holds before; all groups at once.
        operators: seconds on one device while all others do the same (`operator_curves.OperatorCurves`).
    """

    devices: int
    collectives: dict[tuple[str, Grouping], Curve] = field(hash=False)
    operators: dict[tuple[str, str, str], Curve] = field(hash=False)

    def to_data(self) -> dict[str, Any]:
        """Return the measurements as JSON data."""
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
        """Return the measurements in JSON data that follows the schema.

        Raises:
            ValueError: amounts do not rise, seconds fall, or the devices cannot be split into the groups; the message
                says where.
        """
        collectives = {}
        for index, record in enumerate(data["collectives"]):
            grouping = Grouping(record["size"], record["stride"])
            # A file edited by hand, or of another job: such groups would be priced as if they existed.
            if data["devices"] % (grouping.size * grouping.stride):
                raise ValueError(
                    f"measured.collectives.{index}: {data['devices']} devices cannot be split into groups of "
                    f"{grouping.size} whose ranks lie {grouping.stride} apart; was this measured on another mesh?"
                )
            collectives[record["kind"], grouping] = curve_of(record, f"measured.collectives.{index}")
        return Measurements(data["devices"], collectives, from_records(data["operators"], "measured.operators"))
