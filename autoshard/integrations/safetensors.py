"""`save_model`, `save_file` and `load_model` of `safetensors.torch` for parallelised modules.

Files contain whole tensors, as on one device: `safetensors.torch` reads them. All ranks call a function together; the
first rank of the module's mesh writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.api import full_state_dict, load_safetensors
from autoshard.errors import InputError
from autoshard.runtime.full_state import gather_tensors, mesh_of
from autoshard.runtime.rank_agreement import is_first_rank, on_first_rank

try:
    from safetensors import torch as single_device
except ImportError as error:
    raise ImportError("autoshard.integrations.safetensors needs the package safetensors: pip install it.") from error

Filename = str | os.PathLike[str]


def save_model(
    model: nn.Module, filename: Filename, metadata: dict[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Save the whole parameters and persistent buffers of a parallelised module to a file; all ranks call it together.

    Tied tensors are stored once, under the name that `safetensors.torch.save_model` chooses; the metadata has the other
    names.

    Args:
        model: the result of `parallelize`; not a `PipelineModule`.
        filename: the file, on the machine of the first rank.
        metadata: texts to store with the tensors.
        force_contiguous: as for safetensors; whole tensors are contiguous.

    Raises:
        InputError: the model is not parallelised, or is a pipeline, or a tensor is on the meta device.
        AutoshardError: on the other ranks, if the first one cannot write.
    """
    state = full_state_dict(model)
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name in sorted(name for name, value in state.items() if isinstance(value, Tensor)):
        kept = first_names.setdefault(id(state[name]), name)
        if kept != name:
            tied[name] = kept
    texts = {**tied, **(metadata or {})}
    stored = {name: value for name, value in state.items() if name not in tied}
    _write(mesh_of(model), stored, filename, texts or None)


def save_file(tensors: Mapping[str, Tensor], filename: Filename, metadata: dict[str, str] | None = None) -> None:
    """Save whole tensors, given as shards as in `model.state_dict()`, to a file; all ranks call it together.

    A tensor with several names is stored under each of them; `save_model` stores it once.

    Args:
        tensors: the tensors, some of them `DTensor`s, by the same names on all ranks.
        filename, metadata: as for `save_model`.

    Raises:
        InputError: no tensor is a `DTensor`.
        AutoshardError: on the other ranks, if the first one cannot write.
    """
    mesh = next((value.device_mesh for value in tensors.values() if isinstance(value, DTensor)), None)
    if mesh is None:
        raise InputError("no tensor is a DTensor, so that this rank has all of each: call safetensors.torch.save_file.")
    whole = gather_tensors(tensors, keep=is_first_rank(mesh))
    _write(mesh, whole, filename, metadata)


def _write(mesh: DeviceMesh, state: Mapping[str, Any], filename: Filename, metadata: dict[str, str] | None) -> None:
    """Write the file, on the first rank."""
    # Non-tensors are passed to safetensors, whose error names them.
    stored = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in state.items()}
    on_first_rank(mesh, lambda: single_device.save_file(stored, filename, metadata))


def load_model(
    model: nn.Module, filename: Filename, strict: bool = True, device: torch.device | str | None = None
) -> tuple[list[str], list[str]]:
    """Load a parallelised module from a file, in place: `autoshard.load_safetensors` under the name of safetensors.

    Args:
        model: the result of `parallelize`.
        filename, strict, device: as for `autoshard.load_safetensors`.

    Returns:
        The names that only the module has, and those that only the file has.

    Raises:
        InputError: as for `autoshard.load_safetensors`.
    """
    return load_safetensors(model, os.fspath(filename), strict=strict, device=device)
