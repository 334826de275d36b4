"""The papers' models, on the meta device in float32; each function returns a module and a call's keyword arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from architectures import VGG, Example, GShard, bert_large, resnet50, unet, wide_resnet
from gpt import GPT, Shape
from torch import Tensor, nn

from published.plans import layers

SEQUENCE = 1024
"""Tokens of a sequence of the GPT and the mixture of experts, as Alpa's benchmarks of the same sizes have them."""


def unfused(module: nn.Module) -> nn.Module:
    """The module with attention in several operators, as the papers' systems computed it: one came with FlashAttention.

    Dao et al., "FlashAttention" (2022), is younger than these systems; TensorFlow and XLA have no such operator.
    """
    for part in module.modules():
        if hasattr(part, "fused"):
            part.fused = False
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation("eager")
    return module


def image_classifier(classes: int, batch: int, depth: float = 1.0) -> Example:
    """ResNet-50 whose norms are taken over every image alone."""
    depths = tuple(layers(depth, blocks) for blocks in (3, 4, 6, 3))
    module, inputs = resnet50(classes, batch, depths, dtype=torch.float32)
    return without_statistics(module), inputs


def without_statistics(module: nn.Module) -> nn.Module:
    """The module with group norms in place of batch norms, which would exchange statistics between devices."""
    for path, norm in list(module.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, nn.GroupNorm(32, norm.num_features, device="meta"))
    return module


class LossAlone(nn.Module):
    """A model of transformers whose call returns the loss without the logits, which nobody needs whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


def bert(batch: int, depth: float = 1.0) -> Example:
    """BERT-Large on sequences of 128 tokens."""
    module, inputs = bert_large(layers(depth, 24), batch)
    return LossAlone(unfused(module)), inputs


def t5(
    width: int, heads: int, inner: int, depth: int, batch: int, lengths: tuple[int, int], vocabulary: int
) -> Example:
    """An encoder and a decoder of `depth` layers each, for texts of so many tokens going in and coming out."""
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=inner,
        num_layers=depth,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        module = transformers.T5ForConditionalGeneration(config).train()
        given, wanted = (torch.empty(batch, length, dtype=torch.long) for length in lengths)
    return LossAlone(unfused(module)), {"input_ids": given, "labels": wanted}


def t5_large(batch: int, depth: float = 1.0) -> Example:
    """T5-Large; 512 tokens in and 114 out, as it was pre-trained."""
    return t5(1024, 16, 4096, layers(depth, 24, least=2), batch, (512, 114), 32128)


def m6_10b(batch: int, depth: float = 1.0) -> Example:
    """Ten billion parameters in 24 encoder and 24 decoder layers; 256 tokens in and 256 out."""
    return t5(3840, 30, 4 * 3840, layers(depth, 24, least=4), batch, (256, 256), 21128)


class GNMT(nn.Module):
    """A recurrent translator of eight layers each way: `forward(source, target, labels)` returns the loss.

    The first encoder layer reads in both directions; what the first decoder layer says attends to the encoder, and all
    others read both; layers from the third on have shortcuts (Wu et al., 2016).
    """

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * width, width, batch_first=True)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth - 2))
        self.query = nn.Linear(width, width, bias=False)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(depth - 1))
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        read = self.second(self.both_ways(self.source(source))[0])[0]
        for layer in self.encoder:
            read = layer(read)[0] + read
        said = self.first(self.target(target))[0]
        context = (self.query(said) @ read.transpose(1, 2)).softmax(-1) @ read
        for index, layer in enumerate(self.decoder):
            new = layer(torch.cat([said, context], -1))[0]
            said = new + said if index else new
        return F.cross_entropy(self.classifier(said).flatten(0, 1), labels.flatten())


def gnmt(batch: int, depth: float = 1.0) -> Example:
    """GNMT: width 1024, vocabulary 32,000, 50 tokens in and out."""
    with torch.device("meta"):
        tokens = torch.empty(batch, 50, dtype=torch.long)
        module = GNMT(1024, layers(depth, 8, least=3), 32000)
    return module, {"source": tokens, "target": tokens.clone(), "labels": tokens.clone()}


def gpt(depth: int, width: int, heads: int, batch: int) -> Example:
    """A GPT of Rhino's Table 1: vocabulary 51200, tied head."""
    with torch.device("meta"):
        module = GPT(Shape(depth, width, heads, SEQUENCE, 51200))
        tokens = torch.empty(batch, SEQUENCE, dtype=torch.long)
    module.head.weight = module.tokens.weight
    return unfused(module), {"tokens": tokens, "targets": tokens.clone()}


def mixture(depth: int, width: int, inner: int, experts: int, batch: int) -> Example:
    """A mixture of experts of Rhino's Table 2: experts in every second layer, which is what its sizes say."""
    with torch.device("meta"):
        module = GShard(width, 16, inner, experts, depth, 32000, every=2)
        tokens = torch.empty(batch, SEQUENCE, dtype=torch.long)
    return unfused(module), {"input_ids": tokens, "labels": tokens.clone()}


def vgg19_million(batch: int) -> Example:
    """VGG-19 with a million classes (Rhino Table 3)."""
    with torch.device("meta"):
        inputs = {"images": torch.empty(batch, 3, 224, 224), "labels": torch.empty(batch, dtype=torch.long)}
        return VGG(1_000_000), inputs


def wide(channels: int, widen: int, blocks: tuple[int, ...], batch: int) -> Example:
    """A Wide-ResNet of Rhino's Table 4."""
    module, inputs = wide_resnet(batch, blocks, channels, widen)
    inputs["images"] = inputs["images"].float()
    return without_statistics(module.float()), inputs


def denoiser(batch: int) -> Example:
    """The U-Net of a diffusion model (Rhino Table 3): 29 million parameters, where the paper has 33."""
    module, inputs = unet(batch, widths=(160, 320, 640))
    return module.float(), {name: value.float() for name, value in inputs.items()}
