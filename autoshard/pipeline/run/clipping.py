"""The norm of the gradients of all stages, and gradients scaled down to one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.errors import InputError
from autoshard.runtime.shards import local_of

_ROUNDING = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds it


@torch.no_grad()
def total_norm(
    gradients: Mapping[int, torch.Tensor],
    parameters: int,
    device_mesh: DeviceMesh,
    norm_type: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the norm of all gradients of a model, whose gradients and shards lie on different ranks.

    Args:
        gradients: that this rank counts, by the index of their parameter in the model.
        parameters: the number of parameters of the model.
        device_mesh: all ranks.
        norm_type: p of the p-norm.
        dtype: of the norms; the same on every rank.

    Returns:
        The norm, on every rank.

    Raises:
        InputError: `norm_type` is negative.
    """
    if not norm_type >= 0:
        raise InputError(f"norm_type={norm_type}: the norm of sharded gradients needs one that is at least 0.")
    # Every rank has the norms of its own shards, of replicas only the first. One reduction per mesh axis sums them up.
    norms = torch.zeros(parameters, dtype=dtype, device=device_mesh.device_type)
    for index, gradient in gradients.items():
        local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
        if local.numel() and _is_first_replica(gradient):
            norms[index] = torch.linalg.vector_norm(local, norm_type, dtype=dtype)
    adds_powers = 0 < norm_type < math.inf
    if adds_powers:
        norms = norms**norm_type
    for axis in range(device_mesh.ndim):
        operation = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(norms, operation, group=device_mesh.get_group(axis))
    if adds_powers:
        norms = norms ** (1 / norm_type)
    return torch.linalg.vector_norm(norms, norm_type)


@torch.no_grad()
def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm`, in place; gradients of a smaller norm stay as they are."""
    factor = (max_norm / (norm + _ROUNDING)).clamp(max=1.0)
    for gradient in gradients:
        (local_of(gradient) if isinstance(gradient, DTensor) else gradient).mul_(factor)


def _is_first_replica(tensor: torch.Tensor) -> bool:
    """Return True if this rank is the first of the ranks that hold the same shard."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
