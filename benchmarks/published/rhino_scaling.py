"""Rhino 7.3, Fig. 8: GPT-Medium on more GPUs without pipelines, and pipelines alone, on two platforms."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.cluster.cluster import Cluster
from published.clusters import RHINO, RHINO_SINGLE
from published.part import Part, Row
from published.plans import free, pipeline
from published.rhino import GPTS, PEAK, Model, flops

_BATCH = 8  # of GPT-Medium: one sequence for each of the most GPUs
_PER_STAGE = 8  # microbatches of a pipeline


def _rows(depth: float) -> Iterator[Row]:
    platforms = {"M8": RHINO, "S1": RHINO_SINGLE}
    for platform, cluster in platforms.items():
        steps = {
            devices: free(
                GPTS[0].build(_BATCH, depth), {"gpus": devices}, cluster, memory_limit=cluster.device.memory
            ).step_seconds
            for devices in (1, 2, 4, 8)
        }
        for devices in (2, 4, 8):
            what = f"GPT-Medium on {platform}, speedup on {devices} GPUs"
            yield Row("Rhino Fig. 8", what, None, steps[1] / steps[devices])
    for platform, cluster in platforms.items():
        for model in GPTS[1:4]:
            share = _utilisation(model, cluster, depth)
            what = f"{model.name} on {platform}, {model.devices} GPUs, pipeline alone: share of the peak"
            yield Row("Rhino Fig. 8", what, None, share)


def _utilisation(model: Model, cluster: Cluster, depth: float) -> float:
    """Operations of the model per second of a pipeline of all devices, over their peak."""
    batch = 64
    made = pipeline(
        model.build(batch, depth),
        {"pp": model.devices},
        cluster,
        schedule="1F1B",
        microbatches=_PER_STAGE * model.devices,
        memory_limit=cluster.device.memory,
    )
    return flops(model, batch, depth) / (made.step_seconds * model.devices * PEAK)


PART = Part(
    "Rhino Fig. 8: more GPUs for one GPT, and pipelines alone",
    "Platform M8 as above; platform S1: hosts of one V100S for PCIe, one 100 Gb/s port each. GPT-Medium with "
    f"{_BATCH} sequences whatever the GPUs (the paper does not say; its four would leave GPUs idle), Adam, layers "
    "run again where memory asks for it. Pipelines: batch 64, 1F1B, which is Rhino's schedule, one stage per GPU, "
    f"{_PER_STAGE} microbatches for each. The text gives no numbers. It tells that 8 GPUs split the attention's "
    "variables and keep the others as data parallelism does.",
    _rows,
)
