"""Tokens that models of transformers generate on two processes, beside those of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import CaptureError, InputError
from autoshard.runtime.module_runtime import RUNTIME
from tests.runtime.meshes import simulated_mesh
from tests.training import fast_links
from tests.workers import Workers

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Cache,
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autoshard.integrations import generation
from autoshard.integrations.generation import prepare_generation
from autoshard.integrations.sharded_cache import layers_of
from autoshard.planner.module_planner import ModulePlanner
from tests.integrations.hugging_face import GPT2, LLAMA, VOCABULARY, Words, gpt2, llama

Call = dict[str, Any]

IMAGE = VOCABULARY - 1


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    # In float32: torch has no product of rows by groups in float64.
    return MixtralForCausalLM(MixtralConfig(**LLAMA.to_diff_dict(), num_local_experts=4))


def one_head() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**GPT2.to_diff_dict(), "n_head": 1})).double()


def latents() -> DeepseekV3ForCausalLM:
    """Keys and values are made of what the cache holds: one head, of which keys have another size than values."""
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 6, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    settings = LLAMA.to_diff_dict() | sizes | experts | {"moe_intermediate_size": 8}
    del settings["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**settings | {"initializer_range": 0.5}))


def t5() -> T5ForConditionalGeneration:
    """Weights so large that texts differ."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0, initializer_factor=4.0)).double()


def bart() -> BartForConditionalGeneration:
    """Layers and heads of the decoder are others than those of the encoder."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    return BartForConditionalGeneration(BartConfig(**size, **heads, init_std=0.6)).double()


def llava() -> LlavaForConditionalGeneration:
    """An image of four patches, of which each is a token."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**size, image_size=8, patch_size=4)
    text = {**LLAMA.to_diff_dict(), "max_position_embeddings": 16, "initializer_range": 0.5}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, initializer_range=0.5)
    return LlavaForConditionalGeneration(config).double()


def with_image(seed: int) -> Call:
    """A prompt with an image in it."""
    tokens = torch.tensor([[3, IMAGE, IMAGE, IMAGE, IMAGE, 4, 5]])
    pixels = torch.randn((1, 3, 8, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "pixel_values": pixels, "pad_token_id": 0, "max_new_tokens": 4}


def prompt(rows: int, length: int, padding: int = 0) -> Call:
    """Tokens, of which the first row's first ones are padding."""
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = tokens[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 4}


SAMPLING = {"do_sample": True, "temperature": 0.8}
LENGTHS = {"input_ids": {1: "length"}, "position_ids": {1: "length"}}

# Model, options, the dim of keys in shards, and calls with the number of programs that were made until after each: one
# for the prompt, one for a token, and one for an encoder.
CASES: dict[str, tuple[Callable[[], PreTrainedModel], Mapping[str, Any], int, list[tuple[Call, int]]]] = {
    "heads in shards, and prompts of all lengths": (
        llama,
        {"dynamic": LENGTHS},
        1,
        [
            (prompt(1, 3), 2),
            ({**prompt(1, 3), **SAMPLING, "max_new_tokens": 3}, 2),
            ({**prompt(1, 4), "cache_implementation": "static", "max_new_tokens": 2}, 2),
        ],
    ),
    "rows in shards": (
        one_head,
        {},
        0,
        [
            (prompt(2, 4, padding=2), 2),
            ({**prompt(2, 4, padding=1), **SAMPLING}, 2),
            ({**prompt(1, 4), "num_beams": 2}, 3),
            ({**prompt(2, 4), "prefill_chunk_size": 2}, 5),
        ],
    ),
    "experts": (mixtral, {}, 0, [(prompt(2, 3), 2), (prompt(2, 3), 2)]),
    "latents": (latents, {}, 0, [(prompt(2, 3), 2)]),
    "encoder, heads in shards": (
        bart,
        {},
        1,
        [(prompt(1, 4), 3), (prompt(1, 4, padding=1), 3), ({**prompt(1, 4), **SAMPLING}, 3)],
    ),
    "encoder, rows in shards": (
        t5,
        {},
        0,
        [(prompt(2, 4), 3), ({**prompt(1, 4), "num_beams": 2}, 4), ({**prompt(2, 4, padding=2), **SAMPLING}, 4)],
    ),
    "images": (llava, {}, 1, [(with_image(0), 3), (with_image(1), 3)]),
    "compiled": (gpt2, {"compile": True}, 1, [(prompt(1, 3), 2), ({**prompt(1, 3), **SAMPLING}, 2)]),
}
# Inductor takes seconds for every kernel.
MARKED_CASES = [pytest.param(case, marks=[pytest.mark.slow] if case == "compiled" else []) for case in CASES]


def _generate(model: Any, call: Call) -> Tensor:
    """The tokens, by one seed; of a parallelised model, with its cache."""
    torch.manual_seed(3)
    return model.generate(**call)  # type: ignore[no-any-return]


def _generate_on_ranks(case: str) -> list[tuple[Tensor, int, list[str], list[float]]]:
    """Of every call the tokens, the number of programs, and how keys lie and which part of them a rank has."""
    build, options, _, calls = CASES[case]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    model = build().eval()
    autoshard.parallelize(model, mesh, cluster=fast_links(), search=autoshard.Search(effort="fast"), **options)
    prepare_generation(model)
    results = []
    with mock.patch.object(ModulePlanner, "capture", autospec=True, side_effect=ModulePlanner.capture) as capture:
        for call, _ in calls:
            result = _generate(model, {**call, "return_dict_in_generate": True})
            keys = [layer.keys for layer in layers_of(result.past_key_values)]
            parts = [key.to_local().numel() / key.numel() for key in keys]
            results.append((result.sequences, capture.call_count, [str(key.placements) for key in keys], parts))
    assert model.sharding_plan.memory.held["input"] < 0.8 * _cache_bytes(result.past_key_values)
    compiled = {served.program.compiled for served in model.__dict__[RUNTIME].programs.table.values()}
    assert compiled == {options.get("compile", False)}
    return results


def _cache_bytes(cache: Cache) -> int:
    return sum(tensor.nbytes for layer in layers_of(cache) for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("case", MARKED_CASES)
def test_tokens_are_those_of_one_device(case: str, two: Workers) -> None:
    build, _, dim, calls = CASES[case]
    alone = build().eval()
    expected = [_generate(alone, call) for call, _ in calls]
    for ours in two.run(_generate_on_ranks, case):
        for (tokens, programs, placements, parts), theirs, (_, count) in zip(ours, expected, calls, strict=True):
            assert torch.equal(tokens, theirs)
            assert programs == count
            assert set(placements) == {f"(Shard(dim={dim}),)"}
            assert set(parts) == {0.5}


def _without_preparation(model: Any, call: Call) -> None:
    model.generate(**call)


def _with_preparation(model: Any, call: Call) -> None:
    prepare_generation(model)
    model.generate(**call)


REFUSED: dict[str, tuple[Callable[[Any, Call], None], Call, type[Exception], str]] = {
    "not prepared": (_without_preparation, {}, CaptureError, r"prepare_generation\(model\) before model.generate"),
    "another kind": (_with_preparation, {"cache_implementation": "dynamic"}, InputError, "'dynamic': .* is static"),
    "a cache of one device": (
        _with_preparation,
        {generation._CACHE: DynamicCache()},
        InputError,
        "DynamicCache, which",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_caches_are_refused(case: str) -> None:
    generate, arguments, kind, message = REFUSED[case]
    with simulated_mesh(x=2) as mesh:
        model = autoshard.parallelize(llama().eval(), mesh)
        with pytest.raises(kind, match=message):
            generate(model, {**prompt(1, 2), **arguments})


def test_models_with_caches_of_other_kinds_are_refused() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=8, state_size=2, num_hidden_layers=1))
    windows = t5()
    windows.config.layer_types, windows.config.sliding_window = ["sliding_attention"], 4
    others = {
        "the cache of t5 has StaticSlidingWindowLayer": (windows, {}),
        "the cache of mamba has LinearAttentionLayer": (mamba, {}),
        "Words has no generate": (Words(), {}),
        "whole logits of a whole batch": (llama(), {"inputs": "local"}),
        "without output_placements": (llama(), {"output_placements": "planned"}),
    }
    with simulated_mesh(x=2) as mesh:
        for message, (model, options) in others.items():
            with pytest.raises(InputError, match="is not parallelised"):
                prepare_generation(model)
            autoshard.parallelize(model, mesh, **options)
            with pytest.raises(InputError, match=message):
                prepare_generation(model)
