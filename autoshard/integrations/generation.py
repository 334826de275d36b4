"""`prepare_generation`: `generate()` of Hugging Face models on a mesh, with a static key-value cache in shards.

The library's own loop drives everything: sampling, beams and stopping are those of transformers. A cache is a
`StaticCache` whose keys and values are `DTensor`s, an argument of every call, which the programs change in place. The
program of one token is planned first: it decides how the cache lies, and how the parameters do where no call has placed
them before. The program of the prompt takes both as they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, zeros
from torch.utils import _pytree as pytree

from autoshard.capture.call_layout import call_tensors
from autoshard.errors import InputError
from autoshard.runtime.module_runtime import Runtime

try:
    from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
    from transformers.configuration_utils import get_head_shapes

    from autoshard.integrations.accelerate import check_parallelised
except ImportError as error:
    raise ImportError(
        "autoshard.integrations.generation needs the packages transformers and accelerate: pip install "
        "'autoshard[transformers]'."
    ) from error

TRIED = "transformers 5.23"

# Methods of models without a public name that are replaced.
_METHODS = ("_prepare_cache_for_generation", "_prepare_static_cache")
if not all(hasattr(GenerationMixin, name) for name in _METHODS):
    raise ImportError(f"this version of transformers makes caches in other ways than {TRIED}, the one tried here.")

# The cache among the arguments of `forward`.
_CACHE = "past_key_values"


class ShardedLayer(StaticLayer):
    """The static cache of one layer of a model, of which each rank holds a part.

    Args:
        keys: `[batch, heads, length, size of a head]`.
        values: the same, with the size of a head of theirs.
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


pytree.register_pytree_node(
    ShardedLayer,
    lambda layer: ([layer.keys, layer.values, layer.cumulative_length], None),
    lambda tensors, _: ShardedLayer(*tensors),
    serialized_type_name="autoshard.integrations.generation.ShardedLayer",
    flatten_with_keys_fn=lambda layer: (
        [(pytree.GetAttrKey(name), getattr(layer, name)) for name in ("keys", "values", "cumulative_length")],
        None,
    ),
)
pytree.register_pytree_node(
    ShardedCache,
    lambda cache: ([cache.layers], None),
    lambda layers, _: ShardedCache(*layers),
    serialized_type_name="autoshard.integrations.generation.ShardedCache",
    flatten_with_keys_fn=lambda cache: ([(pytree.GetAttrKey("layers"), cache.layers)], None),
)


def prepare_generation(model: nn.Module) -> None:
    """Have `generate()` of a parallelised causal language model of transformers hold its cache in shards.

    Every rank calls `model.generate(...)` with the same whole batch, and with the same seed where it samples; each gets
    the tokens of one device. The cache is static: `cache_implementation` is `"static"` by default. The first tokens
    make two programs, one for the prompt and one for a token; later calls with a batch and a prompt of these sizes, and
    no longer text, make none. `torch.compile` is not applied: that is an option of `autoshard.parallelize`.

    Args:
        model: the result of `autoshard.parallelize`, with or without an example. Without one, its parameters are placed
            for the program of one token.

    Raises:
        InputError: the model is not parallelised, is no causal language model of transformers, has layers of another
            kind than attention, or takes local inputs or returns outputs in shards. Later, `generate()` raises it for
            another kind of cache.
    """
    runtime = check_parallelised(model)
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise InputError(f"{type(model).__name__} has no generate() of transformers: pass a causal language model.")
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{type(model).__name__} has an encoder and a decoder, whose cache is of another kind than the one that "
            "prepare_generation makes: it is for causal language models. generate(..., use_cache=False) works without."
        )
    if runtime.inputs == "local" or runtime.maker.target.output_placements is not None:
        raise InputError(
            "generate() reads whole logits of a whole batch on every rank: call autoshard.parallelize with "
            'inputs="global" and without output_placements, which are the defaults.'
        )
    _check_layers(model.config)
    caches = _Caches(model)
    for name, method in zip(_METHODS, (caches.prepare, caches.make), strict=True):
        setattr(model, name, method)


def _check_layers(config: PreTrainedConfig) -> None:
    """Raise an `InputError` if a layer of a model has a cache of another kind than keys and values."""
    text_config = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in StaticCache(text_config, max_cache_len=1).layers}
    others = sorted(kind.__name__ for kind in kinds - {StaticLayer, StaticSlidingWindowLayer})
    if any(getattr(layer, "qk_head_dim", None) is not None for layer in text_config.per_layer_config):
        others.append("keys and values of unlike heads")
    if others:
        raise InputError(
            f"the cache of {config.model_type} has {', '.join(others)}, and prepare_generation knows static caches of "
            "attention (StaticLayer) alone. generate(..., use_cache=False) works without a cache."
        )


class _Caches:
    """Makes the caches of a parallelised model, in place of methods of it.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._longest = 0

    def prepare(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Check the arguments of `generate()` that are about caches, and do what the model's class does."""
        kind, given = generation_config.cache_implementation, model_kwargs.get(_CACHE)
        if given is not None and not isinstance(given, ShardedCache):
            raise InputError(
                f"{_CACHE} is a {type(given).__name__}, which lies whole on one device. Leave it out: generate() makes "
                "a cache in shards, and generate(..., return_dict_in_generate=True) returns it, to go on from."
            )
        if given is None and generation_config.use_cache is not False:
            if kind not in (None, "static"):
                raise InputError(
                    f"cache_implementation={kind!r}: the cache of a parallelised model is static. Pass "
                    'cache_implementation="static", or leave it out.'
                )
            generation_config.cache_implementation = "static"
        # The configuration is a copy for this call. torch.compile would trace the code around the programs.
        generation_config.disable_compile = True
        type(self._model)._prepare_cache_for_generation(self._model, generation_config, model_kwargs, *args, **kwargs)

    def make(
        self,
        cache_implementation: str,
        batch_size: int,
        max_cache_len: int,
        prefill_chunk_size: int | None,
        model_kwargs: Mapping[str, Any],
    ) -> ShardedCache:
        """Return an empty cache, for one more token of every sequence; arguments as in transformers."""
        # A shorter text fits in the cache of a longer one, and has the same program.
        self._longest = max(self._longest, max_cache_len)
        runtime = check_parallelised(self._model)
        shapes = self._shapes(batch_size)
        example = ShardedCache([_meta_layer(shape, self._dtype(runtime), runtime.device_mesh) for shape in shapes])
        token = torch.zeros((batch_size, 1), dtype=torch.int64, device=self._model.device)
        given = {**model_kwargs, _CACHE: example, "use_cache": True}
        inputs = self._model.prepare_inputs_for_generation(token, next_sequence_length=1, **given)
        inputs["return_dict"] = True
        names = [name for name, tensor in call_tensors(self._model, (), inputs).items() if isinstance(tensor, DTensor)]
        placements = iter(runtime.place_inputs((), inputs, names).values())
        return ShardedCache([_empty_layer(layer, next(placements), next(placements)) for layer in example.layers])

    def _shapes(self, batch_size: int) -> list[tuple[int, int, int, int]]:
        """Return the shape of the keys, and of the values, of every layer."""
        config = self._model.config.get_text_config(decoder=True)
        count = len(StaticCache(config, max_cache_len=1).layers)
        heads, sizes = (number if isinstance(number, list) else [number] * count for number in get_head_shapes(config))
        return [(batch_size, head, self._longest, size) for head, size in zip(heads, sizes, strict=True)]

    def _dtype(self, runtime: Runtime) -> torch.dtype:
        policy = runtime.maker.target.options.mp_policy
        dtype: torch.dtype = self._model.dtype
        return dtype if policy is None or policy.param_dtype is None else policy.param_dtype


def _meta_layer(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh) -> ShardedLayer:
    """Return a layer without numbers."""

    def tensor() -> DTensor:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return ShardedLayer(tensor(), tensor(), torch.zeros((), dtype=torch.int64, device=mesh.device_type))


def _empty_layer(example: ShardedLayer, keys: tuple[Placement, ...], values: tuple[Placement, ...]) -> ShardedLayer:
    """Return a layer like an example, with zeros that lie so on its mesh."""

    def tensor(like: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        return zeros(*like.shape, dtype=like.dtype, device_mesh=like.device_mesh, placements=placements)

    length = torch.zeros_like(example.cumulative_length)
    return ShardedLayer(tensor(example.keys, keys), tensor(example.values, values), length)
