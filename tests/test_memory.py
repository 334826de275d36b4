"""Rows of `docs/memory.md`, run again, and what is freed when."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import autoshard
from tests.memory_models import build
from tests.memory_table import END, LINE, PAGE, ROWS, SQUARE, START, cells, row
from tests.memory_tracker import Tracker, first_rank
from tests.training import fast_links


def _page_rows() -> list[str]:
    text = PAGE.read_text("utf-8").partition(START)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def test_the_page_has_all_rows() -> None:
    assert len(_page_rows()) == len(ROWS)


@pytest.mark.parametrize(
    ("model", "sizes", "limited"),
    [
        ("MLP", LINE, True),
        ("MLP", SQUARE, False),
        pytest.param("GPT-2", LINE, False, marks=pytest.mark.slow),
        pytest.param("U-Net", LINE, False, marks=pytest.mark.slow),
        pytest.param("ResNet", LINE, True, marks=pytest.mark.slow),
    ],
)
def test_what_is_said_is_held(model: str, sizes: Mapping[str, int], limited: bool) -> None:
    made = row(model, sizes, limited)
    assert f"| {' | '.join(cells(made))} |" in _page_rows()
    assert abs(made.error) < 0.01


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
