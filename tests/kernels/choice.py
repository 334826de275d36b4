"""The kernel that torch takes on a GPU for a call of scaled dot-product attention.

Sources, in torch: `sdp_utils.cpp` below `aten/src/ATen/native/transformers/cuda` and `sdp_utils_cpp.h` next to it
(`can_use_flash_attention`, `can_use_mem_efficient_attention`, `can_use_cudnn_attention`, `select_sdp_backend`), on
devices of compute capability 8.0 or more, without nested tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from tests.kernels import cudnn, flash
from tests.kernels.contracts import HALVES

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
AMPERE = (FLASH, EFFICIENT, MATH)
HOPPER = (CUDNN, FLASH, EFFICIENT, MATH)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of scaled dot-product attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values."""
        return self.query, self.key, self.value


@dataclass(frozen=True, slots=True)
class Choice:
    """The first kernel in an order that takes a call: `_fused_sdp_choice` of a device.

    Attributes:
        order: kernels from the first to the last resort; torch's own on devices is `AMPERE` or `HOPPER`.
        any_type: types that a device has no kernel for count as those that it has.
    """

    order: tuple[SDPBackend, ...] = AMPERE
    any_type: bool = False

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> int:
        """The number of the kernel.

        Raises:
            RuntimeError: no kernel in the order takes the call, or all that do are switched off.
        """
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        for kernel in self.order:
            allowed, takes = _RULES[kernel]
            if allowed() and takes(call, self.any_type):
                return int(kernel.value)
        raise RuntimeError("No available kernel. Aborting execution.")


def _flash(call: Call, any_type: bool) -> bool:
    # A head size that is no multiple of 8 is padded by torch before the kernel is called.
    head = call.query.shape[-1]
    square = not call.causal or call.query.shape[-2] == call.key.shape[-2]
    sizes = head == call.key.shape[-1] == call.value.shape[-1] and head <= flash.LARGEST_HEAD
    return _dense(call) and _has_allowed_type(call, HALVES, any_type) and call.mask is None and sizes and square


def _efficient(call: Call, any_type: bool) -> bool:
    elements = 4 if call.query.dtype == torch.float32 else 8
    heads = call.query.shape[-1] == call.key.shape[-1]
    sizes = all(tensor.shape[-1] % elements == 0 for tensor in call.operands)
    offsets = all(tensor.storage_offset() % elements == 0 for tensor in call.operands)
    return _dense(call) and _has_allowed_type(call, (*HALVES, torch.float32), any_type) and heads and sizes and offsets


def _cudnn(call: Call, any_type: bool) -> bool:
    heads = [tensor.shape[-1] for tensor in call.operands]
    sizes = all(head % 8 == 0 and head <= cudnn.LARGEST_HEAD for head in heads) and heads[0] == heads[1]
    counts = max(call.query.shape[:2]) <= cudnn.MOST and call.key.shape[-2] != 1
    dropout = not call.dropout or (call.dropout * 16 % 1 == 0 and call.query.shape[-2] != 1)
    return _dense(call) and _has_allowed_type(call, HALVES, any_type) and sizes and counts and dropout


def _dense(call: Call) -> bool:
    """Four dims, none of them empty, with the heads that the call speaks of, and rows that lie in one piece."""
    if any(tensor.dim() != 4 or not tensor.numel() for tensor in call.operands):
        return False
    (queries, heads), (keys, groups) = call.query.shape[:2], call.key.shape[:2]
    alike = groups == call.value.shape[1] and (heads % groups == 0 if call.grouped else heads == groups)
    masks = () if call.mask is None else (call.mask,)
    return queries == keys and alike and all(tensor.stride(-1) == 1 for tensor in (*call.operands, *masks))


def _has_allowed_type(call: Call, allowed: tuple[torch.dtype, ...], any_type: bool) -> bool:
    alike = call.query.dtype == call.key.dtype == call.value.dtype
    return alike and (any_type or call.query.dtype in allowed)


_RULES: dict[SDPBackend, tuple[Callable[[], bool], Callable[[Call, bool], bool]]] = {
    FLASH: (cuda.flash_sdp_enabled, _flash),
    EFFICIENT: (cuda.mem_efficient_sdp_enabled, _efficient),
    CUDNN: (cuda.cudnn_sdp_enabled, _cudnn),
    MATH: (cuda.math_sdp_enabled, lambda call, any_type: True),
}
