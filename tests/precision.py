"""One training step in bfloat16 on a mesh and on one device, each against one device in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

import autoshard
from autoshard.tools.verify.float64 import Float64Mode
from tests import models
from tests.runtime.meshes import simulated_mesh
from tests.training import PLANNING_SECONDS, fast_links, held_by_ranks, loss_of, outputs_of, relative_difference

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FACTOR = 2.0
"""How much farther from float64 a mesh may be than one device is, both in bfloat16: roundings fall elsewhere."""

BFLOAT16_ROUNDING = float(torch.finfo(torch.bfloat16).eps)
"""What a single rounding may do; a distance below it is luck on either side."""

NamedTensors = dict[str, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Distances:
    """How far loss and gradients in bfloat16 are from those in float64, relative to the largest element."""

    loss: float
    gradients: float


def distances(name: str, mesh: Mapping[str, int]) -> tuple[Distances, Distances]:
    """Distances of a mesh and of one device, from the same float32 parameters and the same batch."""
    module, inputs = models.ZOO[name](dtype=torch.float32)
    with Float64Mode():
        exact = _step(copy.deepcopy(module).double(), _cast(inputs, torch.float64))
    alone = _step(CastModule(copy.deepcopy(module)), inputs)
    with simulated_mesh(**mesh) as device_mesh:
        autoshard.parallelize(
            module,
            device_mesh,
            (),
            inputs,
            cluster=fast_links(),
            search=autoshard.Search(time_limit=PLANNING_SECONDS),
            mp_policy=BFLOAT16,
        )
        ours = _step(module, inputs)
    return _distances(ours, exact), _distances(alone, exact)


class CastModule(nn.Module):
    """A module that is called with its parameters and inputs in bfloat16; gradients go to those that it has.

    Args:
        inner: the module.
        dtype: in the place of bfloat16.
    """

    def __init__(self, inner: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, **inputs: Any) -> Any:
        casts = {
            parameter: parameter.to(self.dtype) if parameter.is_floating_point() else parameter
            for parameter in self.inner.parameters()
        }
        lowered = {
            f"{path}.{name}" if path else name: casts[parameter]
            for path, part in self.inner.named_modules()
            for name, parameter in part.named_parameters(recurse=False)
        }
        # `tie_weights` would put casts into a module that stands in two places twice, and leave one there.
        inputs = _cast(inputs, self.dtype)
        return torch.func.functional_call(self.inner, lowered, (), inputs, tie_weights=False)


def _cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        dict(inputs),
    )


def _step(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[NamedTensors, NamedTensors]:
    """Loss and gradients as every rank has them."""
    loss = loss_of(outputs_of(module(**inputs)))
    loss.backward()
    gradients = {
        name.removeprefix("inner."): held_by_ranks(parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": held_by_ranks(loss.detach())}, gradients


def _distances(ours: tuple[NamedTensors, NamedTensors], exact: tuple[NamedTensors, NamedTensors]) -> Distances:
    return Distances(*(relative_difference(found, reference) for found, reference in zip(ours, exact, strict=True)))
