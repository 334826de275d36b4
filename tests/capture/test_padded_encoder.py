"""`nn.TransformerEncoder` in evaluation: one device's values at padded positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from autoshard.capture.joint import capture
from tests.capture.interpret import run_joint

MASKS = {
    "behind": [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]],
    "whole row": [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]],
    "last position everywhere": [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]],
    "in front": [[0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]],
}


class Encoder(nn.Module):
    """An encoder behind which every position counts."""

    def __init__(self, **layer: Any) -> None:
        super().__init__()
        options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64}
        one = nn.TransformerEncoderLayer(8, 2, 16, **{**options, **layer})
        self.encoder = nn.TransformerEncoder(one, 2, norm=nn.LayerNorm(8, dtype=torch.float64))
        nn.init.uniform_(self.encoder.norm.bias)  # type: ignore[union-attr, arg-type]

    def forward(self, x: Tensor, padding: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encoder(x, mask, padding).sum(1)  # type: ignore[no-any-return]


def assert_one_device(
    module: nn.Module, padding: Tensor, mask: Tensor | None = None, *, grad: bool = False, names: str = "x padding"
) -> None:
    kwargs = dict(zip(names.split(), (torch.randn(3, 4, 8, dtype=torch.float64), padding), strict=True))
    kwargs |= {} if mask is None else {"mask": mask}
    with torch.set_grad_enabled(grad):
        expected = module(**kwargs).detach()
    graph = capture(module, (), kwargs, grad=grad)
    assert_close(run_joint(graph, module, (), kwargs).output, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padded_positions_are_zeros_in_evaluation(name: str, kind: str) -> None:
    torch.manual_seed(0)
    padding = torch.tensor(MASKS[name], dtype=torch.bool)
    if kind == "float":
        padding = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -torch.inf)
    assert_one_device(Encoder().eval(), padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_module_may_be_the_encoder() -> None:
    torch.manual_seed(0)
    padding = torch.tensor(MASKS["behind"], dtype=torch.bool)
    assert_one_device(Encoder().encoder.eval(), padding, names="src src_key_padding_mask")


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.train(),
        lambda module: setattr(module.encoder, "use_nested_tensor", False),
        lambda module: module.encoder.layers[0].train(),
    ],
)
def test_other_encoders_compute_what_stands_there(change: Any) -> None:
    torch.manual_seed(0)
    module = Encoder().eval()
    change(module)
    assert_one_device(module, torch.tensor(MASKS["behind"], dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gradients_and_masks_of_attention_keep_all_positions() -> None:
    torch.manual_seed(0)
    padding = torch.tensor(MASKS["behind"], dtype=torch.bool)
    assert_one_device(Encoder().eval(), padding, grad=True)
    assert_one_device(Encoder().eval().requires_grad_(False), padding, grad=True)
    assert_one_device(Encoder().eval(), padding, torch.triu(torch.ones(4, 4, dtype=torch.bool), 1))
