"""Checkpoints of sharded modules: strided shards in `torch.distributed.checkpoint`, whole tensors in `load_state_dict`.

`torch.distributed.checkpoint` treats the local tensor of a `DTensor` as one block of the global tensor, but a strided
shard has several. A `DTensor` calls the methods of the checkpoint protocol of its local tensor if it has them, so local
tensors of strided shards get these methods.
"""

from __future__ import annotations

import functools
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
from autoshard.runtime.shards import (
    ShardBlock,
    blocks_of,
    coordinate_of,
    cut,
    distribute,
    local_of,
    names_of_parameters,
    set_tensor,
    wrap_like,
)
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import Spec, split_factor_of

Target = TypeVar("Target")


def checkpointable(target: Target) -> Target:
    """Make strided shards work in `torch.distributed.checkpoint`.

    Not needed for `state_dict()` of a parallelised module, nor of an optimizer of its parameters after its first step
    (`torch.distributed.checkpoint.state_dict` takes a step if there was none). Call it for other `DTensor`s, such as
    averages of weights, before saving and before loading. Otherwise torch refuses to save a strided shard, and loads
    wrong numbers into it.

    Args:
        target: a state dict, nested or not, with `DTensor`s of any placements; or an optimizer, all of whose later
            `state_dict()`s are covered.

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

    * `torch.distributed.checkpoint` can save and load the `state_dict()`, strided shards included.
    * `load_state_dict` takes whole tensors, equal on all ranks, from which each rank takes its part without
      communication, and `DTensor`s with other placements. With `assign=True` parameters may be on the meta device.
    * Tied parameters remain tied, also with `assign=True`.
    * Loads into strided shards that torch would do wrongly are refused.
    """
    loading = _LoadHooks([names for names in names_of_parameters(module).values() if len(names) > 1])
    module.register_state_dict_post_hook(_after_state_dict)
    module.register_load_state_dict_pre_hook(loading.before)
    module.register_load_state_dict_post_hook(loading.after)
    # Torch calls this hook before it loads anything, but not for a module without children; `before` refuses there.
    if not hasattr(module, _FQN_HOOK):
        setattr(module, _FQN_HOOK, _BroadcastGuard(module))


# The method by which a module may map parameter names for `torch.distributed.checkpoint.state_dict`.
_FQN_HOOK = "_fqn_modifiers"


class _BroadcastGuard:
    """A hook for parameter names that changes none, and raises an error for a load that would be wrong."""

    def __init__(self, module: nn.Module) -> None:
        # A weak reference, because the module holds this object.
        self._module = weakref.ref(module)

    def __call__(self) -> dict[str, str]:
        module = self._module()
        _refuse_broadcast({} if module is None else dict(module.named_parameters()))
        return {}

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _BroadcastGuard:
        # While a module is being copied, its copy is in the memo.
        module = self._module()
        return self if module is None else _BroadcastGuard(memo.get(id(module), module))

    def __reduce__(self) -> Any:
        # A pickle gets a function that changes no names, too.
        return functools.partial, (dict,)


def _refuse_broadcast(tensors: Mapping[str, Any]) -> None:
    """Raise an `InputError` if torch is about to broadcast whole tensors into strided shards."""
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
    shards = [value for name, value in state_dict.items() if name.startswith(prefix) and isinstance(value, DTensor)]
    # Safetensors asks for the memory address of every tensor, which a DTensor does not have.
    function = _torch.running_safetensors_function() if shards else None
    if function is not None:
        raise InputError(
            f"safetensors.torch.{function} takes whole tensors, and this rank has shards of those of "
            f"{type(module).__name__}: call autoshard.integrations.safetensors.{function}, on all ranks."
        )
    for value in shards:
        _attach_protocol(value)


def _after_optimizer_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for number, state in state_dict.get("state", {}).items():
        if isinstance(state, dict):
            _refuse_broadcast({f"{name} of parameter {number}": value for name, value in state.items()})
    checkpointable(state_dict)


class _LoadHooks:
    """Hooks before and after `load_state_dict` of a module; `tied` are the names of every tied parameter."""

    def __init__(self, tied: Sequence[Sequence[str]]) -> None:
        self._tied = tied
        self._parameters_before: dict[str, nn.Parameter] = {}

    def before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Replace every tensor to be loaded into a `DTensor` by one with the same placements."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _refuse_broadcast(parameters)
        tied = (name for names in self._tied for name in names)
        self._parameters_before = {name: parameters[name] for name in tied if name in parameters}
        # Torch reports wrong shapes: all of them in one error.
        for name, parameter in parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = _distribute_like(value, parameter)

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Tie parameters again that were assigned separately: the first assigned one is used under all their names."""
        for names in self._tied:
            current = {name: module.get_parameter(name) for name in names}
            assigned = [value for name, value in current.items() if value is not self._parameters_before.get(name)]
            for name in names if assigned else ():
                if current[name] is not assigned[0]:
                    set_tensor(module, name, assigned[0])
        self._parameters_before = {}


def _distribute_like(value: Tensor, parameter: DTensor) -> Tensor:
    """Return a whole tensor, or a `DTensor` with other placements, placed like the parameter."""
    spec = Spec(tuple(parameter.placements))
    if isinstance(value, DTensor):
        keep = value.device_mesh != parameter.device_mesh or Spec(tuple(value.placements)) is spec
        return value if keep else distribute(value.detach(), parameter.device_mesh, spec)
    with torch.no_grad():
        local = cut(value, parameter.device_mesh, spec)
    return wrap_like(local if local.is_meta else local.to(parameter.device_mesh.device_type), parameter)


def _attach_protocol(tensor: DTensor) -> None:
    """Attach the checkpoint protocol to the local tensor of a `DTensor` if torch's own handling may be wrong."""
    spec = Spec(tuple(tensor.placements))
    dims = [dim_of(spec[axis], tensor.ndim) for axis in spec.shard_axes]
    # A dim that several axes shard may be uneven along each.
    nested = len(set(dims)) < len(dims)
    if spec.partial_axes or not (nested or _is_strided(spec)):
        return
    local: Any = local_of(tensor)
    coordinate = tuple(coordinate_of(tensor.device_mesh))
    # The shard refers to another tensor object with the same memory: `local` itself would be a reference cycle.
    shard = _CheckpointShard(local.detach(), tuple(tensor.shape), spec, MeshShape.of(tensor.device_mesh), coordinate)
    local.__create_write_items__ = shard.write_items
    local.__create_chunk_list__ = shard.chunks
    local.__get_tensor_shard__ = shard.block


def _is_strided(spec: Spec) -> bool:
    return any(split_factor_of(spec[axis]) > 1 for axis in spec.shard_axes)


@dataclass(frozen=True, slots=True)
class _CheckpointShard:
    """A local tensor as blocks of the global tensor, for `torch.distributed.checkpoint`."""

    local: Tensor
    # Of the global tensor.
    shape: tuple[int, ...]
    spec: Spec
    mesh: MeshShape
    coordinate: tuple[int, ...]

    def blocks(self) -> Iterator[ShardBlock]:
        return blocks_of(self.shape, self.spec, self.mesh, self.coordinate)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return the blocks to load."""
        return [_chunk(block) for block in self.blocks()]

    def write_items(self, name: str, tensor: DTensor) -> list[WriteItem]:
        """Return the blocks to save; raise an `InputError` if a format with one block per name would need several."""
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

    def block(self, index: MetadataIndex) -> Tensor:
        """Return the block that begins at an offset, as a view into the local tensor."""
        for block in self.blocks():
            if index.offset is not None and tuple(index.offset) == block.offsets:
                return self.local[block.local]
        raise ValueError(f"{index.fqn}: this rank holds no block that begins at {index.offset}.")


def _chunk(block: ShardBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))
