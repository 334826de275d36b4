"""Checkpoints of sharded modules: strided shards in `torch.distributed.checkpoint`, whole tensors in `load_state_dict`.

`torch.distributed.checkpoint` describes the local tensor of a `DTensor` as one stretch of the global tensor. Of a
strided shard that is wrong: it is several. A `DTensor` lets its local tensor speak for itself, however, so local
tensors are given the methods of that protocol, which tell every stretch apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime.blocks import ShardBlock, blocks_of
from autoshard.runtime.shards import coordinate_of, cut, distribute, local_of, set_parameter, wrap_like
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import Spec, split_factor_of

Target = TypeVar("Target")


def checkpointable(target: Target) -> Target:
    """Make strided shards known to `torch.distributed.checkpoint`.

    The `state_dict()` of a parallelised module is so already, and that of an optimizer of its parameters from the
    first step on (`torch.distributed.checkpoint.state_dict` takes one of its own where there was none). Whatever else
    holds `DTensor`s, such as averages of weights, is made so by this function, before loading as before saving: without
    it torch refuses to save a strided shard, and loads wrong numbers into it.

    Args:
        target: a state dict, nested or not, whose `DTensor`s may lie anyhow; or an optimizer, whose `state_dict()` will
            be made so from now on.

    Returns:
        `target` itself.
    """
    if isinstance(target, Optimizer):
        target.register_state_dict_post_hook(_after_optimizer_state_dict)
        return target
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, DTensor):
            _attach_protocol(leaf)
    return target


def install_hooks(module: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a module with `DTensor` parameters work with any checkpoint.

    * What `state_dict()` returns can be saved and loaded by `torch.distributed.checkpoint`, strided shards included.
    * `load_state_dict` takes whole tensors, the same on every rank, of which every rank keeps its part without
      communication, and `DTensor`s placed in another way. With `assign=True` parameters may be on the meta device.
    * Tied parameters stay tied, with `assign=True` too.
    * What torch would load wrongly into strided shards is refused.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    loading = _LoadHooks(tuple(tuple(tied) for tied in names.values() if len(tied) > 1))
    module.register_state_dict_post_hook(_after_state_dict)
    module.register_load_state_dict_pre_hook(loading.before)
    module.register_load_state_dict_post_hook(loading.after)
    if not hasattr(module, _FQN_HOOK):
        # Asked for before anything is loaded; a module without children is not asked, and refuses in `before`.
        setattr(module, _FQN_HOOK, _BroadcastGuard(module))


_FQN_HOOK = "_fqn_modifiers"  # by default, what a module tells `torch.distributed.checkpoint` about its names


class _BroadcastGuard:
    """What a module says of its names to `torch.distributed.checkpoint.state_dict`: nothing, but it may refuse.

    Args:
        module: is referred to weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> dict[str, str]:
        module = self._module()
        _refuse_broadcast({} if module is None else dict(module.named_parameters()))
        return {}

    def __reduce__(self) -> Any:
        return dict, ()  # a copy is bound to nothing


def _refuse_broadcast(tensors: Mapping[str, Any]) -> None:
    """Refuse that torch broadcasts whole tensors into strided shards: it takes each for one stretch.

    Raises:
        InputError: it is about to, and one of `tensors` is several stretches.
    """
    if not _torch.broadcasts_from_first_rank():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and _is_strided(Spec(tuple(tensor.placements))):
            raise InputError(
                f"broadcast_from_rank0=True puts wrong numbers into {name!r}, which lies as "
                f"{Spec(tuple(tensor.placements))}: torch takes the shard of a rank for one stretch of the tensor, and "
                "it is several. Let every rank pass the whole state, with full_state_dict=True alone, or load from "
                "a file: torch.distributed.checkpoint.load, autoshard.load_safetensors."
            )


def _after_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, DTensor):
            _attach_protocol(value)


def _after_optimizer_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for number, state in state_dict.get("state", {}).items():
        if isinstance(state, dict):
            _refuse_broadcast({f"{name} of parameter {number}": value for name, value in state.items()})
    checkpointable(state_dict)


class _LoadHooks:
    """What happens around a module's `load_state_dict`.

    Args:
        tied: names of every parameter that has several.
    """

    def __init__(self, tied: Sequence[tuple[str, ...]]) -> None:
        self._tied = tied
        self._parameters_before: dict[str, nn.Parameter] = {}

    def before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Replace every tensor that is to fill a `DTensor` by one that lies alike."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _refuse_broadcast(parameters)
        self._parameters_before = {
            name: parameters[name] for names in self._tied for name in names if name in parameters
        }
        for name, parameter in parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = _distribute_like(value, parameter)

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Tie what was assigned under several names: the first one that was assigned stands for all."""
        for names in self._tied:
            now = {name: module.get_parameter(name) for name in names}
            assigned = [
                parameter for name, parameter in now.items() if parameter is not self._parameters_before.get(name)
            ]
            for name in names if assigned else ():
                if now[name] is not assigned[0]:
                    set_parameter(module, name, assigned[0])
        self._parameters_before = {}


def _distribute_like(value: Tensor, parameter: DTensor) -> Tensor:
    """A whole tensor, or a `DTensor` placed in another way, as a `DTensor` that lies as the parameter does."""
    spec = Spec(tuple(parameter.placements))
    if isinstance(value, DTensor):
        same = value.device_mesh != parameter.device_mesh or Spec(tuple(value.placements)) is spec
        return value if same else distribute(value.detach(), parameter.device_mesh, spec)
    with torch.no_grad():
        local = cut(value, parameter.device_mesh, spec)
    device = local.device if local.is_meta else parameter.device_mesh.device_type
    local = local.to(device)
    return wrap_like(local, parameter)


def _attach_protocol(tensor: DTensor) -> None:
    """Give the local tensor of a `DTensor` the methods of the checkpoint protocol, where it is not one stretch."""
    if not _has_several_blocks(tensor):
        return
    spec = Spec(tuple(tensor.placements))
    local: Any = local_of(tensor)
    # The pieces refer to another tensor object of the same memory: `local` itself would be a cycle.
    coordinate = tuple(coordinate_of(tensor.device_mesh))
    pieces = _CheckpointShard(local.detach(), tuple(tensor.shape), spec, MeshShape.of(tensor.device_mesh), coordinate)
    local.__create_write_items__ = pieces.write_items
    local.__create_chunk_list__ = pieces.chunks
    local.__get_tensor_shard__ = pieces.shard


def _has_several_blocks(tensor: DTensor) -> bool:
    """Whether a rank's part may be something else than the stretch that `torch.distributed.checkpoint` takes it for."""
    spec = Spec(tuple(tensor.placements))
    dims = [dim_of(spec[axis], tensor.ndim) for axis in spec.shard_axes]
    nested = len(set(dims)) < len(dims)
    return not spec.partial_axes and (nested or _is_strided(spec))


def _is_strided(spec: Spec) -> bool:
    return any(split_factor_of(spec[axis]) > 1 for axis in spec.shard_axes)


@dataclass(frozen=True, slots=True)
class _CheckpointShard:
    """A local tensor as `torch.distributed.checkpoint` sees it: the blocks of the global tensor that it holds.

    Attributes:
        local: the local tensor.
        shape: global shape.
        spec: how the tensor lies.
        mesh: the mesh.
        coordinate: of this rank.
    """

    local: Tensor
    shape: tuple[int, ...]
    spec: Spec
    mesh: MeshShape
    coordinate: tuple[int, ...]

    def blocks(self) -> Iterator[ShardBlock]:
        return blocks_of(self.shape, self.spec, self.mesh, self.coordinate)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The blocks, when loading."""
        return [_chunk(block) for block in self.blocks()]

    def write_items(self, name: str, tensor: DTensor) -> list[WriteItem]:
        """The blocks, when saving.

        Raises:
            InputError: they are several, and go to files that hold one tensor under every name.
        """
        blocks = list(self.blocks())
        if len(blocks) > 1 and _torch.saves_in_hugging_face_files():
            raise InputError(
                f"HuggingFaceStorageWriter keeps one stretch of {name!r} per rank; it lies as {self.spec}, of which "
                f"this rank has {len(blocks)}. Save whole tensors with it, those of get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or save with "
                "torch.distributed.checkpoint's own writer."
            )
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(block.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(block), properties=properties, size=torch.Size(self.shape)),
            )
            for block in blocks
        ]

    def shard(self, index: MetadataIndex) -> Tensor:
        """The block that begins at an offset, as a view: filling it fills the local tensor."""
        for block in self.blocks():
            if index.offset is not None and tuple(index.offset) == block.offsets:
                return self.local[block.local]
        raise ValueError(f"{index.fqn}: this rank holds no block that begins at {index.offset}.")


def _chunk(block: ShardBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))
