"""A training step on the mesh against one device, each by its distance from float64 on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.shards import gather_full_tensor
from autoshard.selfcheck.models import Inputs, Model, make_seeded
from autoshard.selfcheck.outcome import CheckOutcome
from autoshard.selfcheck.processes import Processes

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""By element type, a relative distance from float64 that is rounding at any rate: some hundred and two ulps."""
FACTOR = 2.0
"""How many times farther from float64 than one device a mesh may be: sums are taken in another order."""
_SMALL = 1e-3
"""A tensor is compared with the largest of its kind where it is smaller than this share of that."""
ADVICE = "Repeat it alone by --only; if one process gives the same, report the line with versions of torch and driver."

Tensors = dict[str, Tensor]


def fast_links() -> autoshard.Cluster:
    """A cluster with links so fast that even the small models of this check are sharded."""
    cluster = autoshard.Cluster.preset("cpu")
    inside, between = (
        dataclasses.replace(link, bandwidth=1e12, latency=1e-9) for link in (cluster.inside, cluster.between)
    )
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-9)
    return dataclasses.replace(cluster, inside=inside, between=between, device=device)


def copy_model_to(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """A copy of a model and its inputs on a device; those that are floating have the element type."""
    module, inputs = model
    copied = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in inputs.items()}
    return copy.deepcopy(module).to(device, dtype), copied


def step(module: nn.Module, inputs: Inputs) -> dict[str, Tensors]:
    """Train a step without an optimizer: loss, gradients and buffers, whole, on the CPU in float64."""
    loss = module(**inputs)
    loss.backward()
    return {
        "loss": {"loss": exact(loss)},
        "gradients": gradients(module),
        "buffers": {name: exact(buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()},
    }


def gradients(module: nn.Module) -> Tensors:
    """The gradients of a module's parameters, whole."""
    return {name: exact(each.grad) for name, each in module.named_parameters() if each.grad is not None}


def exact(tensor: Tensor) -> Tensor:
    """A whole tensor as plain numbers in float64 on the CPU."""
    tensor = tensor.detach()
    return (gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor).to("cpu", torch.float64)


def distance(found: Mapping[str, Tensors], reference: Mapping[str, Tensors]) -> float:
    """The largest relative difference of two steps; infinite where a tensor is missing or is no number."""
    return max((_distance(found[kind], tensors) for kind, tensors in reference.items() if tensors), default=0.0)


def _distance(found: Tensors, reference: Tensors) -> float:
    if found.keys() != reference.keys():
        return float("inf")
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    worst = 0.0
    for name, expected in reference.items():
        scale = max(float(expected.abs().max()), _SMALL * largest) or 1.0
        difference = float((found[name] - expected).abs().max()) / scale
        worst = max(worst, difference) if difference == difference else float("inf")
    return worst


def compare(
    make: Callable[[int], Model],
    run: Callable[[Model], dict[str, Tensors]],
    processes: Processes,
    dtypes: Mapping[torch.dtype, float] = ROUNDING,
) -> CheckOutcome:
    """Compare what `run` does with a model with what one device does, in every element type.

    The mesh may be `FACTOR` times as far from float64 as one device, plus `ROUNDING`.

    Args:
        make: makes the model for a number of ranks.
        run: is given the model on this rank's device; returns what `step` does, or a part of it.
        processes: of the job.
        dtypes: element types to compute in, and the distance that is rounding in each.
    """
    model = make_seeded(make, processes.size)
    reference = step(*copy_model_to(model, torch.device("cpu"), torch.float64))
    values: dict[str, float] = {}
    ratio, figures = 0.0, []
    for dtype, rounding in dtypes.items():
        found = run(copy_model_to(model, processes.device, dtype))
        alone = step(*copy_model_to(model, processes.device, dtype))
        expected, alone_too = _matching_kinds(found, reference), _matching_kinds(found, alone)
        error, own = distance(found, expected), distance(alone_too, expected)
        name = str(dtype).removeprefix("torch.")
        values |= {name: error, f"{name}, one device": own}
        ratio = max(ratio, error / (FACTOR * own + rounding))
        figures.append(f"{name} {error:.1e} (one device {own:.1e})")
    wrong = not ratio <= 1.0
    return CheckOutcome("wrong" if wrong else "ok", ", ".join(figures), ADVICE if wrong else "", values, ratio)


def _matching_kinds(found: Mapping[str, Tensors], other: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """The kinds of tensors that were found."""
    return {kind: other[kind] for kind in found}


def on_mesh(mesh: DeviceMesh, **options: Any) -> Callable[[Model], dict[str, Tensors]]:
    """What parallelizes a model on a mesh, and trains a step."""

    def run(model: Model) -> dict[str, Tensors]:
        module, inputs = model
        options.setdefault("cluster", fast_links())
        autoshard.parallelize(module, mesh, (), inputs, effort="fast", **options)
        return step(module, inputs)

    return run
