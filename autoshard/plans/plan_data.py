"""The data of a sharding plan, and its file: JSON with a schema and a checksum, never pickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Placement

from autoshard import finite_json
from autoshard.errors import PlanError, file_problem, reason_of
from autoshard.memory.footprint import Memory
from autoshard.plans.step_replay import StepReplay
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import parse_placement, placement_text

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of one step at one place of the model.

    Attributes:
        kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"` or `"shift"`.
        axis: the name of the mesh axis of its group.
        bytes: bytes held by one device before one of them.
        count: their number in a step.
        module: path of their module, `""` for the root.
        phase: `"forward"` or `"backward"`.
        seconds: predicted time of one of them.
        gradient: True if they reduce gradients for the optimizer, once for all runs of the step that are summed.
    """

    kind: str
    axis: str
    bytes: int
    count: int
    module: str
    phase: str
    seconds: float
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The strategy chosen for one operator, in readable form.

    Attributes:
        node: name of the operator's node in the captured graph.
        operator: its name, such as `"aten.mm"`.
        module: path of its module, `""` for the root.
        phase: `"forward"` or `"backward"`.
        strategy: the specs of its operands and results, as text.
        seconds: predicted compute time; collectives inside its strategy are listed among those of the plan.
    """

    node: str
    operator: str
    module: str
    phase: str
    strategy: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContents:
    """The fields of `ShardingPlan`, documented there, and figures derived from them."""

    mesh: MeshShape
    placements: dict[str, Placements]
    input_placements: dict[str, Placements] = field(default_factory=dict)
    output_placements: dict[str, Placements] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    host_update_seconds: float = 0.0
    memory: Memory = field(default_factory=Memory)
    device_memory: int = 0
    collectives: tuple[Collective, ...] = ()
    cost: float = 0.0
    lower_bound: float = 0.0
    method: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    fingerprint: str = ""
    cluster: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)
    choices: tuple[Decision, ...] = ()
    hints: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    hosted: tuple[str, ...] = ()
    step_replay: StepReplay = field(default_factory=StepReplay)

    def __post_init__(self) -> None:
        # An assertion: `decode` checks files, so a wrong length here is a bug of the planner.
        for table in (self.placements, self.input_placements, self.output_placements):
            for name, placements in table.items():
                assert len(placements) == self.mesh.ndim, (
                    f"{name} has {len(placements)} placements on a mesh of {self.mesh.ndim} axes"
                )

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """Mesh axis -> the shares of the batch of its ranks, as proportions; empty for equal shares."""
        return {axis: tuple(shares) for axis, shares in self.options.get("shares", {}).items()}

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The loops whose dims are in shares, if not those of the batch of dynamic inputs (`patterns.parts`)."""
        return tuple((name, factor) for name, factor in self.options.get("parts", ()))

    @property
    def is_in_pieces(self) -> bool:
        """True if a loss with large logits is computed in pieces, so that whole logits are never held."""
        return any("logit_statistics" in choice.operator for choice in self.choices)

    @property
    def gap(self) -> float:
        """Maximum distance from the best plan, relative to the cost; 0.0 if the plan is proved optimal."""
        # Rounding may put the bound slightly above the cost.
        return max(0.0, (self.cost - self.lower_bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def subject(self) -> dict[str, str]:
        """What the plan was made for and when: label -> text; empty in files of older versions."""
        return dict(self.options.get("subject", {}))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all devices per second of steps and updates; None if no input contains token indices."""
        return self._per_second("tokens")

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all devices per second of steps and updates; None if unknown."""
        return self._per_second("samples")

    def _per_second(self, name: str) -> float | None:
        count, seconds = self.options.get("work", {}).get(name), self.step_seconds + self.update_seconds
        return count / seconds if count and seconds else None

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU), without recomputation; None if unknown.

        The fraction of the devices' peak rates that matrix products, convolutions and attention use.
        """
        least, seconds = self.options.get("work", {}).get("peak_seconds"), self.step_seconds + self.update_seconds
        return least / seconds if least and seconds else None

    @property
    def ended_early(self) -> bool:
        """True if the time limit ended the search, so that a longer search may find a faster plan."""
        return "ended by time_limit" in self.method

    @property
    def capacity(self) -> int:
        """Bytes that the step may hold: the memory limit of the plan, or the memory of a device."""
        # A user's limit leaves room for what plans do not count, so it takes precedence over the device's memory.
        return self.options.get("memory_limit") or self.device_memory

    @property
    def fits(self) -> bool:
        """True if the peak is within the `capacity`, or the capacity is unknown."""
        return not self.capacity or self.memory.peak <= self.capacity


TEXT = {"type": "string"}
NUMBER = {"type": "number"}
COUNT = {"type": "integer", "minimum": 0}
# The texts of `spec.placement_text`; torch's own repr of placements changes between versions.
_PLACEMENT = {"type": "string", "pattern": r"^(R|S\(\d+(,f=[1-9]\d*)?\)|P\(\w+\))$"}


def table(values: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with any names, and values of one schema."""
    return {"type": "object", "additionalProperties": values}


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an array of items of one schema."""
    return {"type": "array", "items": items}


def _row(*items: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an array with one schema per item."""
    return {"type": "array", "prefixItems": list(items), "minItems": len(items), "maxItems": len(items)}


# Unknown options are allowed: newer versions may record more options.
_OPTIONS = {
    "type": "object",
    "properties": {
        "inputs": {"enum": ["global", "local"]},
        "memory_limit": {"type": ["integer", "null"]},
        "shares": {**table({**list_of({"type": "integer", "minimum": 1}), "minItems": 1}), "maxProperties": 1},
        "parts": list_of(_row(TEXT, COUNT)),
    },
}
_PLACEMENTS = table(list_of(_PLACEMENT))
_SHARDING = record(
    mesh={**table({"type": "integer", "minimum": 1}), "minProperties": 1},
    placements=_PLACEMENTS,
    input_placements=_PLACEMENTS,
    output_placements=_PLACEMENTS,
    shapes=table(list_of(COUNT)),
    step_seconds=NUMBER,
    update_seconds=NUMBER,
    host_update_seconds=NUMBER,
    memory=record(
        parameters=COUNT,
        gradients=COUNT,
        optimizer=COUNT,
        buffers=COUNT,
        activations=COUNT,
        peak=COUNT,
        held=table(COUNT),
        phase=TEXT,
        module=TEXT,
        operator=TEXT,
        largest=list_of(record(name=TEXT, kind=TEXT, bytes=COUNT)),
        modules=table(table(COUNT)),
        saved=list_of(record(module=TEXT, operator=TEXT, line=TEXT, count=COUNT, bytes=COUNT)),
        host=COUNT,
        host_optimizer=COUNT,
        sources=table(table(COUNT)),
    ),
    device_memory=COUNT,
    collectives=list_of(
        record(
            kind=TEXT,
            axis=TEXT,
            bytes=COUNT,
            count=COUNT,
            module=TEXT,
            phase=TEXT,
            seconds=NUMBER,
            gradient={"type": "boolean"},
        )
    ),
    cost=NUMBER,
    lower_bound=NUMBER,
    method=TEXT,
    timings=table(NUMBER),
    fingerprint=TEXT,
    cluster=TEXT,
    versions=table(TEXT),
    decisions={"type": "object"},
    choices=list_of(record(node=TEXT, operator=TEXT, module=TEXT, phase=TEXT, strategy=TEXT, seconds=NUMBER)),
    hints=table(TEXT),
    options=_OPTIONS,
    gathered=table({"enum": ["once", "again"]}),
    recomputed=list_of(TEXT),
    offloaded=list_of(TEXT),
    hosted=list_of(TEXT),
    step_replay=record(
        compute=list_of(_row(COUNT, NUMBER, NUMBER)),
        collectives=list_of(_row(COUNT, NUMBER, NUMBER, TEXT, TEXT, COUNT)),
        held=table(list_of(_row(COUNT, COUNT))),
        seconds=NUMBER,
        exposed=NUMBER,
        hidden=NUMBER,
    ),
)

# Files of older versions lack them.
_SHARDING["required"] = [
    name
    for name in _SHARDING["required"]
    if name not in ("update_seconds", "host_update_seconds", "offloaded", "hosted", "step_replay")
]
for _name in ("modules", "saved", "host", "host_optimizer", "sources"):
    _SHARDING["properties"]["memory"]["required"].remove(_name)
_SHARDING["properties"]["collectives"]["items"]["required"].remove("gradient")


def _check_rows(data: Mapping[str, Any], what: str) -> None:
    """Raise an error unless every tensor has one placement per axis."""
    # A schema cannot compare two lengths.
    for part in ("placements", "input_placements", "output_placements"):
        for name, row in data[part].items():
            if len(row) != len(data["mesh"]):
                raise PlanError(
                    f"{what} gives {name} {len(row)} placements ({', '.join(row)}) on a mesh of "
                    f"{len(data['mesh'])} axes ({', '.join(data['mesh'])})."
                )


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a plan file.

    Attributes:
        name: the name of the format, in the file.
        version: the version of the format.
        noun: the name of such a file in errors.
        schema: the schema of the plan's data.
        check: raises an error for data that satisfies the schema but is not a plan; its second argument names the file.
    """

    name: str
    version: int
    noun: str
    schema: dict[str, Any]
    check: Callable[[Mapping[str, Any], str], None]


SHARDING = Format("autoshard plan", 3, "a sharding plan", _SHARDING, _check_rows)
"""The file of a `ShardingPlan`."""


def to_data(plan: PlanContents) -> dict[str, Any]:
    """Return the plan as JSON data by the schema; placements as `"R"`, `"S(0)"`, `"S(0,f=3)"`, `"P(sum)"`."""
    # The file lists the fields in their order; JSON values are not converted.
    return {item.name: getattr(plan, item.name) for item in fields(PlanContents)} | {
        "mesh": {axis.name: axis.size for axis in plan.mesh.axes},
        "placements": _texts_of(plan.placements),
        "input_placements": _texts_of(plan.input_placements),
        "output_placements": _texts_of(plan.output_placements),
        "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
        "memory": asdict(plan.memory),
        "collectives": [asdict(collective) for collective in plan.collectives],
        "choices": [asdict(choice) for choice in plan.choices],
        "recomputed": list(plan.recomputed),
        "offloaded": list(plan.offloaded),
        "hosted": list(plan.hosted),
        "step_replay": asdict(plan.step_replay),
    }


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the plan's fields from the data of `to_data`."""
    return dict(data) | {
        "mesh": MeshShape.of(data["mesh"]),
        "placements": _placements_of(data["placements"]),
        "input_placements": _placements_of(data["input_placements"]),
        "output_placements": _placements_of(data["output_placements"]),
        "shapes": {name: tuple(shape) for name, shape in data["shapes"].items()},
        "memory": Memory.from_data(data["memory"]),
        "recomputed": tuple(data["recomputed"]),
        "offloaded": tuple(data.get("offloaded", ())),
        "hosted": tuple(data.get("hosted", ())),
        "collectives": tuple(Collective(**record) for record in data["collectives"]),
        "choices": tuple(Decision(**record) for record in data["choices"]),
        "step_replay": StepReplay.from_data(data["step_replay"]) if "step_replay" in data else StepReplay(),
    }


def _placements_of(texts: Mapping[str, Sequence[str]]) -> dict[str, tuple[Placement, ...]]:
    return {name: tuple(parse_placement(text) for text in row) for name, row in texts.items()}


def _texts_of(placements: Mapping[str, Sequence[Placement]]) -> dict[str, list[str]]:
    return {name: [placement_text(placement) for placement in row] for name, row in placements.items()}


def encode(data: Mapping[str, Any], format: Format = SHARDING) -> str:
    """Return the text of a plan file: format, version and checksum, then the data, one entry per line."""
    # A reader gets numeric names as texts, which sort differently: the checksum is of texts.
    data = json.loads(_compact(data))
    lines = [f'"{name}": {_value(value)}' for name, value in data.items()]
    # The head is fixed text: a file can be recognised by its first lines, without parsing the rest.
    head = (
        f'{{\n"format": "{format.name}",\n"version": {format.version},\n"checksum": "{_checksum(data)}",\n"plan": {{\n'
    )
    return head + ",\n".join(lines) + "\n}\n}\n"


def _value(value: object) -> str:
    """Return one part of a plan as JSON."""
    # An entry of a table or of a list of records takes one line, so that files diff.
    if isinstance(value, Mapping) and value:
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_compact(entry)}" for name, entry in value.items()) + "\n}"
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: object) -> str:
    # JSON has no NaN: other readers would refuse Python's NaN.
    return json.dumps(value, allow_nan=False)


def _checksum(data: Mapping[str, Any]) -> str:
    """Return the checksum of the content, independent of the order of names and of white space."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read(path: str | os.PathLike[str], kind: str = "plan") -> tuple[str, str]:
    """Return the text of a file and its name in errors; raise a `PlanError` if it cannot be read."""
    what = f"{kind} file {os.fspath(path)!r}"
    try:
        return Path(path).read_text("utf-8"), what
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{what} cannot be read: {file_problem(error)}.") from error


def decode(text: str, what: str, format: Format = SHARDING) -> dict[str, Any]:
    """Return the data of a plan file after checking that it is complete, unedited and valid by the schema.

    Args:
        text: the result of `encode`.
        what: names the text in errors.
        format: the required format.

    Raises:
        PlanError: the file is truncated, edited or of another format; the message says which, and where.
    """
    advice = "Make the plan again, or take an unharmed copy."
    try:
        envelope = finite_json.read(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{what} is cut short or damaged: {finite_json.place(error)}. {advice}") from error
    # `JSONDecodeError` is a ValueError too and is caught above: this one is NaN or infinity.
    except ValueError as error:
        raise PlanError(f"{what} was edited or damaged since it was saved: {reason_of(error)}. {advice}") from error
    data = _open(envelope, what, format)
    # Before the schema: an edited file may break the schema as well, but the edit explains more.
    if _checksum(data) != envelope["checksum"]:
        raise PlanError(
            f"{what} was edited or damaged since it was saved: its content does not have the checksum that it carries. "
            f"{advice} To pin placements by hand, pass hints to autoshard.plan."
        )
    violation = finite_json.violation(data, format.schema)
    if violation is not None:
        raise PlanError(f"{what} is not a plan that this version understands: {violation}.")
    format.check(data, what)
    return data


def _open(envelope: object, what: str, format: Format) -> dict[str, Any]:
    """Check format and version of the envelope, and return the plan's data."""
    # Format and version before the checksum: a file of another kind is not damaged, and the error says so.
    if not isinstance(envelope, dict) or envelope.get("format") != format.name:
        raise PlanError(f"{what} is not {format.noun}: one is JSON whose format is {format.name!r}.")
    if envelope.get("version") != format.version:
        raise PlanError(
            f"{what} is of version {envelope.get('version')!r} of the plan format; this autoshard reads version "
            f"{format.version}. Operators of other versions have other names, so that their plans fit no graph that is "
            "captured now: make the plan again with this version of autoshard, or use the version that wrote it."
        )
    if not isinstance(envelope.get("plan"), dict) or not isinstance(envelope.get("checksum"), str):
        raise PlanError(f"{what} lacks its content or its checksum: it was edited or damaged. Make the plan again.")
    data: dict[str, Any] = envelope["plan"]
    return data
