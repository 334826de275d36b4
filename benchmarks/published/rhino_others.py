"""Rhino 7.4, Tables 3 and 4 with Fig. 9: other models on one host."""

from __future__ import annotations

from collections.abc import Iterator

from architectures import Example, dna_bert

from published import models
from published.clusters import RHINO
from published.models import unfused
from published.part import Part, Row
from published.plans import flops_per_sample, free, layers

_MEMORY = RHINO.device.memory


def _rows(depth: float) -> Iterator[Row]:
    for name, samples, fewest, build in (
        ("VGG19", 128, 4, models.vgg19_million),
        ("DNABert", 32, 1, lambda batch: _dna(batch, depth)),
        ("UNet", 16, 1, models.denoiser),
    ):
        few, many = (_step(build(samples * devices), devices) for devices in (fewest, 8))
        what = f"{name}, samples per second and GPU, 8 GPUs over {fewest}"
        yield Row("Rhino Fig. 9", what, 1.0, few / many)
    wide = {
        1: ("WR-1.3B", lambda batch: models.wide(320, 2, _blocks(depth, 3, 4, 6, 3), batch)),
        2: ("WR-2.6B", lambda batch: models.wide(448, 2, _blocks(depth, 3, 4, 6, 3), batch)),
        4: ("WR-6B", lambda batch: models.wide(640, 2, _blocks(depth, 3, 4, 6, 3), batch)),
        8: ("WR-12B", lambda batch: models.wide(320, 12, _blocks(depth, 3, 4, 23, 3), batch)),
    }
    rates = {}
    for devices, (name, build) in wide.items():
        rates[devices] = 4 * flops_per_sample(build(1)) / _step(build(4), devices) / devices
        if devices > 1:
            what = f"{name}, operations per second and GPU, {devices} GPUs over WR-1.3B on 1"
            yield Row("Rhino Fig. 9", what, 1.0, rates[devices] / rates[1])


def _step(example: Example, devices: int) -> float:
    return free(example, {"gpus": devices}, RHINO, memory_limit=_MEMORY).step_seconds


def _dna(batch: int, depth: float) -> Example:
    module, inputs = dna_bert(layers(depth, 12), batch, sequence=512)
    return unfused(module.float()), inputs


def _blocks(depth: float, *published: int) -> tuple[int, ...]:
    return tuple(layers(depth, count) for count in published)


PART = Part(
    "Rhino Tables 3 and 4, Fig. 9: VGG-19 with a million classes, DNABERT, a U-Net, Wide-ResNets",
    "One host of V100s, float32, Adam, all of a device's 32 GB. The batch grows with the GPUs, but is 4 for "
    "Wide-ResNets, which grow themselves. Parameters here and in the paper, in millions: VGG-19 4237 and 4200, "
    "DNABERT 89 and 162 (12 layers of BERT-base on 512 tokens; the paper's has convolutions too), the U-Net 29 and "
    "33 (64 by 64 latents, 160, 320 and 640 channels), Wide-ResNets, widened in their 3 by 3 convolutions as Alpa's "
    "of these channels are, 1005, 1965, 4000 and 9549, and 1300, 2600, 6000 and 12000; group norms stand in these "
    "for batch norms. The text says “near linear” of all, here 1. VGG-19 is compared with 4 GPUs, the fewest that "
    "hold it with Adam.",
    _rows,
)
