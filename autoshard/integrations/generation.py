"""`prepare_generation`: `generate()` of Hugging Face models on a mesh, with a sharded static key-value cache.

The library's own loop runs everything: sampling, beams and stopping are those of transformers. A cache is a
`StaticCache` whose keys and values are `DTensor`s. It is an argument of every call, and programs change it in place.
The program of one token is planned first: it decides the placements of the cache, and those of the parameters unless an
earlier call did. The program of the prompt uses these placements. An encoder has separate programs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from autoshard import operators as operators  # which captures put into graphs
from autoshard.api import register_forward_method
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import export_call
from autoshard.errors import InputError
from autoshard.runtime.module_runtime import Runtime
from autoshard.runtime.shards import local_of

try:
    from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    from autoshard.integrations.accelerate import check_parallelised
    from autoshard.integrations.sharded_cache import (
        ShardedCache,
        ShardedEncoderDecoderCache,
        empty_cache,
        layers_of,
        meta_layer,
        with_layers,
    )
except ImportError as error:
    raise ImportError(
        "autoshard.integrations.generation needs the packages transformers and accelerate: pip install "
        "'autoshard[transformers]'."
    ) from error

TRIED = "transformers 5.23"

# Methods of models without a public name that are replaced.
_METHODS = ("_prepare_cache_for_generation", "_prepare_static_cache", "_update_model_kwargs_for_generation")
if not all(hasattr(GenerationMixin, name) for name in _METHODS):
    raise ImportError(f"this version of transformers makes caches in other ways than {TRIED}, the one tried here.")

# The name of the cache among the arguments of `forward`, which transformers 5.24 changes.
_CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


def prepare_generation(model: nn.Module) -> None:
    """Make `generate()` of a parallelised transformers model use a sharded cache.

    Every rank calls `model.generate(...)` with the same whole batch, and with the same seed if it samples; each gets
    the tokens of one device. The cache is static: `cache_implementation` is `"static"` by default. The first tokens
    need two programs, one for the prompt and one for a token, and an encoder of texts or images needs one; later calls
    with the same batch and prompt sizes, and no longer text, need none. `torch.compile` is not applied: that is an
    option of `autoshard.parallelize`.

    Args:
        model: the result of `autoshard.parallelize`, with or without an example. Without one, the program of one token
            places its parameters.

    Raises:
        InputError: the model is not parallelised, has no transformers `generate()`, has layers other than attention, or
            takes local inputs or returns sharded outputs. Later, `generate()` raises it for another kind of cache.
    """
    runtime = check_parallelised(model)
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise InputError(f"{type(model).__name__} has no generate() of transformers: pass a model that has it.")
    if runtime.inputs == "local" or runtime.maker.target.output_placements is not None:
        raise InputError(
            "generate() reads whole logits of a whole batch on every rank: call autoshard.parallelize with "
            'inputs="global" and without output_placements, which are the defaults.'
        )
    _check_layers(model.config)
    caches = _Caches(model, _encoders(model, runtime))
    for name, method in zip(_METHODS, (caches.prepare, caches.make, caches.advance), strict=True):
        setattr(model, name, method)


def _check_layers(config: PreTrainedConfig) -> None:
    """Raise an `InputError` if a layer of a model has a cache other than keys and values."""
    text_config = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in StaticCache(text_config, max_cache_len=1).layers}
    # With an encoder, transformers makes a cache with the same windows for the encoder's output.
    known = {StaticLayer} if config.is_encoder_decoder else {StaticLayer, StaticSlidingWindowLayer}
    others = sorted(kind.__name__ for kind in kinds - known)
    if others:
        raise InputError(
            f"the cache of {config.model_type} has {', '.join(others)}, and prepare_generation knows static caches of "
            "attention (StaticLayer) alone. generate(..., use_cache=False) works without a cache."
        )


class _Caches:
    """Makes the caches of a parallelised model; it replaces methods of the model.

    Args:
        model: the model.
        encoders: methods that `generate()` calls before the model.
    """

    def __init__(self, model: PreTrainedModel, encoders: Sequence[_Encoder]) -> None:
        self._model: Any = model
        self._encoders = encoders
        self._longest = 0
        # As returned by `_find_heads`.
        self._heads: list[Any] = []

    def prepare(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Check the cache arguments of `generate()`, then run the method of the model's class."""
        kind, given = generation_config.cache_implementation, model_kwargs.get(_CACHE)
        if given is not None and not isinstance(given, (ShardedCache, ShardedEncoderDecoderCache)):
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
        # This call's copy of the configuration. torch.compile would trace the code around the programs.
        generation_config.disable_compile = True
        type(self._model)._prepare_cache_for_generation(self._model, generation_config, model_kwargs, *args, **kwargs)

    def make(
        self,
        cache_implementation: str,
        batch_size: int,
        max_cache_len: int,
        prefill_chunk_size: int | None,
        model_kwargs: Mapping[str, Any],
    ) -> ShardedCache | ShardedEncoderDecoderCache:
        """Return an empty cache with room for one more token of every sequence; arguments as in transformers."""
        runtime = check_parallelised(self._model)
        # One device's cache, without tensors, provides the lengths, except for windows, whose tokens are all kept. A
        # shorter text fits into the cache of a longer one, and uses the same program.
        self._longest = max(self._longest, max_cache_len)
        arguments = cache_implementation, batch_size, self._longest, None, model_kwargs
        make_plain = functools.partial(type(self._model)._prepare_static_cache, self._model, *arguments)
        plain = make_plain()
        if not self._heads:
            inputs = self._token_inputs(plain, batch_size, model_kwargs)
            self._heads = _find_heads(self._model, make_plain, inputs)
        dtype = self._dtype(runtime)
        layers = []
        for layer, heads in zip(layers_of(plain), self._heads, strict=True):
            length = self._longest if isinstance(layer, StaticSlidingWindowLayer) else layer.max_cache_len
            keys, values = ((batch_size, count, length, size) for count, size in heads)
            layers.append(meta_layer(keys, values, dtype, runtime.device_mesh))
        # For a later token, when the encoder's output is already in the cache.
        inputs = self._token_inputs(with_layers(plain, layers, is_written=True), batch_size, model_kwargs)
        call = BoundCall.of(self._model, (), inputs, grad=False)
        names = [name for name, tensor in call.tensors.items() if isinstance(tensor, DTensor)]
        placements = runtime.place_inputs(call, names)
        for encoder in self._encoders:
            encoder.make_program()
        return empty_cache(with_layers(plain, layers), placements.values())

    def advance(self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Record what a call has written, since programs do not, then run the method of the model's class."""
        cache = model_kwargs.get(_CACHE)
        if isinstance(cache, ShardedEncoderDecoderCache):
            cache.is_updated = dict.fromkeys(cache.is_updated, True)
        update = type(self._model)._update_model_kwargs_for_generation
        return update(self._model, outputs, model_kwargs, *args, **kwargs)

    def _token_inputs(self, cache: Any, batch_size: int, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call for one token of every sequence."""
        token = torch.zeros((batch_size, 1), dtype=torch.int64, device=self._model.device)
        given = {**model_kwargs, _CACHE: cache, "use_cache": True}
        inputs = self._model.prepare_inputs_for_generation(token, next_sequence_length=1, **given)
        return {**inputs, "return_dict": True}

    def _dtype(self, runtime: Runtime) -> torch.dtype:
        policy = runtime.maker.target.options.mp_policy
        dtype: torch.dtype = self._model.dtype
        return dtype if policy is None or policy.param_dtype is None else policy.param_dtype


def _find_heads(model: nn.Module, make_cache: Callable[[], Any], inputs: dict[str, Any]) -> list[Any]:
    """Return the number of heads and their size, for the keys and the values of every layer.

    Args:
        model: the model.
        make_cache: makes an empty cache for one device; its tensors are created in the first call.
        inputs: the arguments of a call with such a cache.
    """
    without_cache = {name: value for name, value in inputs.items() if name != _CACHE}
    forward = export_call(BoundCall.of(_CacheReader(model, make_cache), (), without_cache, False))
    sizes = [(node.meta["val"].shape[1], node.meta["val"].shape[3]) for node in forward.outputs]
    return list(zip(sizes[::2], sizes[1::2], strict=True))


class _CacheReader(nn.Module):
    """Returns the keys and values that a model's first call creates.

    Args:
        model: the model.
        make_cache: makes an empty cache.
    """

    def __init__(self, model: nn.Module, make_cache: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.make_cache = model, make_cache

    def forward(self, **inputs: Any) -> list[tuple[Tensor, Tensor]]:
        cache = self.make_cache()
        self.model(**inputs, **{_CACHE: cache})
        return [(layer.keys, layer.values) for layer in layers_of(cache)]


class _Encoder(nn.Module):
    """Runs a method that `generate()` calls before the model: by programs, or unsharded until parameters are placed.

    Args:
        model: the model.
        runtime: the runtime of the model.
        owner: the submodule that has the method.
        name: the name of the method.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner = owner
        self._whole = getattr(owner, name)
        path = next(path for path, part in model.named_modules() if part is owner)
        register_forward_method(model, f"{path}.{name}".removeprefix("."))
        self._programs = getattr(owner, name)
        self._first_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

        @functools.wraps(self._whole)
        def encode(*args: Any, **kwargs: Any) -> Any:
            if runtime.maker.placed is not None:
                return self._programs(*args, **kwargs)
            # The program of a token decides the parameters' placements, but needs the sizes of this method's result.
            self._first_call = args, kwargs
            tensors = itertools.chain(self.named_parameters(), self.named_buffers())
            return functional_call(self, {name: local_of(tensor) for name, tensor in tensors}, args, kwargs)

        setattr(owner, name, encode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method on this rank alone."""
        return self._whole(*args, **kwargs)

    def make_program(self) -> None:
        """Make the program for the call from before parameters were placed, for later calls."""
        if self._first_call is not None:
            args, kwargs = self._first_call
            self._first_call = None
            self._programs(*args, **kwargs)


def _encoders(model: Any, runtime: Runtime) -> list[_Encoder]:
    """Return the methods that `generate()` calls before the model: encoders of texts, sounds, images or videos."""
    if model.config.is_encoder_decoder:
        return [_Encoder(model, runtime, model.get_encoder(), "forward")]
    if not model._supports_mm_encoder_outputs():
        return []
    names = ("get_image_features", "get_video_features")
    return [_Encoder(model, runtime, model.base_model, name) for name in names if hasattr(model.base_model, name)]
