"""Materialization of pipeline stages: every rank draws the numbers that one device draws, and keeps its stages' part.

The random numbers of a parameter depend on all that was drawn before, so every rank runs the initialisers of the whole
model. It does so on one whole tensor at a time, and keeps its part of it, if its stages have one (Rhino 6.3,
distributed initialisation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.materialize import (
    Initializer,
    MetaTensors,
    check_filled,
    initialize,
    is_meta,
    synchronize_random_state,
    target_device,
)
from autoshard.runtime.rank_agreement import gather_from_axis
from autoshard.runtime.shards import fill, gather_full_tensor, set_tensor
from autoshard.runtime.whole_tensors import WholeTensors


def materialize_stages(
    model: nn.Module,
    stages: Sequence[nn.Module],
    device_mesh: DeviceMesh,
    axis: str,
    device: torch.device | str | None = None,
    init: Initializer | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Allocate and initialise the meta tensors of this rank's stages, in place.

    A rank holds its parts of its stages' parameters, and one whole parameter at a time besides, as
    `autoshard.materialize` says. Parameters of the stages stay the same objects. All ranks of the mesh call this
    together; initialisers that read a tensor of another rank get it from there. A parameter that no stage has is drawn,
    too, and held until the end.

    Args:
        model: the whole model, on the meta device; it stays there, but for tensors that it shares with stages. Tensors
            on another device count as initialised, and so do those that a stage of some rank has on another device.
        stages: those of this rank. Their parameters, plain ones or `DTensor`s, have the names of the model's.
        device_mesh: the whole mesh.
        axis: the mesh axis along which ranks have different stages.
        device: of the new tensors; by default the mesh's device type.
        init: as for `autoshard.materialize`, of submodules of `model`.
        names: of the tensors of the model to initialise, where they are on the meta device; by default all.

    Raises:
        InputError: the device is of another type than the mesh, or a tensor was not initialised.

    Source: Rhino 6.3.
    """
    device = target_device(device_mesh, device)
    work = MetaTensors.of(model, _uninitialized_names(model, stages, device_mesh, axis, names))
    with torch.no_grad():
        parts = StageParts(_stage_tensors(work, stages, device), device_mesh, axis, device)
        synchronize_random_state(device_mesh, device)
        # From here on all ranks draw the same numbers.
        with WholeTensors(parts) as mode:
            initialize(model, init, work)
        left = list(work.finish_parameters(model, mode.touched, parts))
        for name, buffer in work.buffers.items():
            current = model.get_buffer(name)
            if current is not buffer:
                # The model keeps its meta buffer, the stages get the new one.
                set_tensor(model, name, buffer)
                for stage in stages:
                    if name in dict(stage.named_buffers(remove_duplicate=False)):
                        set_tensor(stage, name, current.to(device))
            elif buffer not in mode.touched and buffer.numel():
                left.append(name)
    check_filled(left)


@dataclass(frozen=True, slots=True)
class _ModelTensor:
    """A parameter or buffer of the model.

    Attributes:
        name: its first name.
        here: the tensors of this rank's stages for it: none, one, or several where stages of one rank share it.
    """

    name: str
    here: tuple[Tensor, ...]


def _uninitialized_names(
    model: nn.Module, stages: Sequence[nn.Module], device_mesh: DeviceMesh, axis: str, names: Collection[str] | None
) -> frozenset[str]:
    """Return the names of the model's tensors, or those of `names`, of which no stage on any rank has numbers."""
    here = {name for stage in stages for name, tensor in _named_tensors(stage) if not is_meta(tensor)}
    filled = set[str]().union(*gather_from_axis(device_mesh, axis, here))
    # By tensors, not names: a tied tensor is filled under all its names.
    filled_tensors = {tensor for name, tensor in _named_tensors(model) if name in filled}
    return frozenset(
        name
        for name, tensor in _named_tensors(model)
        if (names is None or name in names) and tensor not in filled_tensors
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _stage_tensors(work: MetaTensors, stages: Sequence[nn.Module], device: torch.device) -> dict[Tensor, _ModelTensor]:
    """Allocate the meta tensors of stages, and return them by the model's meta tensors."""
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, tensor in (*work.parameters.items(), *work.buffers.items()):
        names[tensor].append(name)
    wanted_names = {*work.parameters, *work.buffers}
    here: dict[str, list[Tensor]] = defaultdict(list)
    for stage in stages:
        held = MetaTensors.of(stage, wanted_names)
        held.allocate(stage, device)
        for name, tensor in (*held.parameters.items(), *held.buffers.items()):
            here[name].append(tensor)
    return {
        tensor: _ModelTensor(aliases[0], tuple(dict.fromkeys(part for name in aliases for part in here.get(name, ()))))
        for tensor, aliases in names.items()
    }


class StageParts:
    """The tensors of a model, of which this rank has those of its stages; the group is that along the stages' axis."""

    def __init__(
        self, tensors: dict[Tensor, _ModelTensor], device_mesh: DeviceMesh, axis: str, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._group = device_mesh.get_group(axis)
        self._device_sample = torch.empty(0, device=device)
        # The whole tensors of those that no stage has.
        self._stageless: dict[Tensor, Tensor] = {}
        names_here = {held.name for held in tensors.values() if held.here}
        names_of_ranks = list(enumerate(gather_from_axis(device_mesh, axis, names_here)))
        # Of several ranks that have a tensor, the first sends it: it is written last here.
        self._owner = {name: place for place, names in reversed(names_of_ranks) for name in names}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._tensors

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        held = self._tensors[tensor]
        # Nothing is sent for a tensor that no function has written to: its numbers do not matter.
        if written and held.name not in self._owner:
            return self._stageless.pop(tensor)
        if written and held.here:
            value = gather_full_tensor(held.here[0])
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device_sample.device)
        if not written:
            return value
        dist.broadcast(value, group=self._group, group_src=self._owner[held.name])
        return value

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        held = self._tensors[tensor]
        for part in held.here:
            fill(part, whole)
        if held.name not in self._owner:
            self._stageless[tensor] = whole

    def device_sample(self, tensor: Tensor) -> Tensor:
        return self._device_sample
