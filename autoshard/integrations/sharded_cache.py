"""Static key-value caches of transformers of which each rank holds a part."""

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
    """The static cache of one layer of a model, of which each rank holds a part.

    Args:
        keys: `[batch, heads, length, size of a head]`.
        values: the same, with the heads of theirs.
        cumulative_length: the number of tokens in the cache, an integer tensor without dims, on the ranks' device.
    """

    # `DTensor`s; in a capture, fake tensors.
    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, cumulative_length: Tensor) -> None:
        # Without that of the base class, which makes tensors.
        self.keys, self.values, self.cumulative_length = keys, values, cumulative_length
        self.is_initialized = True
        # A tree may hold other leaves than tensors.
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
    """A static cache of which each rank holds a part; `prepare_generation` has `generate()` make it.

    Args:
        layers: those of the model.
    """

    layers: Any  # a list of `ShardedLayer`s

    def __init__(self, layers: list[ShardedLayer]) -> None:
        self.layers = layers
        self.layer_class_to_replicate = None
        self.offloading = False


class ShardedEncoderDecoderCache(EncoderDecoderCache):
    """The cache of a decoder and of its attention to an encoder, of which each rank holds a part.

    Args:
        self_attention_cache: of the tokens of the decoder.
        cross_attention_cache: of the output of the encoder, which the first call of the decoder writes.
        written: for every layer, True if the cache of the encoder's output has been written.
    """

    def __init__(self, self_attention_cache: Any, cross_attention_cache: Any, written: Iterable[bool]) -> None:
        # Without that of the base class, which reads numbers of tensors.
        self.self_attention_cache, self.cross_attention_cache = self_attention_cache, cross_attention_cache
        self.is_updated = dict(enumerate(written))

    @property
    def written(self) -> tuple[bool, ...]:
        """For every layer, True if the cache of the encoder's output has been written, and is only read."""
        return tuple(self.is_updated.values())


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache of transformers: those of the decoder, then those of its attention to an encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def with_layers(
    cache: Any, layers: list[ShardedLayer], *, is_written: bool = False
) -> ShardedCache | ShardedEncoderDecoderCache:
    """Return a cache like one of transformers, with other layers, in the order of `layers_of`.

    Args:
        cache: that of transformers.
        layers: the layers.
        is_written: True if the output of an encoder has been written.
    """
    if not isinstance(cache, EncoderDecoderCache):
        return ShardedCache(layers)
    count = len(cache.self_attention_cache.layers)
    of_tokens, of_encoder = ShardedCache(layers[:count]), ShardedCache(layers[count:])
    return ShardedEncoderDecoderCache(of_tokens, of_encoder, [is_written] * len(of_encoder.layers))


def meta_layer(
    keys: tuple[int, ...], values: tuple[int, ...], dtype: torch.dtype, device_mesh: DeviceMesh
) -> ShardedLayer:
    """Return a layer with keys and values of these shapes, without numbers."""

    def tensor(shape: tuple[int, ...]) -> DTensor:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return DTensor.from_local(whole, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)

    length = torch.zeros((), dtype=torch.int64, device=device_mesh.device_type)
    return ShardedLayer(tensor(keys), tensor(values), length)


def empty_cache(example: Any, placements: Iterable[tuple[Placement, ...]]) -> Any:
    """Return a cache like an example, with zeros on its mesh.

    Args:
        example: the cache; its keys and values may be on the meta device.
        placements: of the keys and the values of every layer.
    """
    following = iter(placements)

    def tensor(like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return torch.zeros_like(like)
        return zeros(*like.shape, dtype=like.dtype, device_mesh=like.device_mesh, placements=next(following))

    return pytree.tree_map_only(Tensor, tensor, example)


def _register(kind: type, names: tuple[str, ...], *values: str) -> None:
    """Have attributes of a class be the children of its nodes in trees, and others the values that tell nodes apart."""

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
