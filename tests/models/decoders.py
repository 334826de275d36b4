"""Language models of Hugging Face that predict the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.models.common import BATCH, HIDDEN, SEQUENCE, SMALL, VOCABULARY, Model, fixed_seed, tokens


def hf_gpt2(
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    batch: int = BATCH,
    layers: int = 2,
    dropout: float = 0.0,
) -> Model:
    """Hugging Face GPT-2 language model; its head is tied to its embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return language_model(transformers.GPT2LMHeadModel, config, dtype, seed, batch)


def hf_llama(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, layers: int = 2) -> Model:
    """Hugging Face Llama with 4 query heads over 2 key and value heads."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return language_model(transformers.LlamaForCausalLM, config, dtype, seed, batch)


def hf_qwen3(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face Qwen3: queries and keys are normalised per head."""
    config = transformers.Qwen3Config(**_sizes(), head_dim=6)
    return language_model(transformers.Qwen3ForCausalLM, config, dtype, seed, batch)


def hf_gemma(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face Gemma: a scaled embedding tied to the head, norms that add one to their weight."""
    config = transformers.GemmaConfig(**_sizes(), head_dim=6)
    return language_model(transformers.GemmaForCausalLM, config, dtype, seed, batch)


def hf_opt(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face OPT: learned positions counted from the attention mask."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=SMALL,
        word_embed_proj_dim=SMALL,
        ffn_dim=2 * SMALL,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE,
        dropout=0.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        use_cache=False,
    )
    return language_model(transformers.OPTForCausalLM, config, dtype, seed, batch)


def hf_mixtral(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, experts: str = "batched_mm"
) -> Model:
    """Hugging Face Mixtral: 4 experts, 2 for each token; `experts` is the implementation of their products."""
    config = transformers.MixtralConfig(**_sizes(), num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = experts
    return language_model(transformers.MixtralForCausalLM, config, dtype, seed, batch)


def hf_qwen3_moe(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, experts: str = "batched_mm"
) -> Model:
    """Hugging Face Qwen3-MoE: 4 experts, 2 for each token, and a loss that balances them."""
    config = transformers.Qwen3MoeConfig(
        **_sizes(),
        head_dim=6,
        moe_intermediate_size=SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        output_router_logits=True,
    )
    config._experts_implementation = experts
    return language_model(transformers.Qwen3MoeForCausalLM, config, dtype, seed, batch)


def hf_deepseek_v3(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, experts: str = "batched_mm"
) -> Model:
    """Hugging Face DeepSeek-V3: latent attention, a dense layer, then experts in groups beside a shared one."""
    config = transformers.DeepseekV3Config(
        **_sizes() | {"num_hidden_layers": 2, "num_key_value_heads": 4},
        moe_intermediate_size=SMALL,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
    )
    config._experts_implementation = experts
    return language_model(transformers.DeepseekV3ForCausalLM, config, dtype, seed, batch)


def _sizes() -> dict[str, Any]:
    """What the configurations of the small models have in common: one layer, 4 query heads over 2 of keys."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": SMALL,
        "intermediate_size": 2 * SMALL,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": SEQUENCE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "use_cache": False,
    }


def language_model(build: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype, seed: int, batch: int) -> Model:
    """The model of a configuration in training, its labels its own tokens."""
    with fixed_seed(dtype, seed):
        module = build(config)
        input_ids = tokens(batch)
        return module.train(), {"input_ids": input_ids, "labels": input_ids.clone()}
