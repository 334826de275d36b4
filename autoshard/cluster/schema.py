"""What a cluster file may contain."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from autoshard import finite_json
from autoshard.errors import MeshError

FORMAT = "autoshard cluster"
VERSION = 3
"""Version 1 knew no `stretches`, version 2 no curves of devices and links: both are read as they stand."""

_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_NOT_NEGATIVE = {"type": "number", "minimum": 0}
_NAME = {"type": "string", "minLength": 1}


def _record(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Schema of an object that has exactly these properties."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_COUNT = {"type": "integer", "minimum": 1}
_VALUES = {"type": "array", "items": _POSITIVE, "minItems": 1}
_TEXT = {"type": "string"}
_SOURCES = {"type": "object", "additionalProperties": _TEXT}


def _curve(**about: Any) -> dict[str, Any]:
    """Schema of a curve over amounts, by seconds or by rates."""
    schema = _record(
        {**about, "amounts": _VALUES, "seconds": _VALUES, "rates": _VALUES, "source": _TEXT},
        ("seconds", "rates", "source"),
    )
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
_DEVICE = _record(
    {
        "name": _NAME,
        "memory": {"type": "integer", "minimum": 1},
        "peak_flops": {
            "type": "object",
            "additionalProperties": _POSITIVE,
            "required": ["float32", "bfloat16", "float64"],
        },
        "memory_bandwidth": _POSITIVE,
        "kernel_overhead": _NOT_NEGATIVE,
        "dispatch": _DISPATCH,
        "compiled_dispatch": _DISPATCH,
        "operators": {"type": "array", "items": _OPERATOR},
        "multiprocessors": {"type": "integer", "minimum": 0},
        "capability": _NOT_NEGATIVE,
        "compiled": {"type": "boolean"},
        "sources": _SOURCES,
    },
    ("dispatch", "compiled_dispatch", "operators", "multiprocessors", "capability", "compiled", "sources"),
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
"""A cluster of so many devices, host by host."""


def check(text: str, what: str) -> dict[str, Any]:
    """The data of a cluster in JSON, checked against the schema.

    Raises:
        MeshError: naming `what`, the place in it and what is wrong there.
    """
    try:
        data = finite_json.read(text)
    except json.JSONDecodeError as error:
        raise MeshError(f"{what} is not JSON: {error}. Was it cut short? Write it again by Cluster.save.") from error
    except ValueError as error:
        raise MeshError(f"{what} is not a cluster: {error}. Write it again by Cluster.save.") from error
    schema = STRETCHES_SCHEMA if isinstance(data, dict) and "stretches" in data else UNIFORM_SCHEMA
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if problem is not None:
        place = ".".join(str(step) for step in problem.absolute_path) or "the top level"
        raise MeshError(f"{what} is not a cluster: at {place}, {problem.message}.")
    assert isinstance(data, dict)
    return data
