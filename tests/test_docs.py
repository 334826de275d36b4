"""What the documentation shows is true: its code runs, and its rules are sound."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.patterns.check import check
from autoshard.patterns.notation import parse

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the code of docs/rules.md defines, run from top to bottom."""

    @torch.library.custom_op("mylib::roll", mutates_args=())
    def roll(x: Tensor, dim: int) -> Tensor:
        return x.roll(1, dim)

    @torch.library.custom_op("mylib::sum_of_squares", mutates_args=())
    def sum_of_squares(x: Tensor) -> Tensor:
        return x.square().sum(-1)

    names: dict[str, Any] = {}
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/rules.md", "exec"), names)
    return names


def test_the_rules_of_the_page_are_sound(page: dict[str, Any]) -> None:
    x, y, z = torch.randn(3, 12, 24, dtype=torch.float64)
    mylib = torch.ops.mylib
    assert check(mylib.gated.default, (x, y)) == []
    assert check(mylib.gated_backward.default, (x, y, z)) == []
    assert check(mylib.roll.default, (x, 1)) == []
    assert check(mylib.sum_of_squares.default, (x,)) == []


def test_the_notation_of_the_tables_parses() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    rules = [code for code in re.findall(r"`([^`\n]*->[^`\n]*)`", text) if code != "->"]
    assert len(rules) > 5
    for rule in rules:
        parse(rule)


def test_a_model_with_the_operator_of_the_page_is_planned_without_a_warning(page: dict[str, Any]) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(512, 2048), nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.down(torch.ops.mylib.gated(self.up(x), self.gate(x)))
            return nn.functional.layer_norm(x + hidden, (512,)).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sharding rule.*")
        plan = autoshard.plan(Gated(), {"tp": 4}, (torch.empty(64, 512),), cluster="cpu")
    assert all(decision.strategy != "whole" for decision in plan.choices if decision.operator.startswith("mylib"))
    assert plan.placements["up.weight"] == plan.placements["gate.weight"]
    assert not plan.placements["up.weight"][0].is_replicate()
