"""Sharded static key-value caches of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, zeros
from torch.utils import _pytree as pytree
from transformers import EncoderDecoderCache, StaticCache
from transformers.cache_utils import StaticLayer


class ShardedLayer(StaticLayer):
    """The static cache of one layer of a model; each rank holds a part.

    Args:
        keys: `[batch, heads, length, size of a head]`.
        values: the same shape, with the heads of the values.
        cumulative_length: the number of tokens in the cache, a 0-d integer tensor on the ranks' device.
    """

    # `DTensor`s; in a capture, fake tensors.
    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, cumulative_length: Tensor) -> None:
        # Without the base class's `__init__`, which makes tensors.
        self.keys, self.values, self.cumulative_length = keys, values, cumulative_length
        self.is_initialized = True
        # Leaves of a tree may be other than tensors.
        if isinstance(keys, Tensor):
            self.device, (self.batch_size, _, self.max_cache_len, _) = keys.device, keys.shape

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences, as a beam search does."""
        for cached in (self.keys, self.values):
            mesh = cached.device_mesh
            rows = [Replicate() if placement.is_shard(0) else placement for placement in cached.placements]
            chosen = cached.redistribute(mesh, rows).to_local().index_select(0, beam_idx.to(cached.device))
            cached.copy_(DTensor.from_local(chosen, mesh, rows, run_check=False).redistribute(mesh, cached.placements))


class ShardedCache(StaticCache):
    """A static cache of which each rank holds a part; `prepare_generation` makes `generate()` use it.

    Args:
        layers: the layers of the model.
    """

    layers: Any  # a list of `ShardedLayer`s

    def __init__(self, layers: list[ShardedLayer]) -> None:
        self.layers = layers
        self.layer_class_to_replicate = None
        self.offloading = False


class ShardedEncoderDecoderCache(EncoderDecoderCache):
    """The cache of a decoder and of its cross-attention; each rank holds a part.

    Args:
        self_attention_cache: the cache of the decoder's tokens.
        cross_attention_cache: the cache of the encoder's output, written in the decoder's first call.
        written: for every layer, True if the cache of the encoder's output has been written.
    """

    def __init__(self, self_attention_cache: Any, cross_attention_cache: Any, written: Iterable[bool]) -> None:
        # Without the base class's `__init__`, which reads numbers of tensors.
        self.self_attention_cache, self.cross_attention_cache = self_attention_cache, cross_attention_cache
        self.is_updated = dict(enumerate(written))

    @property
    def written(self) -> tuple[bool, ...]:
        """For every layer, True if the cache of the encoder's output is written, and from now on only read."""
        return tuple(self.is_updated.values())


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a transformers cache: those of the decoder, then those of its cross-attention."""
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def with_layers(
    cache: Any, layers: list[ShardedLayer], *, is_written: bool = False
) -> ShardedCache | ShardedEncoderDecoderCache:
    """Return a cache like one of transformers with other layers, in the order of `layers_of`.

    Args:
        cache: the transformers cache.
        layers: the layers.
        is_written: True if the encoder's output has been written.
    """
    if not isinstance(cache, EncoderDecoderCache):
        return ShardedCache(layers)
    count = len(cache.self_attention_cache.layers)
    of_tokens, of_encoder = ShardedCache(layers[:count]), ShardedCache(layers[count:])
    return ShardedEncoderDecoderCache(of_tokens, of_encoder, [is_written] * len(of_encoder.layers))


def meta_layer(
    keys: tuple[int, ...], values: tuple[int, ...], dtype: torch.dtype, device_mesh: DeviceMesh
) -> ShardedLayer:
    """Return a layer with meta tensors of these shapes as keys and values."""

    def tensor(shape: tuple[int, ...]) -> DTensor:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return DTensor.from_local(whole, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)

    length = torch.zeros((), dtype=torch.int64, device=device_mesh.device_type)
    return ShardedLayer(tensor(keys), tensor(values), length)


def empty_cache(example: Any, placements: Iterable[tuple[Placement, ...]]) -> Any:
    """Return a cache like an example, filled with zeros, on its mesh.

    Args:
        example: the cache; its keys and values may be on the meta device.
        placements: the placements of the keys and the values of every layer.
    """
    following = iter(placements)

    def tensor(like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return torch.zeros_like(like)
        return zeros(*like.shape, dtype=like.dtype, device_mesh=like.device_mesh, placements=next(following))

    return pytree.tree_map_only(Tensor, tensor, example)


def _register(kind: type, names: tuple[str, ...], *values: str) -> None:
    """Register a class as a pytree node with some attributes as children; others distinguish its nodes."""

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(node, name) for name in names], tuple(getattr(node, name) for name in values)

    def flatten_with_keys(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children, context = flatten(node)
        return list(zip(map(pytree.GetAttrKey, names), children, strict=True)), context

    pytree.register_pytree_node(
        kind,
        flatten,
        lambda children, context: kind(*children, *context),
        serialized_type_name=f"{__name__}.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


_register(ShardedLayer, ("keys", "values", "cumulative_length"))
_register(ShardedCache, ("layers",))
_register(ShardedEncoderDecoderCache, ("self_attention_cache", "cross_attention_cache"), "written")
