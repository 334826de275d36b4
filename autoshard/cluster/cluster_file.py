"""The file of a cluster: its schema, and devices, links and hosts as JSON data."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from autoshard import finite_json
from autoshard.cluster.device import BusCurve, Device, Dispatch, Hosts, Link
from autoshard.cluster.measurements import curve_data, curve_of, from_records, to_records
from autoshard.errors import MeshError, reason_of

FORMAT = "autoshard cluster"
# Version 1 has no `stretches`, version 2 no curves of devices and links: both are read as they are.
VERSION = 3

_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_NOT_NEGATIVE = {"type": "number", "minimum": 0}
_NAME = {"type": "string", "minLength": 1}


def _record(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema of an object with these properties only, all required but the `optional` ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_COUNT = {"type": "integer", "minimum": 1}
_VALUES = {"type": "array", "items": _POSITIVE, "minItems": 1}
_TEXT = {"type": "string"}
_SOURCES = {"type": "object", "additionalProperties": _TEXT}


def _curve(**about: Any) -> dict[str, Any]:
    """Return the schema of a curve over amounts, by seconds or by rates."""
    schema = _record(
        {**about, "amounts": _VALUES, "seconds": _VALUES, "rates": _VALUES, "source": _TEXT},
        ("seconds", "rates", "source"),
    )
    # Published curves are rates, measured ones seconds.
    return schema | {"oneOf": [{"required": ["seconds"]}, {"required": ["rates"]}]}


_OPERATOR = _curve(operator=_NAME, dtype=_NAME, amounts_are={"enum": ["flops", "bytes", "flops_per_byte"]})
_BUS = _curve(kind=_NAME, size=_COUNT)
_DISPATCH = _record({"kernel": _NOT_NEGATIVE, "view": _NOT_NEGATIVE, "collective": _NOT_NEGATIVE})
_LINK = _record(
    {
        "bandwidth": _POSITIVE,
        "latency": _NOT_NEGATIVE,
        "collectives": {"type": "array", "items": _BUS},
        "sources": _SOURCES,
    },
    ("collectives", "sources"),
)
# Three rates are required, since every other dtype is priced by one of them.
_RATES = {"type": "object", "additionalProperties": _POSITIVE, "required": ["float32", "bfloat16", "float64"]}
_HOST_FIELDS = ("host_bandwidth", "host_memory", "host_memory_bandwidth")
_OPTIONAL_FIELDS = ("multiprocessors", "capability", "compiled", *_HOST_FIELDS, "sources")
_DEVICE = _record(
    {
        "name": _NAME,
        "memory": _COUNT,
        "peak_flops": _RATES,
        "memory_bandwidth": _POSITIVE,
        "kernel_overhead": _NOT_NEGATIVE,
        "dispatch": _DISPATCH,
        "compiled_dispatch": _DISPATCH,
        "operators": {"type": "array", "items": _OPERATOR},
        "multiprocessors": {"type": "integer", "minimum": 0},
        "capability": _NOT_NEGATIVE,
        "compiled": {"type": "boolean"},
        "host_bandwidth": _POSITIVE,
        "host_memory": {"type": "integer", "minimum": 0},
        "host_memory_bandwidth": _POSITIVE,
        "sources": _SOURCES,
    },
    ("dispatch", "compiled_dispatch", "operators", *_OPTIONAL_FIELDS),
)
_COLLECTIVE = _curve(kind=_NAME, size=_COUNT, stride=_COUNT)
_HOSTS = {"device": _DEVICE, "devices_per_host": _COUNT, "inside": _LINK, "between": _LINK}
_ABOUT = {
    "format": {"const": FORMAT},
    "version": {"enum": list(range(1, VERSION + 1))},
    "name": _NAME,
    "source": _TEXT,
    "sources": _SOURCES,
    "contention": _NOT_NEGATIVE,
    "measured": _record(
        {
            "devices": _COUNT,
            "collectives": {"type": "array", "items": _COLLECTIVE},
            "operators": {"type": "array", "items": _OPERATOR},
        }
    ),
}
_OPTIONAL = ("source", "sources", "contention", "measured")
UNIFORM_SCHEMA = _record({**_ABOUT, **_HOSTS}, _OPTIONAL)
"""A cluster of any number of equal devices."""
_STRETCH = _record({"name": _NAME, "count": _COUNT, **_HOSTS})
STRETCHES_SCHEMA = _record({**_ABOUT, "stretches": {"type": "array", "items": _STRETCH, "minItems": 1}}, _OPTIONAL)
"""A cluster of a fixed number of devices, host by host."""


def read(text: str, what: str) -> dict[str, Any]:
    """Return the data of a cluster in JSON, checked against the schema.

    Raises:
        MeshError: naming `what`, the place in it and what is wrong there.
    """
    try:
        data = finite_json.read(text)
    except json.JSONDecodeError as error:
        raise MeshError(
            f"{what} is not JSON: {finite_json.place(error)}. Was it cut short? Write it again by Cluster.save."
        ) from error
    except ValueError as error:
        raise MeshError(f"{what} is not a cluster: {reason_of(error)}. Write it again by Cluster.save.") from error
    # One schema that allows either would report every error as "not valid under any of the given schemas".
    schema = STRETCHES_SCHEMA if isinstance(data, dict) and "stretches" in data else UNIFORM_SCHEMA
    violation = finite_json.violation(data, schema)
    if violation is not None:
        raise MeshError(f"{what} is not a cluster: {violation}.")
    assert isinstance(data, dict)
    return data


def hosts_data(device: Device, devices_per_host: int, inside: Link, between: Link) -> dict[str, Any]:
    """Return the figures of equal hosts as JSON data."""
    return {
        "device": _device_data(device),
        "devices_per_host": devices_per_host,
        "inside": _link_data(inside),
        "between": _link_data(between),
    }


def hosts_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the fields that `hosts_data` wrote; the other entries of `data` are left out.

    Raises:
        ValueError: a curve in the data is not valid; the message says where.
    """
    return {
        "device": _device_of(data["device"]),
        "devices_per_host": data["devices_per_host"],
        "inside": _link_of(data["inside"], "inside"),
        "between": _link_of(data["between"], "between"),
    }


def stretch_data(stretch: Hosts) -> dict[str, Any]:
    """Return one entry of `stretches`."""
    figures = hosts_data(stretch.device, stretch.devices_per_host, stretch.inside, stretch.between)
    return {"name": stretch.name, "count": stretch.count, **figures}


def stretch_of(data: dict[str, Any]) -> Hosts:
    """Return the hosts that `stretch_data` wrote; `ValueError` as for `hosts_fields`."""
    return Hosts(name=data["name"], count=data["count"], **hosts_fields(data))


def _device_data(device: Device) -> dict[str, Any]:
    """Return a device as JSON data; figures that have their default are left out."""
    data: dict[str, Any] = {name: getattr(device, name) for name in _DEVICE["required"]}
    for name in ("dispatch", "compiled_dispatch"):
        if getattr(device, name) != Dispatch():
            data[name] = asdict(getattr(device, name))
    extra = {"operators": to_records(device.operators)} | {name: getattr(device, name) for name in _OPTIONAL_FIELDS}
    return data | {name: value for name, value in extra.items() if value}


def _device_of(data: dict[str, Any]) -> Device:
    figures: dict[str, Any] = {
        name: Dispatch(**data[name]) for name in ("dispatch", "compiled_dispatch") if name in data
    }
    # Curves are optional: without them, operators are priced by peak rates.
    figures["operators"] = from_records(data.get("operators", ()), "device.operators")
    return Device(**data | figures)


def _link_data(link: Link) -> dict[str, Any]:
    """Return a link as JSON data; figures that it lacks are left out."""
    data: dict[str, Any] = {"bandwidth": link.bandwidth, "latency": link.latency}
    if link.collectives:
        data["collectives"] = [
            {"kind": kind, "size": bus.size, **curve_data(bus.curve)} for kind, bus in link.collectives.items()
        ]
    return data | ({"sources": link.sources} if link.sources else {})


def _link_of(data: dict[str, Any], place: str) -> Link:
    collectives = {
        record["kind"]: BusCurve(record["size"], curve_of(record, f"{place}.collectives.{index}"))
        for index, record in enumerate(data.get("collectives", ()))
    }
    return Link(**data | {"collectives": collectives})
