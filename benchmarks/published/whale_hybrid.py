"""Whale 5.1.2 to 5.1.4: replicated features and a split classifier."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from autoshard.plan import ShardingPlan
from published.clusters import WHALE, mesh_of
from published.models import image_classifier
from published.part import Part, Row
from published.plans import forced, free

_SAMPLES = 32  # per device


def _rows(depth: float) -> Iterator[Row]:
    yield from _hundred_thousand(depth)
    steps = {}
    for devices in (8, 32):
        example = image_classifier(1_000_000, _SAMPLES * devices, depth)
        steps[devices] = free(example, mesh_of(devices), WHALE).step_seconds
    yield Row("Whale Fig. 14", "1M classes, scaling efficiency, 8 to 32 GPUs", 0.95, steps[8] / steps[32])


def _hundred_thousand(depth: float) -> Iterator[Row]:
    hybrid = {8: 1.13, 16: 1.66, 32: 2.43}
    patterns = {8: 1.6, 16: None, 32: 3.75}
    bridges = {8: 0.06, 16: None, 32: 0.10}
    for devices in hybrid:
        batch, mesh = _SAMPLES * devices, mesh_of(devices)
        example = functools.partial(image_classifier, 100_000, batch, depth)
        data = forced(example(), batch, "DDP", mesh, WHALE)
        ours = free(example(), mesh, WHALE)
        what = f"100k classes, {devices} GPUs"
        ratio = data.step_seconds / ours.step_seconds
        yield Row("Whale Fig. 13", f"{what}: hybrid over data parallel", hybrid[devices], ratio)
        features = forced(example(), batch, "split features", mesh, WHALE)
        ratio = features.step_seconds / ours.step_seconds
        yield Row("Whale Fig. 15", f"{what}: SP1 over SP2", patterns[devices], ratio)
        share = _communication(ours, body=False) / ours.step_seconds
        yield Row("Whale Fig. 16", f"{what}: bridge over step", bridges[devices], share)
        if devices == 32:
            ratio = _communication(data) / _communication(ours)
            yield Row("Whale Fig. 16", f"{what}: collectives of data parallel over hybrid's", 6.0, ratio)


def _communication(plan: ShardingPlan, *, body: bool = True) -> float:
    """Seconds of a plan's collectives; those of a ResNet's body left out, the bridge to its classifier and the loss."""
    parts = ("stem", "blocks")
    return sum(one.count * one.seconds for one in plan.collectives if body or not one.module.startswith(parts))


PART = Part(
    "Whale 5.1.2 to 5.1.4: ResNet-50 with 100,000 and a million classes",
    f"{_SAMPLES} images per GPU (the paper does not say), 224 by 224, float32, Adam; hosts of eight V100s with "
    "NVLink and one 50 Gb/s port. Whale's batch norms see one GPU's images; ours would exchange statistics, so "
    "group norms stand in their place. Reductions of gradients run behind the backward half here, which they did "
    "not wholly in TensorFlow 1.12. The hybrid is our own plan, which nothing forces.",
    _rows,
)
