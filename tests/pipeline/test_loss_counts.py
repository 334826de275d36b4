"""What microbatches count in a mean: against the loss of the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.run.loss_counts import loss_shares, target_count
from tests import models


class Classifier(nn.Module):
    def __init__(self, weight: Tensor | None = None, aside: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.weight = weight
        self.aside = aside

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.linear(x).flatten(0, 1), targets[:, 1:].flatten(), self.weight, ignore_index=-1)
        return loss + self.aside if self.aside else loss


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 5, (6, 4), generator=generator)
    targets[0], targets[2, 2:] = -1, -1
    return torch.randn(6, 3, 4, generator=generator), targets


def _shares(module: nn.Module, batch: dict[str, Tensor], parts: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    size = len(next(iter(batch.values()))) // parts
    cut = [
        {name: tensor[place * size : (place + 1) * size] for name, tensor in batch.items()} for place in range(parts)
    ]
    graph = export_forward(module, (), cut[0])
    return loss_shares(target_count(graph, graph.forward.outputs[0]), cut), cut


def test_what_is_ignored_does_not_count() -> None:
    module = Classifier().double()
    x, targets = _batch()
    batch = {"x": x.double(), "targets": targets}
    weights, parts = _shares(module, batch, 3)
    assert weights.sum() == 1
    assert not torch.allclose(weights, weights.mean())
    torch.testing.assert_close(
        sum(weight * module(**part) for weight, part in zip(weights, parts, strict=True)), module(**batch)
    )


def test_losses_that_are_no_such_mean_count_alike() -> None:
    x, targets = _batch()
    for module in (Classifier(torch.arange(5.0)), Classifier(aside=1.0)):
        weights, _ = _shares(module, {"x": x, "targets": targets}, 2)
        assert weights.tolist() == [0.5, 0.5]


def test_shifted_labels_of_hugging_face() -> None:
    module, inputs = models.hf_llama(dtype=torch.float64, batch=4)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][0, 2:] = -100
    weights, parts = _shares(module, inputs, 2)
    with torch.no_grad():
        whole = module(**inputs).loss
        torch.testing.assert_close(
            sum(weight * module(**part).loss for weight, part in zip(weights, parts, strict=True)).to(whole.dtype),
            whole,
        )
