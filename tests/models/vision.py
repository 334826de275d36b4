"""Vision models of Hugging Face, alone and with text or speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.models.common import BATCH, HIDDEN, SEQUENCE, SMALL, VOCABULARY, Model, fixed_seed, tokens


def hf_vit(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, layers: int = 2) -> Model:
    """Hugging Face ViT: images of 12 by 12 in patches of 4 by 4, 3 classes."""
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        image_size=12,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        problem_type="single_label_classification",
    )
    with fixed_seed(dtype, seed):
        module = transformers.ViTForImageClassification(config)
        return module.train(), {"pixel_values": torch.randn(batch, 3, 12, 12), "labels": torch.randint(0, 3, (batch,))}


def hf_swin(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face Swin: two stages of shifted windows of 2 by 2 over 8 by 8 patches."""
    config = transformers.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=12,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=2,
        drop_path_rate=0.0,
        num_labels=12,
    )
    return _classifier(transformers.SwinForImageClassification, config, dtype, seed, batch, size=16)


def hf_convnext(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face ConvNeXt: two stages of depthwise convolutions."""
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[12, 24], depths=[1, 1], drop_path_rate=0.0, image_size=16, num_labels=12
    )
    return _classifier(transformers.ConvNextForImageClassification, config, dtype, seed, batch, size=16)


def hf_clip(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face CLIP: a text and an image tower of one layer each, and the loss that contrasts them."""
    tower = {
        "hidden_size": SMALL,
        "intermediate_size": 2 * SMALL,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "projection_dim": 12,
    }
    config = transformers.CLIPConfig(
        text_config={
            **tower,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": SEQUENCE,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        vision_config={**tower, "image_size": 12, "patch_size": 4},
        projection_dim=12,
    )
    with fixed_seed(dtype, seed):
        module = transformers.CLIPModel(config)
        inputs = {"input_ids": tokens(batch), "pixel_values": torch.randn(batch, 3, 12, 12), "return_loss": True}
        return module.train(), inputs


def hf_whisper(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face Whisper: speech of 24 frames, encoder and decoder of one layer each."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=12,
        d_model=SMALL,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * SMALL,
        decoder_ffn_dim=2 * SMALL,
        max_source_positions=SEQUENCE,
        max_target_positions=SEQUENCE,
        dropout=0.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        decoder_start_token_id=2,
        use_cache=False,
    )
    with fixed_seed(dtype, seed):
        module = transformers.WhisperForConditionalGeneration(config)
        inputs = {"input_features": torch.randn(batch, 12, 2 * SEQUENCE), "labels": tokens(batch)}
        return module.train(), inputs


def _classifier(
    build: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype, seed: int, batch: int, size: int
) -> Model:
    """The model of a configuration in training, with square images and 12 classes."""
    with fixed_seed(dtype, seed):
        module = build(config)
        images = torch.randn(batch, 3, size, size)
        return module.train(), {"pixel_values": images, "labels": torch.randint(0, 12, (batch,))}
