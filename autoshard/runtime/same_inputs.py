"""Whether all ranks were given the same batch, where each is to pass the whole one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.runtime.rank_agreement import gather_from_mesh, is_alone, ranks_text

_SUMS = 4  # weighted sums that tell one batch of numbers from another
_TOLERANCE = 1e-2  # part of a tensor's norm by which such sums may differ: unlike devices round what they compute
Summary = str | tuple[float, ...]


def check_same_inputs(device_mesh: DeviceMesh, inputs: Mapping[str, torch.Tensor]) -> None:
    """Compare the inputs of a call over all ranks, by few numbers of each.

    Integers are compared exactly, other numbers by weighted sums, so that what ranks have computed may differ by
    rounding.

    Raises:
        InputError: a rank has another batch than the first one, on every rank.
    """
    if is_alone(device_mesh):
        return
    own = {name: _summary(tensor) for name, tensor in inputs.items() if not isinstance(tensor, DTensor)}
    ranks = gather_from_mesh(device_mesh, own)
    first, said = next(iter(ranks.items()))
    for name in own:
        others = [rank for rank, one in ranks.items() if not _is_close(one[name], said[name])]
        if others:
            raise InputError(
                f"the input {name} has other numbers on {ranks_text(others)} than on rank {first}, although "
                'inputs="global" asks every rank for the same whole batch: each would compute with its part of another '
                'one. Where every rank loads samples of its own, as with a DistributedSampler, pass inputs="local" to '
                "parallelize; else give all ranks the same seed."
            )


def _summary(tensor: torch.Tensor) -> Summary:
    """Few numbers that other tensors do not have."""
    flat = tensor.detach().reshape(-1)
    if not flat.is_floating_point():
        plain = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return hashlib.blake2b(plain.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    flat = flat.nan_to_num().cpu().double()
    largest = flat.abs().max().item() if len(flat) else 0.0
    flat = flat / largest if largest else flat  # masks hold the largest numbers that there are: their sums have none
    place = torch.arange(len(flat), dtype=torch.float64)
    sums = (torch.dot(flat, torch.cos(place * (0.7 + number))).item() for number in range(_SUMS))
    return largest, flat.norm().item(), *sums


def _is_close(one: Summary, other: Summary) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    (largest, *sums), (other_largest, norm, *_) = one, other
    same_size = abs(largest - other_largest) <= _TOLERANCE * other_largest
    return same_size and all(
        abs(here - there) <= _TOLERANCE * norm for here, there in zip(sums, other[1:], strict=True)
    )
