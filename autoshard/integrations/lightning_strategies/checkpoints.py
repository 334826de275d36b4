"""Whole and sharded checkpoints of parallelised modules and their optimizers, in Lightning's formats.

Lightning loads whole checkpoints with torch's `broadcast_from_rank0`, which puts wrong numbers into strided shards.
Here every rank maps the file into memory and reads only its own parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoshard.errors import InputError
from autoshard.runtime.checkpoint import checkpointable
from autoshard.runtime.shards import cut, wrap_like
from autoshard.specs.spec import Spec

METADATA = "meta.pt"
"""The file of a sharded checkpoint with everything except modules and optimizers."""


def save_sharded(path: Path, state: Mapping[str, Any], module: nn.Module, first_rank: bool) -> None:
    """Write a folder with this rank's shards of modules and optimizers, and the other values; all ranks call it.

    Args:
        path: the folder, the same on all ranks.
        state: modules, optimizers, and values.
        module: the module that the optimizers train.
        first_rank: True on the rank that writes the other values.
    """
    options = StateDictOptions(cpu_offload=True)
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            tensors[name] = checkpointable(get_model_state_dict(value, options=options))
        elif isinstance(value, Optimizer):
            tensors[name] = checkpointable(get_optimizer_state_dict(module, value, options=options))
        else:
            values[name] = value.state_dict() if hasattr(value, "state_dict") else value
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    save(tensors, checkpoint_id=path)
    if first_rank:
        torch.save(values, path / METADATA)


def read_whole(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the contents of a checkpoint file, with tensors mapped into memory and read when used."""
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    return checkpoint


def load_whole_optimizer(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer of parallelised parameters from a whole state, saved by one device or by all ranks.

    Args:
        module: the module that the optimizer trains.
        optimizer: an optimizer with the same parameter groups as the saved one.
        state: the `state_dict()` of the saved optimizer, with parameters given by number or by name in the module.

    Raises:
        InputError: the groups differ.
    """
    saved, current = state["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, current)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"the checkpoint has the state of an optimizer whose groups hold {sizes[0]} parameters; those of this "
            f"{type(optimizer).__name__} hold {sizes[1]}. Make the optimizer as it was made when it was saved."
        )
    names = {parameter: name for name, parameter in module.named_parameters()}
    numbered: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for saved_group, group in zip(saved, current, strict=True):
        by_name = any(isinstance(key, str) for key in saved_group["params"])
        keys = [names[parameter] for parameter in group["params"]] if by_name else saved_group["params"]
        first = sum((len(earlier["params"]) for earlier in groups), start=0)
        numbers = range(first, first + len(keys))
        groups.append({**saved_group, "params": list(numbers)})
        for number, key, parameter in zip(numbers, keys, group["params"], strict=True):
            if key in state["state"]:
                numbered[number] = {name: _shard(value, parameter) for name, value in state["state"][key].items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _shard(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of a tensor with the parameter's shape; anything else unchanged."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    local = cut(value.to(parameter.dtype), parameter.device_mesh, Spec(tuple(parameter.placements)))
    return wrap_like(local.to(parameter.device_mesh.device_type), parameter)
