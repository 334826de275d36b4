"""Attention kernels of CUDA on the CPU: references that refuse what the kernels would refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from tests.kernels.choice import Choice
from tests.kernels.cudnn import Cudnn
from tests.kernels.efficient import Efficient
from tests.kernels.flash import Flash


@contextmanager
def cuda_attention(*, any_type: bool = False, order: Sequence[SDPBackend] | None = None) -> Iterator[None]:
    """While active, torch's operators for CUDA's fused attention kernels run on the CPU, forward and backward.

    Args:
        any_type: kernels that a GPU has for 16-bit types alone take float32 and float64 too, as comparisons to 1e-9
            need it; statistics are in float64 then.
        order: if given, `aten._fused_sdp_choice` answers as a GPU that prefers kernels in this order, for calls that
            they take; else as torch does on the CPU.
    """
    kernels: dict[str, Callable[..., Any]] = {**_kernels(any_type)}
    if order is not None:
        kernels["_fused_sdp_choice"] = Choice(tuple(order), any_type)
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*\\s.*Overriding a previously registered kernel")
            for name, kernel in kernels.items():
                library.impl(name, kernel, "CPU", allow_override=True)
        yield


def _kernels(any_type: bool) -> dict[str, Callable[..., Any]]:
    flash, efficient, cudnn = Flash(any_type), Efficient(any_type), Cudnn(any_type)
    return {
        "_flash_attention_forward": flash.forward,
        "_flash_attention_backward": flash.backward,
        "_scaled_dot_product_flash_attention": flash.scaled_attention,
        "_scaled_dot_product_flash_attention_backward": flash.scaled_attention_backward,
        "_scaled_dot_product_efficient_attention": efficient.scaled_attention,
        "_scaled_dot_product_efficient_attention_backward": efficient.scaled_attention_backward,
        "_scaled_dot_product_cudnn_attention": cudnn.scaled_attention,
        "_scaled_dot_product_cudnn_attention_backward": cudnn.scaled_attention_backward,
    }
