"""Text models of Hugging Face with an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.models.common import BATCH, HIDDEN, SEQUENCE, SMALL, VOCABULARY, Model, fixed_seed, tokens


def hf_bert(
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    batch: int = BATCH,
    layers: int = 2,
    task: str = "classification",
    dropout: float = 0.0,
) -> Model:
    """Hugging Face BERT for `task` "classification" (of sequences, 3 classes) or "masked" (language model)."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        problem_type="single_label_classification",
    )
    with fixed_seed(dtype, seed):
        if task == "masked":
            module, labels = transformers.BertForMaskedLM(config), tokens(batch)
        else:
            module, labels = transformers.BertForSequenceClassification(config), torch.randint(0, 3, (batch,))
        mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
        return module.train(), {"input_ids": tokens(batch), "attention_mask": mask, "labels": labels}


def hf_roberta(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face RoBERTa, masked language model: positions are counted along tokens that are no padding."""
    config = transformers.RobertaConfig(**_sizes() | {"max_position_embeddings": SEQUENCE + 2, "pad_token_id": 1})
    return masked_model(transformers.RobertaForMaskedLM, config, dtype, seed, batch)


def hf_albert(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face ALBERT, masked language model: two layers that share their parameters, a factorised embedding."""
    config = transformers.AlbertConfig(**_sizes() | {"num_hidden_layers": 2}, embedding_size=12)
    return masked_model(transformers.AlbertForMaskedLM, config, dtype, seed, batch)


def hf_deberta(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face DeBERTa-v2, masked language model: attention disentangled in content and relative positions."""
    config = transformers.DebertaV2Config(
        **_sizes(),
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        pooler_hidden_size=SMALL,
    )
    return masked_model(transformers.DebertaV2ForMaskedLM, config, dtype, seed, batch)


def hf_t5(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face T5: encoder and decoder of one layer each, biases of relative positions."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=SMALL,
        d_kv=6,
        d_ff=2 * SMALL,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=4,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    with fixed_seed(dtype, seed):
        module = transformers.T5ForConditionalGeneration(config)
        return module.train(), {"input_ids": tokens(batch), "labels": tokens(batch)}


def _sizes() -> dict[str, Any]:
    """What the configurations of the small models have in common: one layer of 4 heads, no dropout."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": SMALL,
        "intermediate_size": 2 * SMALL,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": SEQUENCE,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def masked_model(build: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype, seed: int, batch: int) -> Model:
    """The model of a configuration in training, with tokens, a mask that hides none of them, and labels."""
    with fixed_seed(dtype, seed):
        module = build(config)
        mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
        return module.train(), {"input_ids": tokens(batch), "attention_mask": mask, "labels": tokens(batch)}
