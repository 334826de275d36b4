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
"""By dtype, a relative distance from float64 that is always rounding: about a hundred ulps, and two."""
FACTOR = 2.0
"""Times that a mesh may be farther from float64 than one device: it adds in another order."""
# A tensor with smaller values, relative to the largest of its kind, is compared relative to the latter.
_SMALL = 1e-3
ADVICE = "Repeat it alone by --only; if one process gives the same, report the line with versions of torch and driver."

Tensors = dict[str, Tensor]


def fast_links() -> autoshard.Cluster:
    """Return a cluster with links so fast that even the small models of this check are sharded."""
    cluster = autoshard.Cluster.preset("cpu")
    inside, between = (
        dataclasses.replace(link, bandwidth=1e12, latency=1e-9) for link in (cluster.inside, cluster.between)
    )
    # With the real overhead of a kernel, small models are planned whole on every device, and nothing is checked.
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-9)
    return dataclasses.replace(cluster, inside=inside, between=between, device=device)


def copy_model_to(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a copy of a model and its inputs on a device; floating-point inputs are converted to the dtype."""
    module, inputs = model
    copied = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in inputs.items()}
    return copy.deepcopy(module).to(device, dtype), copied


def step(module: nn.Module, inputs: Inputs) -> dict[str, Tensors]:
    """Train a step without an optimizer; return loss, gradients and buffers as full tensors in float64 on the CPU."""
    loss = module(**inputs)
    loss.backward()
    return {
        "loss": {"loss": exact(loss)},
        "gradients": gradients(module),
        "buffers": {name: exact(buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()},
    }


def gradients(module: nn.Module) -> Tensors:
    """Return the gradients of a module's parameters as full tensors."""
    return {name: exact(weight.grad) for name, weight in module.named_parameters() if weight.grad is not None}


def exact(tensor: Tensor) -> Tensor:
    """Return the full tensor in float64 on the CPU."""
    tensor = tensor.detach()
    return (gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor).to("cpu", torch.float64)


def distance(results: Mapping[str, Tensors], reference: Mapping[str, Tensors]) -> float:
    """Return the largest relative difference of two steps; infinite where a tensor is missing or has a NaN.

    Only the kinds of tensors in `results` are compared.
    """
    return max(
        (_distance(tensors, reference[kind]) for kind, tensors in results.items() if reference[kind]), default=0.0
    )


def _distance(results: Tensors, reference: Tensors) -> float:
    if results.keys() != reference.keys():
        # A missing gradient is as wrong as a wrong one.
        return float("inf")
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    worst = 0.0
    for name, expected in reference.items():
        scale = max(float(expected.abs().max()), _SMALL * largest) or 1.0
        difference = float((results[name] - expected).abs().max()) / scale
        # `max` may drop a NaN.
        worst = max(worst, difference) if difference == difference else float("inf")
    return worst


def compare(
    make: Callable[[int], Model],
    run: Callable[[Model], dict[str, Tensors]],
    processes: Processes,
    dtypes: Mapping[torch.dtype, float] = ROUNDING,
) -> CheckOutcome:
    """Compare the step of `run` with that of one device, in every dtype.

    The mesh may be `FACTOR` times as far from float64 as one device, plus `ROUNDING`.

    Args:
        make: returns the model for a number of ranks.
        run: takes the model on this rank's device, and returns the result of `step`, or some kinds of its tensors.
        processes: of the job.
        dtypes: dtypes to compute in, and the distance that is rounding in each.
    """
    model = make_seeded(make, processes.size)
    reference = step(*copy_model_to(model, torch.device("cpu"), torch.float64))
    values: dict[str, float] = {}
    ratio, figures = 0.0, []
    for dtype, rounding in dtypes.items():
        results = run(copy_model_to(model, processes.device, dtype))
        alone = step(*copy_model_to(model, processes.device, dtype))
        error, least = distance(results, reference), distance({kind: alone[kind] for kind in results}, reference)
        name = str(dtype).removeprefix("torch.")
        values |= {name: error, f"{name}, one device": least}
        # Against one device in the same dtype, so that a kernel of low precision is no fault of the mesh.
        ratio = max(ratio, error / (FACTOR * least + rounding))
        figures.append(f"{name} {error:.1e} (one device {least:.1e})")
    # A NaN is wrong, too.
    wrong = not ratio <= 1.0
    return CheckOutcome("wrong" if wrong else "ok", ", ".join(figures), ADVICE if wrong else "", values, ratio)


def on_mesh(mesh: DeviceMesh, **options: Any) -> Callable[[Model], dict[str, Tensors]]:
    """Return a function that parallelizes a model on a mesh and trains a step."""

    def run(model: Model) -> dict[str, Tensors]:
        module, inputs = model
        options.setdefault("cluster", fast_links())
        autoshard.parallelize(module, mesh, (), inputs, search=autoshard.Search(effort="fast"), **options)
        return step(module, inputs)

    return run
