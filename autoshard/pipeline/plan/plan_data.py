"""The JSON schema of a pipeline's plan; `plan_file` writes and reads the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.plans.plan_file import COUNT, NUMBER, SHARDING, TEXT, Format, list_of, record, table

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
        record(**{item.name: NUMBER if item.type == "float" else COUNT for item in dataclasses.fields(StageCosts)})
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
