"""Captures in processes with other hash seeds, in which sets of strings have another order."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture.joint import capture
from tests.capture import sets


@pytest.fixture(scope="module")
def seeded() -> list[dict[str, Any]]:
    """What is captured under two hash seeds in which the sets of all models differ in order."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.capture.sets"],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        for seed in ("1", "3")
    ]
    texts = [process.communicate(timeout=300)[0] for process in running]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("model", [make.__name__ for make in sets.MODELS])
def test_equal_whatever_the_hash_seed(seeded: list[dict[str, Any]], model: str) -> None:
    assert seeded[0][model] == seeded[1][model]


class Changing(nn.Module):
    """Reads of memory before and behind a change in place, where nothing depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.table * 2
        row = self.table[1:]
        row.add_(x[1:])
        behind = self.table * 3
        noise = torch.ones(3).mul_(before)
        return (self.weight * behind).sum() + (noise * before).sum() + row.sum()


def test_reads_stay_on_their_side_of_a_change_in_place() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    module = Changing()
    graph = capture(module, (x,), {})
    values = {"weight": module.weight.detach(), "table": module.table.clone(), "x": x}
    given = [values.get(item.name, torch.ones(())) for item in graph.inputs]
    results = {one.kind: value for one, value in zip(graph.outputs, graph.graph_module(*given), strict=True)}
    torch.testing.assert_close(results["output"], module(x).detach())
    torch.testing.assert_close(results["mutation"], module.table)
