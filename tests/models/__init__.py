"""Small models built from configurations, shared by all tests: each returns a module and its keyword arguments.

Batch 12, sequences of 12, hidden sizes divisible by 2, 3 and 4; seeded: two calls build the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.models.basic import Attention, Block, Gpt, Mlp, gpt, mlp
from tests.models.common import BATCH, HIDDEN, SEQUENCE, SMALL, VOCABULARY, Model
from tests.models.convolutional import ResNet, resnet18, unet, vgg, wide_resnet
from tests.models.decoders import (
    hf_deepseek_v3,
    hf_gemma,
    hf_gpt2,
    hf_llama,
    hf_mixtral,
    hf_opt,
    hf_qwen3,
    hf_qwen3_moe,
)
from tests.models.encoders import hf_albert, hf_bert, hf_deberta, hf_roberta, hf_t5
from tests.models.recurrent import gnmt, lstm
from tests.models.sparse import dlrm, gshard
from tests.models.vision import hf_clip, hf_convnext, hf_swin, hf_vit, hf_whisper

__all__ = [
    "ALL",
    "BATCH",
    "HIDDEN",
    "SEQUENCE",
    "SMALL",
    "VOCABULARY",
    "ZOO",
    "Attention",
    "Block",
    "Gpt",
    "Mlp",
    "Model",
    "ResNet",
    "gpt",
    "hf_bert",
    "hf_gpt2",
    "hf_llama",
    "hf_vit",
    "mlp",
    "resnet18",
]

ALL: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "gpt": gpt,
    "hf_gpt2": hf_gpt2,
    "hf_llama": hf_llama,
    "hf_bert": hf_bert,
    "hf_vit": hf_vit,
    "resnet18": resnet18,
}
"""The models that most tests use."""

ZOO: dict[str, Callable[..., Model]] = {
    **ALL,
    "hf_t5": hf_t5,
    "hf_qwen3": hf_qwen3,
    "hf_gemma": hf_gemma,
    "hf_opt": hf_opt,
    "hf_mixtral": hf_mixtral,
    "hf_qwen3_moe": hf_qwen3_moe,
    "hf_deepseek_v3": hf_deepseek_v3,
    "hf_roberta": hf_roberta,
    "hf_albert": hf_albert,
    "hf_deberta": hf_deberta,
    "hf_clip": hf_clip,
    "hf_whisper": hf_whisper,
    "hf_swin": hf_swin,
    "hf_convnext": hf_convnext,
    "vgg": vgg,
    "wide_resnet": wide_resnet,
    "unet": unet,
    "lstm": lstm,
    "gnmt": gnmt,
    "dlrm": dlrm,
    "gshard": gshard,
}
"""Those and the kinds of models that people train: all must go through untouched."""
