"""A plan as a JSON text: data under a schema and a checksum, never pickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jsonschema
from torch.distributed.tensor import Placement

from autoshard.errors import PlanError
from autoshard.specs.spec import parse_placement, placement_text

if TYPE_CHECKING:
    from autoshard.plan import ShardingPlan

FORMAT = "autoshard plan"
VERSION = 2

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_COUNT = {"type": "integer", "minimum": 0}
_PLACEMENT = {"type": "string", "pattern": r"^(R|S\(\d+(,f=[1-9]\d*)?\)|P\(\w+\))$"}


def _table(values: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with any names and such values."""
    return {"type": "object", "additionalProperties": values}


def _record(**properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_PLACEMENTS = _table(_list(_PLACEMENT))
SCHEMA = _record(
    mesh={**_table({"type": "integer", "minimum": 1}), "minProperties": 1},
    placements=_PLACEMENTS,
    input_placements=_PLACEMENTS,
    output_placements=_PLACEMENTS,
    shapes=_table(_list(_COUNT)),
    step_seconds=_NUMBER,
    memory=_record(
        parameters=_COUNT,
        gradients=_COUNT,
        optimizer=_COUNT,
        buffers=_COUNT,
        activations=_COUNT,
        peak=_COUNT,
        held=_table(_COUNT),
        phase=_TEXT,
        module=_TEXT,
        operator=_TEXT,
        largest=_list(_record(name=_TEXT, kind=_TEXT, bytes=_COUNT)),
    ),
    device_memory=_COUNT,
    collectives=_list(
        _record(kind=_TEXT, axis=_TEXT, bytes=_COUNT, count=_COUNT, module=_TEXT, phase=_TEXT, seconds=_NUMBER)
    ),
    cost=_NUMBER,
    lower_bound=_NUMBER,
    method=_TEXT,
    timings=_table(_NUMBER),
    fingerprint=_TEXT,
    cluster=_TEXT,
    versions=_table(_TEXT),
    decisions={"type": "object"},
    choices=_list(_record(node=_TEXT, operator=_TEXT, module=_TEXT, phase=_TEXT, strategy=_TEXT, seconds=_NUMBER)),
    hints=_table(_TEXT),
    options={"type": "object"},
    gathered=_table({"enum": ["once", "again"]}),
    recomputed=_list(_TEXT),
)


def to_data(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as JSON data that follows the schema; placements as `"R"`, `"S(0)"`, `"S(0,f=3)"`, `"P(sum)"`."""
    return {
        "mesh": {axis.name: axis.size for axis in plan.mesh.axes},
        "placements": _texts_of(plan.placements),
        "input_placements": _texts_of(plan.input_placements),
        "output_placements": _texts_of(plan.output_placements),
        "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
        "step_seconds": plan.step_seconds,
        "memory": asdict(plan.memory),
        "device_memory": plan.device_memory,
        "collectives": [asdict(collective) for collective in plan.collectives],
        "cost": plan.cost,
        "lower_bound": plan.lower_bound,
        "method": plan.method,
        "timings": plan.timings,
        "fingerprint": plan.fingerprint,
        "cluster": plan.cluster,
        "versions": plan.versions,
        "decisions": plan.decisions,
        "choices": [asdict(choice) for choice in plan.choices],
        "hints": plan.hints,
        "options": plan.options,
        "gathered": plan.gathered,
        "recomputed": list(plan.recomputed),
    }


def placements_of(texts: Mapping[str, Sequence[str]]) -> dict[str, tuple[Placement, ...]]:
    """The placements that `to_data` wrote as texts."""
    return {name: tuple(parse_placement(text) for text in row) for name, row in texts.items()}


def _texts_of(placements: Mapping[str, Sequence[Placement]]) -> dict[str, list[str]]:
    return {name: [placement_text(placement) for placement in row] for name, row in placements.items()}


def encode(data: Mapping[str, Any]) -> str:
    """The file of a plan: format, version and checksum, then its data, one entry a line."""
    data = json.loads(_compact(data))  # names that are numbers sort differently before they are texts
    lines = [f'"{name}": {_value(value)}' for name, value in data.items()]
    head = f'{{\n"format": "{FORMAT}",\n"version": {VERSION},\n"checksum": "{_checksum(data)}",\n"plan": {{\n'
    return head + ",\n".join(lines) + "\n}\n}\n"


def _value(value: object) -> str:
    """JSON of one part of a plan: an entry of a table or of a list of records takes one line."""
    if isinstance(value, Mapping) and value:
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_compact(entry)}" for name, entry in value.items()) + "\n}"
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _checksum(data: Mapping[str, Any]) -> str:
    """Of the content, whatever the order of names and the white space."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def decode(text: str, what: str) -> dict[str, Any]:
    """The data in the file of a plan, known to be whole, unedited and as the schema says.

    Args:
        text: what `encode` returned.
        what: names the text in errors.

    Raises:
        PlanError: it is not so; the message says which, and where.
    """
    again = "Make the plan again, or take an unharmed copy."
    try:
        envelope = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{what} is cut short or damaged: it ends or breaks at line {error.lineno}, column {error.colno} "
            f"({error.msg}). {again}"
        ) from error
    data = _open(envelope, what)
    if _checksum(data) != envelope["checksum"]:
        raise PlanError(
            f"{what} was edited or damaged since it was saved: its content does not have the checksum that it carries. "
            f"{again} To pin placements by hand, pass hints to autoshard.plan."
        )
    validate(data, what)
    return data


def _open(envelope: object, what: str) -> dict[str, Any]:
    """The plan's data in the envelope, whose format and version are checked."""
    if not isinstance(envelope, dict) or envelope.get("format") != FORMAT:
        raise PlanError(f"{what} is not a sharding plan: a plan is JSON whose format is {FORMAT!r}.")
    if envelope.get("version") != VERSION:
        raise PlanError(
            f"{what} is of version {envelope.get('version')!r} of the plan format; this autoshard reads version "
            f"{VERSION}. Make the plan again with this version of autoshard, or use the version that wrote it."
        )
    if not isinstance(envelope.get("plan"), dict) or not isinstance(envelope.get("checksum"), str):
        raise PlanError(f"{what} lacks its content or its checksum: it was edited or damaged. Make the plan again.")
    data: dict[str, Any] = envelope["plan"]
    return data


def validate(data: Mapping[str, Any], what: str) -> None:
    """Make sure that data follows the schema of a plan; `PlanError` says where it does not."""
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(SCHEMA).iter_errors(data))
    if problem is not None:
        place = ".".join(str(step) for step in problem.absolute_path) or "the top level"
        raise PlanError(f"{what} is not a plan that this version understands: at {place}, {problem.message}.")
    for part in ("placements", "input_placements", "output_placements"):
        for name, row in data[part].items():
            if len(row) != len(data["mesh"]):
                raise PlanError(
                    f"{what} gives {name} {len(row)} placements ({', '.join(row)}) on a mesh of "
                    f"{len(data['mesh'])} axes ({', '.join(data['mesh'])})."
                )
