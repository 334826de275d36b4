"""Models of the kinds that people train, large enough that what they hold is not dominated by small tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.models.basic import Gpt, Mlp
from tests.models.common import Model, fixed_seed
from tests.models.convolutional import ResNet, UNet

BATCH = 8
SEQUENCE = 64
VOCABULARY = 1024
HIDDEN = 128
LAYERS = 2


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))


def _mlp() -> Model:
    return Mlp(256, 1024), {"x": torch.randn(256, 256), "target": torch.randn(256, 256)}


class _LongGpt(Gpt):
    """The GPT of the tests with a longer table of positions."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 4, LAYERS, "view", tied=False, dropout=0.0)
        self.tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = torch.nn.Embedding(SEQUENCE, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)


def _gpt() -> Model:
    return _LongGpt(), {"input_ids": _tokens(), "labels": _tokens()}


def _language(build: Callable[[Any], torch.nn.Module], config: Any) -> Model:
    tokens = _tokens()
    return build(config).train(), {"input_ids": tokens, "labels": tokens.clone()}


def _gpt2() -> Model:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _language(transformers.GPT2LMHeadModel, config)


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": SEQUENCE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": False,
    }


def _llama() -> Model:
    return _language(transformers.LlamaForCausalLM, transformers.LlamaConfig(**_sizes(), num_key_value_heads=2))


def _mixtral() -> Model:
    config = transformers.MixtralConfig(**_sizes(), num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "batched_mm"
    config.num_hidden_layers = 1
    return _language(transformers.MixtralForCausalLM, config)


def _bert() -> Model:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
        intermediate_size=4 * HIDDEN, max_position_embeddings=SEQUENCE, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.long), "labels": _tokens()}
    return transformers.BertForMaskedLM(config).train(), {"input_ids": _tokens(), **inputs}


def _vit() -> Model:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=4 * HIDDEN,
        image_size=32, patch_size=4, num_labels=10, problem_type="single_label_classification",
    )  # fmt: skip
    images = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 10, (BATCH,))}
    return transformers.ViTForImageClassification(config).train(), images


def _t5() -> Model:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HIDDEN // 4, d_ff=4 * HIDDEN, num_layers=1, num_decoder_layers=1,
        num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _language(transformers.T5ForConditionalGeneration, config)


def _resnet() -> Model:
    images = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 12, (BATCH,))}
    return ResNet((32, 64, 128, 128), 12), images


def _unet() -> Model:
    images = {"image": torch.randn(BATCH, 3, 16, 16), "noise": torch.randn(BATCH, 3, 16, 16)}
    return UNet(48), {**images, "step": torch.rand(BATCH)}


MODELS: dict[str, Callable[[], Model]] = {
    "MLP": _mlp,
    "GPT": _gpt,
    "GPT-2": _gpt2,
    "Llama": _llama,
    "Mixtral": _mixtral,
    "BERT": _bert,
    "ViT": _vit,
    "T5": _t5,
    "ResNet": _resnet,
    "U-Net": _unet,
}


def build(name: str) -> Model:
    """A model and the keyword arguments of a call, in float32, seeded."""
    with fixed_seed(torch.float32, 0):
        return MODELS[name]()
