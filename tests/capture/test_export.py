"""What nodes of exported graphs share, change and differentiate."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.capture.export import Effects, Exported
from autoshard.capture.joint import capture_forward


def _effects(module: nn.Module) -> tuple[Exported, Effects]:
    return capture_forward(module, (torch.randn(4, 3),), {})


def _by_operator(exported: Exported, text: str) -> torch.fx.Node:
    (found,) = (
        node for node in exported.graph_module.graph.nodes if node.op == "call_function" and text in str(node.target)
    )
    return found


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y[:, 0].mul_(2)
        return y.sin()


def test_changes_of_views_are_changes_of_what_they_view() -> None:
    exported, effects = _effects(_InPlace())
    changer, made = _by_operator(exported, "mul_"), _by_operator(exported, "exp")
    assert list(effects.changed) == [changer]
    assert effects.changed[changer] == effects.memory[made] == effects.memory[_by_operator(exported, "select")]
    assert effects.memory[_by_operator(exported, "sin")].isdisjoint(effects.memory[made])


class _Normed(nn.Module):
    """A norm inside of a region without gradients, and a product behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.norm(x).relu()
        return self.linear(y) + y


def test_statistics_are_changed_in_training_alone() -> None:
    module = _Normed()
    for training in (True, False):
        exported, effects = _effects(module.train(training))
        placeholders = exported.graph_module.graph.find_nodes(op="placeholder")
        names = {item.name: node for node, item in zip(placeholders, exported.inputs, strict=True)}
        changed = {piece for pieces in effects.changed.values() for piece in pieces}
        for name in ("norm.running_mean", "norm.running_var"):
            assert (effects.memory[names[name]] <= changed) is training


def test_gradients_end_where_they_are_not_wanted() -> None:
    exported, effects = _effects(_Normed())
    region, product = _by_operator(exported, "wrap_with_set_grad"), _by_operator(exported, "linear")
    assert region not in effects.differentiable
    assert product in effects.differentiable


class _Masked(nn.Module):
    """A mask of petabytes, made of no input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(1 << 25)
        return x + (rows[:, None] >= rows).sum()


def test_what_depends_on_no_input_takes_no_memory() -> None:
    exported, effects = _effects(_Masked())
    assert not effects.changed
    assert _by_operator(exported, "aten.ge").meta["val"].shape == (1 << 25, 1 << 25)
