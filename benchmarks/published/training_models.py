"""Models of measured training steps, on the meta device in float32, at any depth."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers
from architectures import Example
from experts import Roles
from torch import Tensor, nn

import autoshard
from published.models import LossAlone, image_classifier

_LLAMA = Roles(
    column=dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), (0, 1)),
    row={"*.o_proj": 1, "*.down_proj": 1},
    vocabulary=("*embed_tokens", "*lm_head"),
)
_MEGATRON = Roles(
    column={"*.qkv": (0, 3), "*.up": (0, 1)}, row={"*.out": 1, "*.down": 1}, vocabulary=("tokens", "head")
)


_DROPPED = 0.1  # Megatron-LM's default for scores and for the residual stream


@dataclass(frozen=True)
class Model:
    """An architecture of some size.

    Attributes:
        name: for people.
        layers: how many it has; 0 where the depth can not be changed.
        width: of the residual stream.
        vocabulary: its tokens, or classes.
        build: makes it, of so many layers, for so many samples of so many tokens; the last two arguments are stages
            along a pipeline and devices of a tensor parallel group, which only models for pipelines look at.
        roles: which layers Megatron splits.
        optimizer: that trains it, as `autoshard.plan` takes it.
    """

    name: str
    layers: int
    width: int
    vocabulary: int
    build: Callable[[int, int, int, int, int], Example]
    roles: Roles = field(default_factory=Roles)
    optimizer: str = "adamw"


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """One fused operator that is told that it is causal, as torchtitan, fms and LLM Foundry call it, and no mask."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


CAUSAL = "causal"
"""Name of that attention in `transformers`, which makes no mask for it."""
transformers.AttentionInterface.register(CAUSAL, _causal_attention)


def _llama(
    name: str, layers: int, width: int, inner: int, heads: int, key_heads: int, vocabulary: int = 128256
) -> Model:
    def build(depth: int, batch: int, sequence: int, stages: int, tensor: int) -> Example:
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=sequence,
            use_cache=False,
        )
        return _language_model(transformers.LlamaForCausalLM, config, batch, sequence)

    return Model(name, layers, width, vocabulary, build, _LLAMA)


def _mpt(name: str, layers: int, width: int, heads: int) -> Model:
    """An MPT with learned positions and biases, which is GPT-2's architecture with an exact GELU."""
    vocabulary = 50368

    def build(depth: int, batch: int, sequence: int, stages: int, tensor: int) -> Example:
        config = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=sequence,
            n_embd=width,
            n_layer=depth,
            n_head=heads,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            loss_type="ForCausalLM",
        )
        return _language_model(transformers.GPT2LMHeadModel, config, batch, sequence)

    return Model(name, layers, width, vocabulary, build)


def _language_model(
    build: Callable[..., nn.Module], config: transformers.PretrainedConfig, batch: int, sequence: int
) -> Example:
    config._attn_implementation = CAUSAL
    with torch.device("meta"):
        tokens = torch.empty(batch, sequence, dtype=torch.long)
        return LossAlone(build(config).train()), {"input_ids": tokens, "labels": tokens.clone()}


class Block(nn.Module):
    """A layer of Megatron's GPT before FlashAttention: scores are held, softmax is one kernel with scale and mask.

    That kernel reads and writes the scores once, so that here it is a softmax alone. Dropout follows it, as Korthikanti
    et al. count its masks (2022, Section 4), and the output of both halves (Narayanan et al. 2021, Section 4.2).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(_DROPPED)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
        attended = self.dropout(scores.softmax(-1)) @ value
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class MegatronGPT(nn.Module):
    """`forward(tokens, targets)` returns the mean cross-entropy; stages of a pipeline are marked in it.

    A stage has equally many layers, the first the embeddings besides, the last the head.
    """

    def __init__(
        self, layers: int, width: int, heads: int, sequence: int, vocabulary: int, stages: int, tensor: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.stages, self.tensor = stages, tensor

    def _stage(self) -> contextlib.AbstractContextManager[object]:
        return autoshard.split(self.tensor) if self.stages > 1 else contextlib.nullcontext()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        each = len(self.blocks) // self.stages
        groups = [list(self.blocks)[each * stage : each * (stage + 1)] for stage in range(self.stages)]
        with self._stage():
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            x = nn.Sequential(*groups[0])(F.dropout(x, _DROPPED, self.training))
            if self.stages == 1:
                return self._loss(x, targets)
        for group in groups[1:-1]:
            with self._stage():
                x = nn.Sequential(*group)(x)
        with self._stage():
            return self._loss(nn.Sequential(*groups[-1])(x), targets)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _megatron(name: str, layers: int, width: int, heads: int) -> Model:
    vocabulary = 51200

    def build(depth: int, batch: int, sequence: int, stages: int, tensor: int) -> Example:
        with torch.device("meta"):
            tokens = torch.empty(batch, sequence, dtype=torch.long)
            module = MegatronGPT(depth, width, heads, sequence, vocabulary, stages, tensor)
        return module, {"tokens": tokens, "targets": tokens.clone()}

    return Model(name, layers, width, vocabulary, build, _MEGATRON)


def _resnet50(depth: int, batch: int, sequence: int, stages: int, tensor: int) -> Example:
    return image_classifier(1000, batch)


MODELS = {
    "llama-2-7b": _llama("Llama 2 7B", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _llama("Llama 2 13B", 40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _llama("Llama 2 70B", 80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": _llama("Llama 3 8B", 32, 4096, 14336, 32, 8),
    "llama-3-70b": _llama("Llama 3 70B", 80, 8192, 28672, 64, 8),
    "llama-3-405b": _llama("Llama 3.1 405B", 126, 16384, 53248, 128, 8),
    "mpt-125m": _mpt("MPT 125M", 12, 768, 12),
    "mpt-1b": _mpt("MPT 1B", 24, 2048, 16),
    "mpt-3b": _mpt("MPT 3B", 32, 2560, 20),
    "mpt-7b": _mpt("MPT 7B", 32, 4096, 32),
    "mpt-13b": _mpt("MPT 13B", 40, 5120, 40),
    "mpt-30b": _mpt("MPT 30B", 48, 7168, 56),
    "mpt-70b": _mpt("MPT 70B", 80, 8192, 64),
    "gpt-1.7b": _megatron("GPT 1.7B", 24, 2304, 24),
    "gpt-3.6b": _megatron("GPT 3.6B", 30, 3072, 32),
    "gpt-7.5b": _megatron("GPT 7.5B", 36, 4096, 32),
    "gpt-18b": _megatron("GPT 18.4B", 40, 6144, 48),
    "gpt-22b": _megatron("GPT 22B", 48, 6144, 64),
    "gpt-39b": _megatron("GPT 39.1B", 48, 8192, 64),
    "gpt-76b": _megatron("GPT 76.1B", 60, 10240, 80),
    "gpt-146b": _megatron("GPT 145.6B", 80, 12288, 96),
    "gpt-175b": _megatron("GPT 175B", 96, 12288, 96),
    "gpt-310b": _megatron("GPT 310.1B", 96, 16384, 128),
    "gpt-530b": _megatron("GPT 529.6B", 105, 20480, 128),
    "gpt-1t": _megatron("GPT 1008B", 128, 25600, 160),
    "resnet-50": Model("ResNet-50", 0, 2048, 1000, _resnet50, optimizer="momentum"),
}
