"""A pipeline's plan as JSON data, under a schema; `plan_file` writes and reads the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoshard.pipeline.schedule.actions import Action, Schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_search import ScheduleCandidate
from autoshard.plans.plan_file import COUNT, NUMBER, SHARDING, TEXT, Format, list_of, record, table
from autoshard.plans.plan_file import to_data as stage_data
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape

if TYPE_CHECKING:
    from autoshard.pipeline.plan.pipeline_plan import PipelinePlan

_SIZE = {"type": "integer", "minimum": 1}
_OPTIONAL = {"type": ["number", "null"]}
_SCHEMA = record(
    mesh={**table(_SIZE), "minProperties": 1},
    axis=TEXT,
    stage_of=table(COUNT),
    recomputed=table(list_of(COUNT)),
    schedule=record(name=TEXT, microbatches=_SIZE, orders=list_of(list_of(TEXT))),
    stages=list_of(SHARDING.schema),
    reduced=list_of({"enum": ["step", "microbatch"]}),
    modules=list_of({**list_of(TEXT), "minItems": 2, "maxItems": 2}),
    costs=list_of(
        record(**{one.name: NUMBER if one.type == "float" else COUNT for one in dataclasses.fields(StageCosts)})
    ),
    step_seconds=NUMBER,
    bubble=NUMBER,
    peaks=list_of(COUNT),
    capacities=list_of(COUNT),
    table=list_of(
        record(
            schedule=TEXT,
            microbatches=_SIZE,
            virtual=_SIZE,
            seconds=_OPTIONAL,
            bubble=_OPTIONAL,
            peak=_OPTIONAL,
            verdict=TEXT,
        )
    ),
    cluster=TEXT,
    contention=NUMBER,
    fingerprint=TEXT,
    timings=table(NUMBER),
    versions=table(TEXT),
    devices=list_of(_SIZE),
)


def _check_stages(data: Mapping[str, Any], what: str) -> None:
    for index, stage in enumerate(data["stages"]):
        SHARDING.check(stage, f"stage {index} of {what}")


PIPELINE = Format("autoshard pipeline plan", 2, "a pipeline's plan", _SCHEMA, _check_stages)
"""The file of a `PipelinePlan`."""


def to_data(plan: PipelinePlan) -> dict[str, Any]:
    """The plan as JSON data that follows the schema; actions as torch writes them, such as `"2F0"`."""
    return {
        "mesh": {axis.name: axis.size for axis in plan.mesh.axes},
        "axis": plan.axis,
        "stage_of": dict(plan.stage_of),
        "recomputed": {name: list(stages) for name, stages in plan.recomputed.items()},
        "schedule": {
            "name": plan.schedule.name,
            "microbatches": plan.schedule.microbatches,
            "orders": [[str(action) for action in order] for order in plan.schedule.orders],
        },
        "stages": [stage_data(stage) for stage in plan.stages],
        "reduced": list(plan.reduced),
        "modules": [list(pair) for pair in plan.modules],
        "costs": [dataclasses.asdict(cost) for cost in plan.costs],
        "step_seconds": plan.step_seconds,
        "bubble": plan.bubble,
        "peaks": list(plan.peaks),
        "capacities": list(plan.capacities),
        "table": [dataclasses.asdict(line) for line in plan.table],
        "cluster": plan.cluster,
        "contention": plan.contention,
        "fingerprint": plan.fingerprint,
        "timings": dict(plan.timings),
        "versions": dict(plan.versions),
        "devices": list(plan.devices),
    }


def from_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the plan that `to_data` made data of, which follows the schema.

    Raises:
        PipelineError: the orders are those of no schedule.
    """
    said = data["schedule"]
    orders = tuple(tuple(map(Action.parse, order)) for order in said["orders"])
    return dict(data) | {
        "mesh": MeshShape.of(data["mesh"]),
        "recomputed": {name: tuple(stages) for name, stages in data["recomputed"].items()},
        "schedule": Schedule(said["name"], said["microbatches"], orders),
        "stages": tuple(ShardingPlan.from_data(stage) for stage in data["stages"]),
        "reduced": tuple(data["reduced"]),
        "modules": tuple((first, last) for first, last in data["modules"]),
        "costs": tuple(StageCosts(**cost) for cost in data["costs"]),
        "peaks": tuple(data["peaks"]),
        "capacities": tuple(data["capacities"]),
        "devices": tuple(data["devices"]),
        "table": tuple(ScheduleCandidate(**line) for line in data["table"]),
    }
