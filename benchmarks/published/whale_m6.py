"""Whale 5.3.1, Fig. 19: ten billion parameters in a pipeline on 64 to 256 GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from published.clusters import PER_HOST, WHALE
from published.models import m6_10b
from published.part import Part, Row
from published.plans import pipeline

_STAGES, _MICROBATCHES = 8, 35
_SAMPLES = 1  # of a microbatch and replica


def _rows(depth: float) -> Iterator[Row]:
    steps = {}
    for hosts in (8, 32):
        replicas = hosts * PER_HOST // _STAGES
        batch = _SAMPLES * replicas * _MICROBATCHES
        steps[hosts] = pipeline(
            m6_10b(batch, depth),
            {"dp": replicas, "pp": _STAGES},
            WHALE,
            schedule="1F1B",
            microbatches=_MICROBATCHES,
            recompute="full",
            optimizer="adafactor",
        ).step_seconds
    yield Row("Whale Fig. 19", "M6-10B, scaling efficiency, 8 to 32 hosts", 0.91, steps[8] / steps[32])


PART = Part(
    "Whale 5.3.1: M6-10B",
    f"24 encoder and 24 decoder layers, {_STAGES} stages, {_MICROBATCHES} microbatches, recomputation and Adafactor "
    "as the paper says; assumed: width 3840, which makes ten billion parameters of so many layers, 256 tokens in "
    f"and 256 out, {_SAMPLES} such pair in a microbatch of a replica, float32; no images, whose patches are tokens "
    "like others. A replica of the pipeline is inside a host, gradients cross hosts through one 50 Gb/s port each. "
    "The batch grows with the hosts.",
    _rows,
)
