"""Models of real width on the meta device, with few layers: what plans are judged by.

Each function returns a module and the keyword arguments of one training call, all on the meta device, so that building
and planning cost neither memory nor numbers. `layers` cuts the depth; widths, heads, vocabularies and image sizes are
those of the models named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from attention import causal_attention
from torch import Tensor, nn

Example = tuple[nn.Module, dict[str, Tensor]]


def gpt2_medium(
    layers: int = 2,
    batch: int = 8,
    sequence: int = 1024,
    vocabulary: int = 50304,
    dtype: torch.dtype = torch.bfloat16,
) -> Example:
    """GPT-2 medium: width 1024, 16 heads, tied head; its vocabulary of 50257 padded as GPUs like it."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=1024,
        n_embd=1024,
        n_layer=layers,
        n_head=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _language_model(transformers.GPT2LMHeadModel, config, batch, sequence, dtype)


def llama3_8b(layers: int = 2, batch: int = 8, sequence: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Example:
    """Llama-3-8B: width 4096, 32 query heads over 8 of keys and values, vocabulary 128256."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    return _language_model(transformers.LlamaForCausalLM, config, batch, sequence, dtype)


def mixtral_8x7b(layers: int = 2, batch: int = 8, sequence: int = 4096, experts: str = "grouped_mm") -> Example:
    """Mixtral-8x7B: width 4096, 8 experts of 14336 of which a token sees two; `experts` says how they are computed."""
    config = transformers.MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=8192,
        rope_theta=1000000.0,
        sliding_window=None,
        use_cache=False,
        experts_implementation=experts,
    )
    return _language_model(transformers.MixtralForCausalLM, config, batch, sequence, torch.bfloat16)


def dna_bert(layers: int = 2, batch: int = 1, sequence: int = 8192) -> Example:
    """DNABERT's shape, BERT-base over 6-mers (4101, here 4104 of them), for sequences far longer than 512.

    Its 12 heads are not divided by 8 devices: a single sequence can only be split along its tokens.
    """
    config = transformers.BertConfig(
        vocab_size=4104,
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _language_model(transformers.BertForMaskedLM, config, batch, sequence, torch.bfloat16)


def bert_large(layers: int = 24, batch: int = 8, sequence: int = 128, dtype: torch.dtype = torch.float32) -> Example:
    """BERT-Large: width 1024, 16 heads, vocabulary 30522."""
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _language_model(transformers.BertForMaskedLM, config, batch, sequence, dtype)


def whisper_medium(layers: int, batch: int) -> Example:
    """Whisper medium: width 1024, 16 heads, 30 seconds of sound, 448 tokens; dropout is 0 there."""
    config = transformers.WhisperConfig(
        d_model=1024,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        module = transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16).train()
        sound = torch.empty(batch, 80, 3000, dtype=torch.bfloat16)
        return module, {"input_features": sound, "labels": torch.empty(batch, 448, dtype=torch.long)}


def _language_model(
    build: Callable[[Any], nn.Module], config: Any, batch: int, sequence: int, dtype: torch.dtype
) -> Example:
    with torch.device("meta"):
        tokens = torch.empty(batch, sequence, dtype=torch.long)
        return build(config).to(dtype).train(), {"input_ids": tokens, "labels": tokens.clone()}


def vit_large(layers: int = 2, batch: int = 64) -> Example:
    """ViT-L/16: width 1024, 16 heads, images of 224 by 224 in patches of 16, 1000 classes."""
    config = transformers.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        image_size=224,
        patch_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=1000,
        problem_type="single_label_classification",
    )
    with torch.device("meta"):
        module = transformers.ViTForImageClassification(config).to(torch.bfloat16).train()
        images = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16)
        return module, {"pixel_values": images, "labels": torch.empty(batch, dtype=torch.long)}


class MixtureOfExperts(nn.Module):
    """GShard's layer: top-2 gating, a fixed capacity, dispatch and combination by einsum (Algorithm 1 there)."""

    def __init__(self, width: int, inner: int, experts: int, capacity: float = 2.0) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is `[groups, tokens, width]`; every group has places of its own in every expert."""
        combine = self._combine(self.gate(x).float().softmax(-1)).to(x.dtype)
        dispatched = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        inner = F.relu(torch.einsum("egcm,emh->egch", dispatched, self.up))
        return torch.einsum("gsec,egcm->gsm", combine, torch.einsum("egch,ehm->egcm", inner, self.down))

    def _combine(self, gates: Tensor) -> Tensor:
        """Weights `[groups, tokens, experts, capacity]`; a token beyond an expert's capacity has none there."""
        capacity = int(self.capacity * gates.shape[1] / self.experts)
        numbers = torch.arange(self.experts, device=gates.device)
        places = torch.arange(capacity, device=gates.device)
        first = (gates.argmax(-1, keepdim=True) == numbers).to(gates.dtype)
        second = ((gates * (1 - first)).argmax(-1, keepdim=True) == numbers).to(gates.dtype)
        place_of_first = first.cumsum(1) - 1
        place_of_second = second.cumsum(1) - 1 + first.sum(1, keepdim=True)
        total = (gates * (first + second)).sum(-1, keepdim=True)
        return sum(
            (gates * chosen / total).unsqueeze(-1) * (chosen.unsqueeze(-1) * (place.unsqueeze(-1) == places))
            for chosen, place in ((first, place_of_first), (second, place_of_second))
        )


class _FeedForward(nn.Module):
    """What a layer without experts has in their place."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class _ExpertBlock(nn.Module):
    """A pre-norm transformer layer whose feed-forward part is a mixture of experts, or, of none, a plain one."""

    def __init__(self, width: int, heads: int, inner: int, experts: int) -> None:
        super().__init__()
        self.heads, self.fused = heads, True
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.moe = MixtureOfExperts(width, inner, experts) if experts else _FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        query, key, value = (
            projection(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = causal_attention(query, key, value, fused=self.fused)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class GShard(nn.Module):
    """A language model with experts in one layer of `every`: `forward(input_ids, labels)` returns the loss."""

    def __init__(
        self, width: int, heads: int, inner: int, experts: int, layers: int, vocabulary: int, every: int = 1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        counts = (0 if layer % every else experts for layer in range(layers))
        self.layers = nn.ModuleList(_ExpertBlock(width, heads, inner, count) for count in counts)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def gshard(layers: int = 2, batch: int = 8, sequence: int = 1024, experts: int = 8) -> Example:
    """A GShard-style mixture of experts: width 2048, 16 heads, experts of 8192."""
    with torch.device("meta"):
        module = GShard(2048, 16, 8192, experts, layers, 32000).to(torch.bfloat16)
        tokens = torch.empty(batch, sequence, dtype=torch.long)
        return module, {"input_ids": tokens, "labels": tokens.clone()}


class Bottleneck(nn.Module):
    """The residual block of ResNet-50; its 3 by 3 convolution has `widen` times as many channels as the one before."""

    def __init__(self, inputs: int, width: int, widen: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, widen * width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(widen * width)
        self.conv3 = nn.Conv2d(widen * width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stages of bottlenecks and a classifier: `forward(images, labels)` returns the loss."""

    def __init__(self, depths: tuple[int, ...], channels: int, widen: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        inputs = channels
        for stage, depth in enumerate(depths):
            width = channels * 2**stage
            for block in range(depth):
                stride = 2 if stage and block == 0 else 1
                blocks.append(Bottleneck(inputs, width, widen, 4 * width, stride))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1)
        return F.cross_entropy(self.classifier(features).float(), labels)


def resnet50(
    classes: int = 100_000,
    batch: int = 256,
    depths: tuple[int, ...] = (3, 4, 6, 3),
    dtype: torch.dtype = torch.bfloat16,
) -> Example:
    """ResNet-50 with a large classifier, which is most of its parameters (Whale 2.1 and 5.1.2)."""
    with torch.device("meta"):
        return ResNet(depths, 64, 1, classes).to(dtype), _images(batch, classes, dtype)


def wide_resnet(
    batch: int = 4, depths: tuple[int, ...] = (3, 4, 6, 3), channels: int = 320, widen: int = 2, classes: int = 1024
) -> Example:
    """Wide-ResNet-50 of 320 channels, twice as wide inside (Rhino Table 4, WR-1.3B); 1024 classes.

    Widened as in Alpa's benchmarks, which have models of the same channels and factors: by its 3 by 3 convolutions.
    """
    with torch.device("meta"):
        module = ResNet(depths, channels, widen, classes).to(torch.bfloat16)
        return module, _images(batch, classes, torch.bfloat16)


def _images(batch: int, classes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"images": torch.empty(batch, 3, 224, 224, dtype=dtype), "labels": torch.empty(batch, dtype=torch.long)}


class VGG(nn.Module):
    """VGG: convolutions, in VGG-19 sixteen, and three linear layers; `forward(images, labels)` returns the loss."""

    def __init__(
        self,
        classes: int,
        stages: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)),
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width, depth in stages:
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
                inputs = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU())
        self.classifier = nn.Linear(4096, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.hidden(self.features(images).flatten(1))).float(), labels)


def vgg19(classes: int = 1_000_000, batch: int = 1024, dtype: torch.dtype = torch.bfloat16) -> Example:
    """VGG-19 with a million classes: 4.2 billion parameters, nearly all of them the classifier's (Rhino Table 3)."""
    with torch.device("meta"):
        return VGG(classes).to(dtype), _images(batch, classes, dtype)


class _Convolutions(nn.Module):
    """Two convolutions with group norms and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return y + self.shortcut(x)


class _ImageAttention(nn.Module):
    """Self-attention over the pixels of an image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (
            projection(pixels).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.out(attended).transpose(1, 2).unflatten(2, tuple(x.shape[2:]))


class UNet(nn.Module):
    """The denoising network of a diffusion model: `forward(images, noise)` returns the mean squared error."""

    def __init__(self, widths: tuple[int, ...], heads: int) -> None:
        super().__init__()
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down = nn.ModuleList(_Convolutions(inputs, outputs) for inputs, outputs in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for width in widths)
        self.middle = nn.Sequential(_Convolutions(widths[-1], widths[-1]), _ImageAttention(widths[-1], heads))
        self.up = nn.ModuleList(_Convolutions(2 * outputs, inputs) for inputs, outputs in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x, kept = self.first(images), []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            x = down(x)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x)
        for up, skipped in zip(self.up, reversed(kept), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skipped], 1))
        return F.mse_loss(self.last(F.silu(x)), noise)


def unet(batch: int = 32, size: int = 64, widths: tuple[int, ...] = (320, 640, 1280)) -> Example:
    """A latent diffusion U-Net: 64 by 64 latents of 4 channels, 320 channels and more, attention in the middle."""
    with torch.device("meta"):
        images = torch.empty(batch, 4, size, size, dtype=torch.bfloat16)
        return UNet(widths, 8).to(torch.bfloat16), {"images": images, "noise": images.clone()}
