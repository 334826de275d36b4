"""Whale 5.1.1, Fig. 9 and 10: data parallelism."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from published.clusters import WHALE, mesh_of
from published.models import bert, image_classifier
from published.part import Part, Row
from published.plans import data_parallel, free


def _rows(depth: float) -> Iterator[Row]:
    models = {
        "Whale Fig. 9": ("ResNet-50", functools.partial(image_classifier, 1000), 128),
        "Whale Fig. 10": ("BERT-Large", bert, 32),
    }
    for source, (name, build, samples) in models.items():
        alone = free(build(samples, depth), {"gpus": 1}, WHALE).step_seconds
        for devices in (8, 16, 32):
            step = data_parallel(build(samples * devices, depth), mesh_of(devices), WHALE).step_seconds
            yield Row(source, f"{name}, data parallel speedup, {devices} GPUs", None, devices * alone / step)


PART = Part(
    "Whale 5.1.1: data parallelism",
    "128 images or 32 sequences of 128 tokens per GPU (the paper does not say), the same as beside P100s below, "
    "float32; hosts of eight V100s with NVLink and one 50 Gb/s port. The text gives no numbers. Gradients are "
    "reduced behind the backward half, grouped by 25 MiB.",
    _rows,
)
