"""Rhino 7.2 and 7.3, Tables 1 and 2 with Fig. 7 and 8: GPTs and mixtures of experts on one and two hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from architectures import Example

import autoshard
from autoshard.errors import BudgetError
from published.clusters import RHINO
from published.models import SEQUENCE, gpt, mixture
from published.part import Part, Row
from published.plans import flops_per_sample, layers

PEAK = 15.6e12
"""Operations per second of a V100 in single precision, by which the paper divides."""

_SECONDS = 120.0  # of one search


@dataclass(frozen=True)
class Model:
    """A row of Table 1 or 2: `build` takes the batch and the depth."""

    name: str
    devices: int
    build: Callable[[int, float], Example]


def _gpt(name: str, devices: int, depth: int, width: int, heads: int) -> Model:
    return Model(name, devices, lambda batch, share: gpt(layers(share, depth), width, heads, batch))


def _mixture(name: str, devices: int, depth: int, width: int, inner: int, experts: int) -> Model:
    return Model(name, devices, lambda batch, share: mixture(layers(share, depth, 2), width, inner, experts, batch))


GPTS = (
    _gpt("GPT-Medium", 1, 24, 1024, 16),
    _gpt("GPT-Large", 2, 24, 1536, 16),
    _gpt("GPT-XL", 4, 24, 2048, 32),
    _gpt("GPT-2.7B", 8, 32, 2560, 32),
    _gpt("GPT-6.7B", 16, 32, 4096, 32),
)
MIXTURES = (
    _mixture("MoE-8E-380M", 1, 8, 768, 6144, 8),
    _mixture("MoE-8E-760M", 2, 16, 768, 6144, 8),
    _mixture("MoE-16E-1.3B", 4, 16, 768, 6144, 16),
    _mixture("MoE-16E-2.4B", 8, 16, 1024, 8192, 16),
    _mixture("MoE-32E-10B", 16, 16, 1536, 12288, 32),
)


def utilisation(model: Model, batch: int, depth: float, *, pipelines: bool) -> float | None:
    """Operations of the model per second of the best plan found, over the peak of all devices; None if nothing fits."""
    module, inputs = model.build(batch, depth)
    try:
        found = autoshard.search(
            module,
            model.devices,
            example_kwargs=inputs,
            cluster=RHINO,
            pipelines=pipelines,
            search=autoshard.Search(effort="fast", time_limit=_SECONDS),
        )
    except BudgetError:
        return None
    assert found.best.seconds is not None, "the best mesh has a plan"
    return flops(model, batch, depth) / (found.best.seconds * model.devices * PEAK)


def flops(model: Model, batch: int, depth: float) -> float:
    """Operations of a training step: those of matrix products, forward and backward, once."""
    return batch * flops_per_sample(model.build(1, depth))


def _full(models: tuple[Model, ...], batch: int, ends: dict[str, float]) -> Callable[[float], Iterator[Row]]:
    """Rows of the models on more than one device, then the best and, where it is published, the worst of them."""

    def rows(depth: float) -> Iterator[Row]:
        found = []
        for model in models[1:]:
            found.append(utilisation(model, batch, depth, pipelines=True))
            yield Row("Rhino Fig. 7", f"{model.name}, {model.devices} GPUs: share of the peak", None, found[-1])
        yield from _ends("Rhino 7.2", "all strategies", found, ends)

    return rows


def _alone(depth: float) -> Iterator[Row]:
    for models, batch, best in ((GPTS[:4], 4, {"highest": 0.681}), (MIXTURES[:4], 8, {"highest": 0.62})):
        found = []
        for model in models:
            found.append(utilisation(model, batch, depth, pipelines=False))
            yield Row(
                "Rhino Fig. 8", f"{model.name}, {model.devices} GPUs, no pipeline: share of the peak", None, found[-1]
            )
        yield from _ends("Rhino 7.3", f"{models[0].name[:3]}, no pipeline, one host", found, best)


def _ends(source: str, what: str, found: list[float | None], ends: dict[str, float]) -> Iterator[Row]:
    known = [one for one in found if one is not None]
    for name, published in ends.items():
        ours = (min if name == "lowest" else max)(known) if known else None
        yield Row(source, f"{what}: {name} share of the peak", published, ours)


_SHARED = (
    f"Platform M8: hosts of eight V100s, one 100 Gb/s port each; full float32, {SEQUENCE} tokens as Alpa's "
    "benchmarks have them (the paper does not say), Adam. Operations are those of matrix products, forward and "
    f"backward, once; {PEAK / 1e12:.1f} TFLOP/s is the peak. Plans are those of `autoshard.search` with all of a "
    "device's 32 GB, and what it finds in two minutes."
)
_SHAPES_DIFFER = (
    "Mixtures of experts: matrices are multiplied at 14 TFLOP/s here, whatever their shape. Those of Table 2 are "
    "small: heads are 48 to 96 wide (those of the GPTs 64 to 128), the model 768 to 1536, and gates, dispatch and "
    "combination have one product for every sequence of 1024 tokens."
)
GPT_PART = Part(
    "Rhino Table 1 and Fig. 7: GPTs, all strategies",
    f"{_SHARED} Batch 64; one GPU alone is left out, since it would have to accumulate gradients.",
    _full(GPTS, 64, {"lowest": 0.54, "highest": 0.759}),
    "The lowest: the paper's range is over 1 to 16 GPUs, and does not say whose share is the lowest. One GPU, which "
    "cannot hold the batch at once, is not among ours.",
)
MIXTURE_PART = Part(
    "Rhino Table 2 and Fig. 7: mixtures of experts, all strategies",
    f"{_SHARED} Batch 256, in groups of one sequence with a capacity of two; experts in every second layer, which "
    "makes the sizes of Table 2; dispatch and combination are products of matrices too, and count; one GPU alone "
    "is left out.",
    _full(MIXTURES, 256, {"highest": 0.551}),
    f"{_SHAPES_DIFFER} The paper does not say whose share is the highest; here the two largest models have it.",
)
ALONE_PART = Part(
    "Rhino Tables 1 and 2, Fig. 8: without pipelines on one host",
    f"{_SHARED} Batch 4 for GPTs and 8 for mixtures of experts.",
    _alone,
    f"{_SHAPES_DIFFER} Adam's update is in no step here: 28 bytes for each parameter, 2 % of the step of MoE-8E-380M.",
)
