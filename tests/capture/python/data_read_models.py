"""Small models of `transformers` that ask for numbers in their inputs, and the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ModelCall = tuple[nn.Module, dict[str, Any]]
SMALL: dict[str, Any] = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 6}
LAYERS: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


class SquaredOutputsLoss(nn.Module):
    """The loss of some outputs of a model, by name: sums of squares, each weighted by its place."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model.double(), names

    def forward(self, **inputs: Any) -> Tensor:
        outputs = self.model(**inputs)
        return torch.stack([(place + 1) * outputs[name].square().mean() for place, name in enumerate(self.names)]).sum()


def _images() -> dict[str, Tensor]:
    """Two images, one of them padded."""
    mask = torch.ones(2, 32, 32, dtype=torch.int64)
    mask[1, :, 16:] = 0
    return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64), "pixel_mask": mask}


def _backbone(**said: Any) -> transformers.ResNetConfig:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetConfig(**sizes, **said)


def detr() -> ModelCall:
    backbone = _backbone(out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
        dropout=0.0, **SMALL, **LAYERS,
    )  # fmt: skip
    return SquaredOutputsLoss(transformers.DetrForObjectDetection(config), "logits", "pred_boxes"), _images()


def wav2vec2() -> ModelCall:
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 8), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
    )  # fmt: skip
    labels = torch.tensor([[3, 5, 7, -100], [2, 4, 6, 8]])
    inputs = {"input_values": torch.randn(2, 400, dtype=torch.float64), "attention_mask": torch.ones(2, 400).long()}
    inputs["attention_mask"][0, 300:] = 0
    return transformers.Wav2Vec2ForCTC(config).double(), {**inputs, "labels": labels}


def qwen2_vl() -> ModelCall:
    text = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=29, video_token_id=30, vision_start_token_id=28,
        vision_end_token_id=27,
    )  # fmt: skip
    tokens = torch.tensor([[1, 28, 29, 29, 29, 29, 27, 5, 6, 7], [28, 29, 29, 29, 29, 27, 9, 8, 7, 3]])
    inputs = {
        "input_ids": tokens,
        "labels": tokens,
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (tokens == 29).long(),
    }
    return transformers.Qwen2VLForConditionalGeneration(config).double(), {**inputs, "use_cache": False}


def rt_detr() -> ModelCall:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone=None, use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone,
        freeze_backbone_batch_norms=False, encoder_hidden_dim=16, encoder_in_channels=[8, 16], feat_strides=[8, 16],
        encode_proj_layers=[1], num_feature_levels=2, encoder_attention_heads=2, decoder_in_channels=[16, 16],
        decoder_n_points=2, num_denoising=0, dropout=0.0,
        **{name: value for name, value in {**SMALL, **LAYERS}.items() if name != "encoder_attention_heads"},
    )  # fmt: skip
    return SquaredOutputsLoss(transformers.RTDetrForObjectDetection(config), "logits", "pred_boxes"), _images()


def mask2former() -> ModelCall:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, backbone=None, use_timm_backbone=False, use_pretrained_backbone=False,
        feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16, encoder_layers=1,
        num_attention_heads=2, dim_feedforward=16, decoder_layers=1, num_queries=6, dropout=0.0,
    )  # fmt: skip
    names = ("class_queries_logits", "masks_queries_logits")
    return SquaredOutputsLoss(transformers.Mask2FormerForUniversalSegmentation(config), *names), _images()


def encodec() -> ModelCall:
    config = transformers.EncodecConfig(
        hidden_size=16, num_filters=4, upsampling_ratios=[2, 2], num_lstm_layers=1, codebook_size=16, codebook_dim=16,
        sampling_rate=64, target_bandwidths=[0.064, 0.128],
    )  # fmt: skip
    inputs = {"input_values": torch.randn(2, 1, 64, dtype=torch.float64), "bandwidth": 0.128}
    return SquaredOutputsLoss(transformers.EncodecModel(config), "audio_values"), inputs


def mimi() -> ModelCall:
    config = transformers.MimiConfig(
        hidden_size=16, num_filters=4, upsampling_ratios=[2, 2], codebook_size=16, codebook_dim=8, num_quantizers=3,
        vector_quantization_hidden_dimension=8, upsample_groups=16, num_hidden_layers=1, intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=2, sampling_rate=64,
    )  # fmt: skip
    inputs = {"input_values": torch.randn(2, 1, 64, dtype=torch.float64)}
    return SquaredOutputsLoss(transformers.MimiModel(config), "audio_values"), inputs


def eomt() -> ModelCall:
    config = transformers.EomtConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, num_blocks=1,
        num_queries=5, num_upscale_blocks=1, num_register_tokens=1, mlp_ratio=1,
    )  # fmt: skip
    model = transformers.EomtForUniversalSegmentation(config)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    return SquaredOutputsLoss(model, "masks_queries_logits", "class_queries_logits"), inputs


_SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "use_cache": False,
}  # fmt: skip


def _series() -> dict[str, Tensor]:
    shapes = {"past_values": (2, 10), "past_time_features": (2, 10, 1), "future_values": (2, 4)}
    shapes |= {"future_time_features": (2, 4, 1)}
    inputs = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {**inputs, "past_observed_mask": torch.ones(2, 10, dtype=torch.float64)}


def informer() -> ModelCall:
    """With the scaling and the distributions of the Time Series Transformer."""
    return transformers.InformerForPrediction(transformers.InformerConfig(**_SERIES)).double(), _series()


def big_bird() -> ModelCall:
    config = transformers.BigBirdConfig(
        vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, block_size=4,
        num_random_blocks=1, attention_type="block_sparse", sep_token_id=3,
    )  # fmt: skip
    tokens = torch.randint(3, 48, (2, 48))
    return transformers.BigBirdForMaskedLM(config).double(), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], ModelCall]] = {
    "DETR": detr,
    "RT-DETR": rt_detr,
    "Mask2Former": mask2former,
    "wav2vec2 with CTC": wav2vec2,
    "Qwen2-VL": qwen2_vl,
    "EnCodec": encodec,
    "Mimi": mimi,
    "EoMT": eomt,
    "Informer": informer,
    "BigBird": big_bird,
}
