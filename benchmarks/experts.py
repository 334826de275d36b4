"""Plans that experts would make: schemes over mesh axes, forced by hints on parameters and activations.

An expert's plan is made by the planner, which then has nothing left to choose: hints place every parameter, and
`autoshard.shard`, hung behind every layer by a forward hook, places every activation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from architectures import Example
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import autoshard


@dataclass(frozen=True)
class Roles:
    """What the modules of an architecture are to an expert: globs over their paths.

    Attributes:
        column: linear layers whose outputs are split, with the placement of the weight and the split factor.
        row: linear layers whose inputs are split, with the placement of the weight.
        vocabulary: embeddings and heads, split by vocabulary or classes.
        experts: parameters with one slice for every expert.
    """

    column: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    row: Mapping[str, int] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scheme:
    """How an expert lays out a model over one mesh axis of `size` among all `devices`."""

    name: str
    roles: Roles
    size: int
    devices: int
    batch: int

    def parameter(self, name: str, shape: torch.Size) -> Placement:
        """Where a parameter lies."""
        path, _, kind = name.rpartition(".")
        roles = self.roles
        if self.name == "ZeRO-3":
            return next((Shard(dim) for dim, length in enumerate(shape) if length % self.devices == 0), Replicate())
        if self.name == "expert" and _matches(name, roles.experts):
            return Shard(0)
        if self.name == "split classifier" and _matches(path, roles.vocabulary):
            return Shard(0)
        if not self.name.startswith("Megatron"):
            return Replicate()
        if _matches(path, roles.vocabulary) and shape[0] % self.size == 0:
            return Shard(0)
        for glob, (dim, factor) in roles.column.items():
            if fnmatchcase(path, glob):
                return _shard(dim if kind == "weight" else 0, factor)
        for glob, dim in roles.row.items():
            if fnmatchcase(path, glob) and kind == "weight":
                return Shard(dim)
        return Replicate()

    def activation(self, path: str, module: nn.Module, shape: torch.Size) -> Placement | None:
        """Where the output of a layer lies; None where the expert has no opinion."""
        if not self.name.startswith("Megatron"):
            if self.name == "split classifier" and _matches(path, self.roles.vocabulary):
                return Shard(1)
            return Shard(0) if shape[0] == self.batch and self.batch % self.size == 0 else None
        for glob, (_, factor) in self.roles.column.items():
            if fnmatchcase(path, glob):
                return _shard(len(shape) - 1, factor)
        if isinstance(module, nn.Linear) and _matches(path, self.roles.vocabulary):
            return Shard(len(shape) - 1)
        sequence = self.name.endswith("SP") and len(shape) == 3 and shape[0] == self.batch
        return Shard(1) if sequence else Replicate()


def _shard(dim: int, factor: int) -> Placement:
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


def expert_plan(
    example: Example,
    batch: int,
    roles: Roles,
    schemes: tuple[str, ...],
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
) -> autoshard.ShardingPlan:
    """The plan of one training call that follows one scheme on every mesh axis; `batch` is how many samples it has."""
    module, inputs = example
    devices = math.prod(mesh.values())
    over = [Scheme(name, roles, size, devices, batch) for name, size in zip(schemes, mesh.values(), strict=True)]
    hints = {
        name: tuple(scheme.parameter(name, parameter.shape) for scheme in over)
        for name, parameter in module.named_parameters()
    }
    for path, part in module.named_modules():
        if not list(part.children()) and list(part.parameters(recurse=False)):
            part.register_forward_hook(functools.partial(_pin, path, over))
    return autoshard.plan(module, mesh, (), inputs, output_placements="planned", hints=hints, **options)


def _pin(path: str, schemes: list[Scheme], module: nn.Module, inputs: object, output: object) -> object:
    if not isinstance(output, torch.Tensor) or output.ndim < 2:
        return output
    placements = [scheme.activation(path, module, output.shape) for scheme in schemes]
    return output if None in placements else autoshard.shard(output, *placements)
