"""Whale 5.2, Fig. 17 and 18: V100s beside P100s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from architectures import Example

from autoshard.cluster.worker_shares import shares, workers_of
from published import models
from published.clusters import all_like, mixed
from published.part import Part, Row
from published.plans import at_speeds, data_parallel, pipeline

_STAGES, _MICROBATCHES = 4, 16
_DATA: dict[str, tuple[Callable[[int, float], Example], int]] = {
    "ResNet-50": (functools.partial(models.image_classifier, 1000), 128),
    "GNMT": (models.gnmt, 256),
    "BERT-Large": (models.bert, 32),
}


def _rows(depth: float) -> Iterator[Row]:
    for name, (build, samples) in _DATA.items():
        ratio = _data_parallel(build, samples, depth)
        yield Row("Whale Fig. 17", f"{name}, 8 V100 + 8 P100: batch in shares over equal batch", 1.35, ratio)
    for name, build in (("BERT-Large", models.bert), ("T5-Large", models.t5_large)):
        yield Row(
            "Whale Fig. 18", f"{name}, 4 V100 + 4 P100: stages by speed over equal ones", 1.2, _stages(build, depth)
        )


def _data_parallel(build: Callable[[int, float], Example], samples: int, depth: float) -> float:
    """Seconds with equal shares over those with shares by speed; all wait for the slowest kind of device."""
    each = 8
    cluster = mixed(each)
    mesh = {"hosts": 2, "gpus": each}
    taken = shares(2 * each * samples, workers_of(cluster, range(2 * each)), lambda _: 0)

    def step(rank: int, share: int) -> float:
        plan = data_parallel(build(2 * each * share, depth), mesh, all_like(cluster, rank))
        assert plan.memory.peak <= cluster.device_of(rank).memory, "Algorithm 1 has nothing to shift"
        return plan.step_seconds

    equal = step(each, samples)
    return equal / max(step(0, max(taken[:each])), step(each, max(taken[each:])))


def _stages(build: Callable[[int, float], Example], depth: float) -> float:
    """Seconds of a pipeline of equal stages over those of stages in proportion to speed."""
    each, samples = 4, 4  # GPUs of a kind; sequences of a microbatch on a device
    cluster = mixed(each)
    mesh = {"pp": _STAGES, "dp": 2 * each // _STAGES}
    batch = samples * mesh["dp"] * _MICROBATCHES
    options = {"schedule": "1F1B", "microbatches": _MICROBATCHES, "recompute": "none"}
    equal = pipeline(build(batch, depth), mesh, all_like(cluster, each), **options)
    fast = workers_of(cluster, [0])[0].speed / workers_of(cluster, [each])[0].speed
    by_speed = pipeline(build(batch, depth), mesh, cluster, **options)
    return at_speeds(equal, [fast] * (_STAGES // 2) + [1.0] * (_STAGES // 2)) / by_speed.step_seconds


PART = Part(
    "Whale 5.2: devices of two kinds",
    "float32, Adam, 50 Gb/s between the host of V100s and that of P100s. Fig. 17: per GPU, with equal shares, 128 "
    "images, 256 pairs of sentences of 50 tokens, or 32 sequences of 128 tokens (the paper does not say): the "
    "largest powers of two that 16 GB hold. Speeds are the data sheets': a V100 has 1.48 times the operations of a "
    "P100, and 1.23 times the bandwidth of memory. A step of data parallelism is that of the kind of device that "
    "needs longer, all reducing their gradients together. The text says 1.3 to 1.4 for all three models, of which "
    "1.35 is the middle. Fig. 18, about 1.2 for both models in the text: 4 stages of 2 replicas, 4 sequences in a "
    f"microbatch of a GPU, {_MICROBATCHES} microbatches, 1F1B; the equal stages run on the same devices.",
    _rows,
    "Fig. 17: at a speed of 1.48 no shares gain more than (1 + 1.48) / 2 = 1.24; the published gains need devices "
    "that are 1.6 to 1.8 times as fast. The data sheet of the P100 for PCIe, which the paper may have had, says 9.3 "
    "TFLOP/s: 1.69 times.",
)
