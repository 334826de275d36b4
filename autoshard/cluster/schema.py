"""What a cluster file may contain."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from autoshard.errors import MeshError

FORMAT = "autoshard cluster"
VERSION = 1

_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_NOT_NEGATIVE = {"type": "number", "minimum": 0}
_NAME = {"type": "string", "minLength": 1}


def _record(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Schema of an object that has exactly these properties."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_LINK = _record({"bandwidth": _POSITIVE, "latency": _NOT_NEGATIVE})
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
    }
)
_CURVE = {"type": "array", "items": _POSITIVE, "minItems": 1}
_COUNT = {"type": "integer", "minimum": 1}
_COLLECTIVE = _record({"kind": _NAME, "size": _COUNT, "stride": _COUNT, "amounts": _CURVE, "seconds": _CURVE})
_OPERATOR = _record(
    {
        "operator": _NAME,
        "dtype": _NAME,
        "amounts_are": {"enum": ["flops", "bytes", "flops_per_byte"]},
        "amounts": _CURVE,
        "seconds": _CURVE,
    }
)
SCHEMA = _record(
    {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "name": _NAME,
        "source": {"type": "string"},
        "device": _DEVICE,
        "devices_per_host": {"type": "integer", "minimum": 1},
        "inside": _LINK,
        "between": _LINK,
        "contention": _NOT_NEGATIVE,
        "measured": _record(
            {
                "devices": _COUNT,
                "collectives": {"type": "array", "items": _COLLECTIVE},
                "operators": {"type": "array", "items": _OPERATOR},
            }
        ),
    },
    optional=("source", "contention", "measured"),
)


def check(text: str, what: str) -> dict[str, Any]:
    """The data of a cluster in JSON, checked against the schema.

    Raises:
        MeshError: naming `what`, the place in it and what is wrong there.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise MeshError(f"{what} is not JSON: {error}. Was it cut short? Write it again by Cluster.save.") from error
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(SCHEMA).iter_errors(data))
    if problem is not None:
        place = ".".join(str(step) for step in problem.absolute_path) or "the top level"
        raise MeshError(f"{what} is not a cluster: at {place}, {problem.message}.")
    assert isinstance(data, dict)
    return data
