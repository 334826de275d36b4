"""Devices and links as JSON data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autoshard.cluster.device import BusCurve, Device, Dispatch, Link
from autoshard.cluster.operator_curves import curve_data, curve_of, from_records, to_records

_OPTIONAL_FIELDS = ("multiprocessors", "capability", "compiled", "sources")


def device_data(device: Device) -> dict[str, Any]:
    """A device as JSON data; what it does not say is left out."""
    data: dict[str, Any] = {
        "name": device.name,
        "memory": device.memory,
        "peak_flops": device.peak_flops,
        "memory_bandwidth": device.memory_bandwidth,
        "kernel_overhead": device.kernel_overhead,
    }
    for name in ("dispatch", "compiled_dispatch"):
        if getattr(device, name) != Dispatch():
            data[name] = asdict(getattr(device, name))
    said = {"operators": to_records(device.operators)} | {name: getattr(device, name) for name in _OPTIONAL_FIELDS}
    return data | {name: value for name, value in said.items() if value}


def device_of(data: dict[str, Any], place: str) -> Device:
    """The device in data that follows the schema.

    Raises:
        ValueError: a curve in it is none; the message says where, below `place`.
    """
    figures: dict[str, Any] = {
        name: Dispatch(**data[name]) for name in ("dispatch", "compiled_dispatch") if name in data
    }
    figures["operators"] = from_records(data.get("operators", ()), f"{place}.operators")
    return Device(**data | figures)


def link_data(link: Link) -> dict[str, Any]:
    """A link as JSON data; what it does not say is left out."""
    data: dict[str, Any] = {"bandwidth": link.bandwidth, "latency": link.latency}
    if link.collectives:
        data["collectives"] = [
            {"kind": kind, "size": one.size, **curve_data(one.curve)} for kind, one in link.collectives.items()
        ]
    return data | ({"sources": link.sources} if link.sources else {})


def link_of(data: dict[str, Any], place: str) -> Link:
    """The link in data that follows the schema; `ValueError` as for `device_of`."""
    collectives = {
        record["kind"]: BusCurve(record["size"], curve_of(record, f"{place}.collectives.{index}"))
        for index, record in enumerate(data.get("collectives", ()))
    }
    return Link(**data | {"collectives": collectives})
