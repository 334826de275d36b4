"""Pipeline stages become real: every rank draws what one device draws, and keeps what its stages hold.

Which random numbers a parameter gets depends on all that was drawn before, so every rank runs the initialisers of the
whole model. It does so on one whole tensor at a time, keeps this rank's part of it, if its stages have one, and lets
the rest go (Rhino 6.3, distributed initialisation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.materialize import (
    Initializer,
    MetaTensors,
    check_filled,
    initialize,
    is_meta,
    set_buffer,
    synchronize_random_state,
    target_device,
)
from autoshard.runtime.rank_agreement import gather_from_axis
from autoshard.runtime.shards import gather_full_tensor
from autoshard.runtime.whole_tensors import WholeTensors, fill


def materialize_stages(
    model: nn.Module,
    stages: Sequence[nn.Module],
    device_mesh: DeviceMesh,
    axis: str,
    device: torch.device | str | None = None,
    init: Initializer | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Allocate and initialise what this rank's stages have on the meta device, in place.

    A rank holds its parts of its stages' parameters, and one whole parameter at a time besides, as
    `autoshard.materialize` says. Parameters of the stages stay the same objects. All ranks of the mesh call this
    together; initialisers that read what another rank holds get it from there. A parameter that no stage has is drawn
    too, and held until all is done.

    Args:
        model: the whole model, on the meta device; it stays there, but for what it shares with stages. What is on
            another device counts as initialised, and so does what a stage of some rank has on another device.
        stages: those of this rank. Their parameters, plain ones or `DTensor`s, have the names of the model's.
        device_mesh: the whole mesh.
        axis: the mesh axis along which ranks have different stages.
        device: where to; by default the mesh's device type.
        init: as for `autoshard.materialize`, of submodules of `model`.
        names: of what of the model is to be initialised, where it is on the meta device; by default all.

    Raises:
        InputError: the device is of another type than the mesh; or something has not been initialised.

    Source: Rhino 6.3.
    """
    device = target_device(device_mesh, device)
    work = MetaTensors.of(model, _uninitialized_names(model, stages, device_mesh, axis, names))
    with torch.no_grad():
        parts = StageParts(_stage_tensors(work, stages, device), device_mesh, axis, device)
        synchronize_random_state(device_mesh, device)
        with WholeTensors(parts) as mode:
            initialize(model, init, work)
        left = list(work.finish_parameters(model, mode.touched, parts))
        for name, buffer in work.buffers.items():
            now = model.get_buffer(name)
            if now is not buffer:
                set_buffer(model, name, buffer)
                _replace_buffer(stages, name, now.to(device))
            elif buffer not in mode.touched and buffer.numel():
                left.append(name)
    check_filled(left)


@dataclass(frozen=True, slots=True)
class _ModelTensor:
    """A parameter or buffer of the model.

    Attributes:
        name: its first one.
        here: what this rank's stages have of it: none, one, or several where stages of one rank share it.
    """

    name: str
    here: tuple[Tensor, ...]


def _uninitialized_names(
    model: nn.Module, stages: Sequence[nn.Module], device_mesh: DeviceMesh, axis: str, names: Collection[str] | None
) -> frozenset[str]:
    """Those names of the model's tensors, or of all, that no stage of any rank along the axis has numbers of."""
    here = {name for stage in stages for name, tensor in _named_tensors(stage) if not is_meta(tensor)}
    filled = set[str]().union(*gather_from_axis(device_mesh, axis, here))
    known = {tensor for name, tensor in _named_tensors(model) if name in filled}
    return frozenset(
        name for name, tensor in _named_tensors(model) if (names is None or name in names) and tensor not in known
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _stage_tensors(work: MetaTensors, stages: Sequence[nn.Module], device: torch.device) -> dict[Tensor, _ModelTensor]:
    """What stages have of each of the model's tensors that are on the meta device, with memory on `device`."""
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, tensor in (*work.parameters.items(), *work.buffers.items()):
        names[tensor].append(name)
    known = {*work.parameters, *work.buffers}
    here: dict[str, list[Tensor]] = defaultdict(list)
    for stage in stages:
        own = MetaTensors.of(stage, known)
        own.allocate(stage, device)
        for name, tensor in (*own.parameters.items(), *own.buffers.items()):
            here[name].append(tensor)
    return {
        tensor: _ModelTensor(some[0], tuple(dict.fromkeys(one for name in some for one in here.get(name, ()))))
        for tensor, some in names.items()
    }


def _replace_buffer(stages: Sequence[nn.Module], name: str, value: Tensor) -> None:
    for stage in stages:
        if name in dict(stage.named_buffers(remove_duplicate=False)):
            set_buffer(stage, name, value)


class StageParts:
    """A model's tensors, of which this rank has what its stages hold.

    Args:
        held: every tensor of the model, and what of it is here.
        device_mesh, axis: the mesh, and the axis along which ranks hold different ones.
        device: of whole tensors.
    """

    def __init__(
        self, held: dict[Tensor, _ModelTensor], device_mesh: DeviceMesh, axis: str, device: torch.device
    ) -> None:
        self._tensors = held
        self._group = device_mesh.get_group(axis)
        self._device_sample = torch.empty(0, device=device)
        self._stageless: dict[Tensor, Tensor] = {}  # the whole tensors of what no stage has
        told = gather_from_axis(device_mesh, axis, {one.name for one in held.values() if one.here})
        self._owner = {name: place for place, names in reversed(list(enumerate(told))) for name in names}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._tensors

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        held = self._tensors[tensor]
        if not written:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device_sample.device)
        if held.name not in self._owner:
            return self._stageless.pop(tensor)
        if held.here:
            value = _whole_copy(held.here[0])
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device_sample.device)
        dist.broadcast(value, group=self._group, group_src=self._owner[held.name])
        return value

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        held = self._tensors[tensor]
        for one in held.here:
            fill(one, whole)
        if held.name not in self._owner:
            self._stageless[tensor] = whole

    def device_sample(self, tensor: Tensor) -> Tensor:
        return self._device_sample


def _whole_copy(tensor: Tensor) -> Tensor:
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach().clone()
