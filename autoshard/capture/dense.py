"""Sparse, nested and quantized tensors: not dense, so without the strides that programs and shards need."""

from __future__ import annotations

import torch

_ADVICE = {
    "sparse": (
        "make it dense outside of forward (x.to_dense()), or pass its indices and values and multiply by reading rows "
        "and index_add: x.new_zeros(rows, n).index_add(0, row, value[:, None] * x[column])"
    ),
    "nested": "pad it to one length (x.to_padded_tensor(0.0)), and mask what is behind the end",
    "quantized": "dequantize it outside of forward (x.dequantize())",
    "of a library's own layout": "make it dense outside of forward (x.to_dense())",
}


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True for a dense tensor: one with strides and plain numbers."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def dense_fault(what: str, tensor: torch.Tensor) -> str:
    """Return sentences about a tensor that is not dense; `what` is their beginning."""
    if tensor.is_nested:
        kind = "nested"
    elif tensor.is_quantized:
        kind = "quantized"
    else:
        kind = "sparse" if "sparse" in str(tensor.layout) else "of a library's own layout"
    layout = "" if kind == "quantized" else f" ({tensor.layout})"
    return f"{what} is {kind}{layout}, and a program has dense tensors alone: {_ADVICE[kind]}."
