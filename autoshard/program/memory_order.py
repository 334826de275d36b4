"""Kernels that read their operands as if these lay row by row: others get an error, or numbers of other elements.

torch calls them with such operands alone, or rarely with others. In a rank's program an operand may come from a
collective that left it in another order, and its shards may have dims of length one. Found by calling every operator of
torch's samples with operands in column order, and with strides that a dim of length one makes ambiguous.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_NEEDS_CONTIGUOUS = frozenset(
    {
        aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool2d_backward.default,
        aten.fractional_max_pool3d_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss2d_backward.default,
    }
)
_NEEDS_CONTIGUOUS_IMAGES_ON_CPU = frozenset({aten.native_batch_norm_backward.default})
"""Of images whose batch, height or width is one, strides fit several memory formats, and the kernel mixes them up."""

_NEEDS_CONTIGUOUS_LAST_DIM = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.view_as_complex.default,
    }
)


def supports_layout(op: Any, operand: torch.Tensor) -> bool:
    """Whether an operator may read a tensor as it lies in memory, by its strides."""
    if op in _NEEDS_CONTIGUOUS or (
        op in _NEEDS_CONTIGUOUS_IMAGES_ON_CPU and operand.ndim > 3 and operand.device.type == "cpu"
    ):
        return operand.is_contiguous()
    return op not in _NEEDS_CONTIGUOUS_LAST_DIM or operand.ndim == 0 or operand.shape[-1] < 2 or operand.stride(-1) == 1
