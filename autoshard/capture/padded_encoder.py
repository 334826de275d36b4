"""`nn.TransformerEncoder` in evaluation: zeros at padded positions, which torch removes by packing.

Without gradients, torch's encoder runs its layers on nested tensors without the padded positions, and fills these with
zeros after the last layer. No graph can hold nested tensors. So the layers run on whole tensors, where no position
reads a padded one, and the zeros are filled in afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture._torch import attribute_patch


@contextlib.contextmanager
def capturable_encoder() -> Iterator[None]:
    """Context in which `nn.TransformerEncoder` returns zeros at padded positions where torch's own does."""
    torch_forward = nn.TransformerEncoder.forward

    def forward(
        encoder: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not _packs(encoder, src):
            return torch_forward(encoder, src, mask, src_key_padding_mask, is_causal)
        return _run_padded(encoder, src, src_key_padding_mask)

    with attribute_patch(nn.TransformerEncoder, "forward", forward):
        yield


def _packs(encoder: Any, src: Tensor) -> bool:
    """Return True if torch's encoder would omit padded positions, given only a padding mask."""
    layer = encoder.layers[0]
    allowed = torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)
    if not allowed or layer.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    read = (layer.self_attn, layer.self_attn.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    tensors = (src, *(tensor for part in read for tensor in part.parameters(recurse=False)))
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def _run_padded(encoder: Any, src: Tensor, padding: Tensor) -> Tensor:
    """Run an encoder, with zeros at padded positions before its last norm."""
    output = src
    for layer in encoder.layers:
        output = layer(output, src_key_padding_mask=padding)
    padded = padding.bool()
    if getattr(encoder, "mask_check", True):
        # torch omits nothing unless all padding is at the end of the rows.
        lengths = padded.logical_not().sum(1, keepdim=True)
        behind = torch.arange(padded.shape[1], device=padded.device) >= lengths
        padded = padded & (padded == behind).all()
    output = output.masked_fill(padded.unsqueeze(-1), 0.0)
    return output if encoder.norm is None else encoder.norm(output)
