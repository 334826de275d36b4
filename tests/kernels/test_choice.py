from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.kernels.choice import AMPERE, CUDNN, EFFICIENT, FLASH, HOPPER, MATH, Choice
from tests.kernels.cuda import cuda_attention

aten = torch.ops.aten


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


SQUARE = halves(2, 4, 8, 16)
MASK = halves(8, 8)
CHOSEN = {
    "plain": (lambda: ([SQUARE] * 3, {}), FLASH, CUDNN),
    "mask": (lambda: ([SQUARE] * 3, {"attn_mask": MASK}), EFFICIENT, CUDNN),
    "float32": (lambda: ([SQUARE.float()] * 3, {}), EFFICIENT, EFFICIENT),
    "float64": (lambda: ([SQUARE.double()] * 3, {}), MATH, MATH),
    "head 12": (lambda: ([halves(2, 4, 8, 12)] * 3, {}), FLASH, FLASH),
    "head 12 with a mask": (lambda: ([halves(2, 4, 8, 12)] * 3, {"attn_mask": MASK}), MATH, MATH),
    "head 160": (lambda: ([halves(2, 4, 8, 160)] * 3, {}), FLASH, FLASH),
    "head 512": (lambda: ([halves(2, 4, 8, 512)] * 3, {}), EFFICIENT, EFFICIENT),
    "causal": (lambda: ([SQUARE] * 3, {"is_causal": True}), FLASH, CUDNN),
    "causal, fewer queries": (lambda: ([SQUARE[:, :, :4], SQUARE, SQUARE], {"is_causal": True}), EFFICIENT, CUDNN),
    "groups": (lambda: ([SQUARE, *[halves(2, 2, 8, 16)] * 2], {"enable_gqa": True}), FLASH, CUDNN),
    "groups untold": (lambda: ([SQUARE, *[halves(2, 2, 8, 16)] * 2], {}), MATH, MATH),
    "one key": (lambda: ([SQUARE, *[halves(2, 4, 1, 16)] * 2], {}), FLASH, FLASH),
    "dropout 0.1": (lambda: ([SQUARE] * 3, {"dropout_p": 0.1}), FLASH, FLASH),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN)
def test_first_kernel_that_takes_the_call(case: str) -> None:
    make, on_ampere, on_hopper = CHOSEN[case]
    tensors, options = make()
    for order, right in ((AMPERE, on_ampere), (HOPPER, on_hopper)):
        assert SDPBackend(Choice(order)(*tensors, **options)) == right


def test_any_type_counts_as_one_that_the_device_has() -> None:
    assert SDPBackend(Choice(HOPPER, any_type=True)(*[SQUARE.double()] * 3)) == CUDNN


@pytest.fixture
def _hopper() -> Iterator[None]:
    with cuda_attention(order=HOPPER):
        yield


@pytest.mark.usefixtures("_hopper")
def test_torch_asks_and_flags_switch_off() -> None:
    assert SDPBackend(aten._fused_sdp_choice(*[SQUARE] * 3)) == CUDNN
    with sdpa_kernel([FLASH, MATH]):
        assert SDPBackend(aten._fused_sdp_choice(*[SQUARE] * 3)) == FLASH
    with sdpa_kernel(EFFICIENT), pytest.raises(RuntimeError, match="No available kernel"):
        aten._fused_sdp_choice(*[halves(2, 4, 8, 12)] * 3)


def test_torch_answers_for_itself_afterwards() -> None:
    before = aten._fused_sdp_choice(*[SQUARE] * 3)
    with cuda_attention(order=(EFFICIENT, MATH)):
        assert SDPBackend(aten._fused_sdp_choice(*[SQUARE] * 3)) == EFFICIENT
    assert aten._fused_sdp_choice(*[SQUARE] * 3) == before
