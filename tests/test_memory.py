"""Rows of `docs/memory.md`, run again, and what is freed when."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

import autoshard
from tests.memory_models import build
from tests.memory_table import COMPILED_ROWS, COMPILED_START, END, LINE, PAGE, ROWS, SQUARE, START, cells, row
from tests.memory_tracker import Tracker, first_rank, track_step
from tests.training import fast_links


def _page_rows(start: str) -> list[str]:
    text = PAGE.read_text("utf-8").partition(start)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def test_the_page_has_all_rows() -> None:
    assert len(_page_rows(START)) == len(ROWS)
    assert len(_page_rows(COMPILED_START)) == len(COMPILED_ROWS)


@pytest.mark.parametrize(
    ("model", "sizes", "limit"),
    [
        ("MLP", LINE, "tight"),
        ("MLP", SQUARE, "none"),
        pytest.param("GPT-2", LINE, "none", marks=pytest.mark.slow),
        pytest.param("U-Net", LINE, "none", marks=pytest.mark.slow),
        pytest.param("ResNet", LINE, "none", marks=pytest.mark.slow),
    ],
)
def test_what_is_said_is_held(model: str, sizes: Mapping[str, int], limit: str) -> None:
    made = row(model, sizes, limit)
    assert f"| {' | '.join(cells(made))} |" in _page_rows(START)
    assert abs(made.error) < 0.01


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("MLP", "none"),
        pytest.param("Llama", "none", marks=pytest.mark.slow),
        pytest.param("Llama", "full", marks=pytest.mark.slow),
        pytest.param("GPT-2", "none", marks=pytest.mark.slow),
    ],
)
def test_what_is_said_of_compiled_programs_is_held(model: str, limit: str) -> None:
    made = row(model, LINE, limit, compile=True)
    assert f"| {' | '.join(cells(made))} |" in _page_rows(COMPILED_START)
    assert abs(made.error) < 0.01


class _Towers(nn.Module):
    """As CLIP, whose loss reads one row of a tower: only what is returned beside it holds the rest of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.tower(x)
        return {"loss": hidden[:, 0].square().mean(), "tower": {"last_hidden_state": hidden}}


def test_outputs_are_held_whatever_they_are_nested_in() -> None:
    module, inputs = _Towers(), {"x": torch.randn(8, 64, 64)}
    with first_rank({"x": 2}) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        tracked = track_step(module, inputs, torch.optim.AdamW(module.parameters()))
    memory = module.sharding_plan.memory
    assert memory.peak == pytest.approx(tracked.peak.bytes, rel=1e-3)
    assert any("tower" in one.name for one in memory.largest)


@pytest.mark.parametrize("retain", [False, True])
def test_saved_tensors_are_freed_with_their_last_use_unless_the_graph_is_kept(retain: bool) -> None:
    module, inputs = build("MLP")
    tracker = Tracker(phase="forward")
    with first_rank({"x": 2}) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        tracker.track([*module.parameters(), *inputs.values()], "at rest")
        at_rest = tracker.held
        with tracker:
            loss = module(**inputs)
            saved = tracker.held - at_rest
            loss.backward(retain_graph=retain)
            gradients = sum(one.grad.to_local().nbytes for one in module.parameters())
            left = tracker.held - at_rest - gradients
            assert left > 0.9 * saved if retain else left < 0.1 * saved
            if retain:
                first = [one.grad.to_local().clone() for one in module.parameters()]
                loss.backward()
                assert all(
                    torch.equal(one.grad.to_local(), 2 * old)
                    for one, old in zip(module.parameters(), first, strict=True)
                )


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16)], ids=["float32", "bfloat16"])
def test_sums_of_gradients_are_held_until_they_are_reduced(policy: MixedPrecisionPolicy | None) -> None:
    """In every run but the first: those of data parallel, and those of shards, which are whole before."""
    peaks = []
    for placement in (Replicate(), Shard(0)):
        module, inputs = build("MLP")
        with first_rank({"x": 2}) as mesh:
            hints = {"*.weight": placement}
            options = {"hints": hints, "accumulate": 3, "mp_policy": policy}
            autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), **options)
            optimizer = torch.optim.AdamW(module.parameters())
            tracker = Tracker()
            for step in range(2):
                optimizer.zero_grad()
                if step:
                    state = [value for of in optimizer.state.values() for value in of.values()]
                    tracker.track((*module.parameters(), *inputs.values(), *state), "at rest")
                with tracker if step else contextlib.nullcontext():
                    for run in range(3):
                        with autoshard.no_sync(module) if run < 2 else contextlib.nullcontext():
                            module(**inputs).backward()
                    optimizer.step()
        memory = module.sharding_plan.memory
        peaks.append(memory.peak)
        # An operator is one moment, with the addition of its gradient to the sum.
        assert tracker.peak.bytes <= memory.peak < 1.06 * tracker.peak.bytes
    # Shards alone would take half of the memory.
    assert peaks[1] > 0.6 * peaks[0]
