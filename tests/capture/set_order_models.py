"""Models that walk over sets of strings, whose order hangs on the process's hash seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import autoshard.operators  # noqa: F401  # which captures and rules need
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import capture, export_call

Model = tuple[nn.Module, dict[str, Any]]

KINDS = ("full", "sliding", "linear", "chunked", "global")


class Tables(nn.Module):
    """A table of positions and a mask for each kind of layer, made in the order of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in KINDS)
        for kind in KINDS:
            self.register_buffer(kind, torch.full((6,), 0.5 + len(kind)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device).to(x.dtype)
        tables, masks = {}, {}
        for kind in set(KINDS):
            with torch.autocast("cpu", enabled=False):
                tables[kind] = (positions[:, None] * getattr(self, kind)).cos().to(x.dtype)
            masks[kind] = x.new_zeros(x.shape).masked_fill(positions[:, None] > len(kind), 0.25)
            masks[kind] = masks[kind] + torch.tensor([float(len(kind)), 1, 2, 3, 4, 5], dtype=x.dtype)
        for kind, layer in zip(KINDS, self.layers, strict=True):
            x = torch.tanh(layer(x) * tables[kind] + masks[kind])
        return x.square().mean()


def tables() -> Model:
    torch.manual_seed(0)
    return Tables().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}


def modern_bert() -> Model:
    config = transformers.ModernBertConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        global_attn_every_n_layers=2,
        local_attention=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        attn_implementation="sdpa",
    )
    tokens = torch.arange(16).reshape(2, 8)
    return transformers.ModernBertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def gemma_3() -> Model:
    config = transformers.Gemma3TextConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    tokens = torch.arange(16).reshape(2, 8)
    return transformers.Gemma3ForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


MODELS: tuple[Callable[[], Model], ...] = (tables, modern_bert, gemma_3)


def order() -> list[str]:
    """The kinds as this process walks over a set of them."""
    return list(set(KINDS))


def describe_capture(make: Callable[[], Model]) -> list[str]:
    """Fingerprint and names of the joint graph of a model, and names in the forward graph, of which pipelines are."""
    module, kwargs = make()
    graph = capture(module, (), kwargs)
    forward = export_call(BoundCall.of(module, (), kwargs))
    return [
        graph.fingerprint,
        *(f"{item.kind} {item.name}" for item in graph.inputs),
        *(node.name for node in graph.graph.nodes),
        *(f"{item.kind} {item.name}" for item in forward.inputs),
        *(node.name for node in forward.graph_module.graph.nodes),
    ]
