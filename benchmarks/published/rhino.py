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

_SECONDS = 60.0  # of one search


@dataclass(frozen=True)
class _Model:
    """A row of Table 1 or 2: `build` takes the batch and the depth."""

    name: str
    devices: int
    build: Callable[[int, float], Example]


def _gpt(name: str, devices: int, depth: int, width: int, heads: int) -> _Model:
    return _Model(name, devices, lambda batch, share: gpt(layers(share, depth), width, heads, batch))


def _mixture(name: str, devices: int, depth: int, width: int, inner: int, experts: int) -> _Model:
    return _Model(name, devices, lambda batch, share: mixture(layers(share, depth, 2), width, inner, experts, batch))


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


def utilisation(model: _Model, batch: int, depth: float, *, pipelines: bool) -> float | None:
    """Operations of the model per second of the best plan found, over the peak of all devices; None if nothing fits."""
    module, inputs = model.build(batch, depth)
    try:
        found = autoshard.search(
            module,
            model.devices,
            example_kwargs=inputs,
            cluster=RHINO,
            pipeline=pipelines,
            effort="fast",
            time_limit=_SECONDS,
        )
    except BudgetError:
        return None
    flops = batch * flops_per_sample(model.build(1, depth))
    assert found.best.seconds is not None, "the best mesh has a plan"
    return flops / (found.best.seconds * model.devices * PEAK)


def _full(models: tuple[_Model, ...], batch: int, ends: dict[str, float]) -> Callable[[float], Iterator[Row]]:
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
    "device's 32 GB."
)
_DIFFERS = (
    "Shares of the peak are higher here than measured ones: products of matrices run at the data sheet's rate, and "
    "nothing but memory and starts of kernels is added. V100s were measured at 14 of 15.7 TFLOP/s on large "
    "products (github.com/mli/transformers-benchmarks), a tenth less; smaller products, attention and what a "
    "framework adds are the rest. A rate taken from these very rows would be a fit."
)
GPT_PART = Part(
    "Rhino Table 1 and Fig. 7: GPTs, all strategies",
    f"{_SHARED} Batch 64; one GPU alone is left out, since it would have to accumulate gradients.",
    _full(GPTS, 64, {"lowest": 0.54, "highest": 0.759}),
    _DIFFERS,
)
MIXTURE_PART = Part(
    "Rhino Table 2 and Fig. 7: mixtures of experts, all strategies",
    f"{_SHARED} Batch 256, in groups of one sequence with a capacity of two; experts in every second layer, which "
    "makes the sizes of Table 2; dispatch and combination are products of matrices too, and count; one GPU alone "
    "is left out.",
    _full(MIXTURES, 256, {"highest": 0.551}),
    _DIFFERS,
)
ALONE_PART = Part(
    "Rhino Tables 1 and 2, Fig. 8: without pipelines on one host",
    f"{_SHARED} Batch 4 for GPTs and 8 for mixtures of experts.",
    _alone,
    _DIFFERS,
)
