"""`nn.TransformerEncoder` in evaluation: one device's values at padded positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

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
    module: nn.Module, padding: Any, mask: Tensor | None = None, *, grad: bool = False, names: str = "x padding"
) -> None:
    values: tuple[Any, ...] = (torch.randn(3, 4, 8, dtype=torch.float64), padding)
    kwargs = dict(zip(names.split(), values, strict=True))
    kwargs |= {} if mask is None else {"mask": mask}
    with torch.set_grad_enabled(grad):
        expected = tree_map(Tensor.detach, module(**kwargs))
    graph = capture(module, (), kwargs, grad=grad)
    assert_close(run_joint(graph, module, (), kwargs).output, expected, rtol=1e-9, atol=1e-12)


class Encoders(nn.Module):
    """Encoders beside one another, each with a padding of its own: their outputs by the names of these."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: Encoder() for name in names})

    def forward(self, x: Tensor, padding: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: encoder(x, padding[name]) for name, encoder in self.encoders.items()}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padded_positions_are_zeros_in_evaluation(kind: str) -> None:
    torch.manual_seed(0)
    paddings = {name: torch.tensor(mask, dtype=torch.bool) for name, mask in MASKS.items()}
    if kind == "float":
        zeros = torch.zeros(3, 4, dtype=torch.float64)
        paddings = {name: zeros.masked_fill(padding, -torch.inf) for name, padding in paddings.items()}
    assert_one_device(Encoders(paddings).eval(), paddings)


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
