"""Whale 5.1.1 and 5.1.2, Fig. 11 and 12: pipelines, and pipelines in replicas."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from published.clusters import PER_HOST, WHALE
from published.models import bert
from published.part import Part, Row
from published.plans import pipeline

_SAMPLES = 8  # of a microbatch and replica
_PER_STAGE = 4  # microbatches


def _rows(depth: float) -> Iterator[Row]:
    for stages, published in ((4, 1.45), (8, 1.14)):
        gpipe = _planned(depth, stages, 1, "GPipe", "full")
        whale = _planned(depth, stages, 1, "1F1B", "none")
        ratio = gpipe.step_seconds / whale.step_seconds
        yield Row("Whale Fig. 11", f"BERT-Large, 1F1B over GPipe, {stages} stages", published, ratio)
    for devices in (8, 32):
        # The batch is the same for all numbers of stages, so that steps compare as throughputs do.
        steps = {
            stages: _planned(depth, stages, devices // stages, "1F1B", "none").step_seconds for stages in (2, 4, 8)
        }
        what = f"BERT-Large, {devices} GPUs, throughput of"
        yield Row("Whale Fig. 12", f"{what} 4 stages over 2", 1.0, steps[2] / steps[4])
        yield Row("Whale Fig. 12", f"{what} 8 stages over 2", None, steps[2] / steps[8])


def _planned(depth: float, stages: int, replicas: int, schedule: str, recompute: str) -> PipelinePlan:
    microbatches = _PER_STAGE * stages
    hosts = max(1, replicas * stages // PER_HOST)
    replicated = {"hosts": hosts, "dp": replicas // hosts}
    mesh = {name: size for name, size in {**replicated, "pp": stages}.items() if size > 1}
    batch = _SAMPLES * replicas * microbatches
    return pipeline(
        bert(batch, depth),
        mesh,
        WHALE,
        schedule=schedule,
        microbatches=microbatches,
        recompute=recompute,
    )


PART = Part(
    "Whale 5.1.1 and 5.1.2: BERT-Large in a pipeline, alone and in replicas",
    f"{_SAMPLES} sequences of 128 tokens in a microbatch of one replica, {_PER_STAGE} microbatches for every stage "
    "(the paper does not say), float32, Adam; a replica of the pipeline inside a host, as is Whale's default, "
    "and gradients all-reduced inside hosts first. "
    "GPipe runs the forward pass again in the backward pass, as its paper has it, and Whale's pipeline does not: "
    "with equal numbers of microbatches both orders are idle equally long. Of Fig. 12, the text says that 2 and 4 "
    "stages do equally well, and 8 worse.",
    _rows,
)
