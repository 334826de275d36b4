from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from autoshard.tools.selfcheck.step_profile import StepProfile, _overlap_length, _union


def test_spans_that_overlap_are_united() -> None:
    assert _union([(4, 6), (0, 2), (1, 3), (5, 5.5)]) == [(0, 3), (4, 6)]


def test_what_is_hidden_is_what_both_cover() -> None:
    communication, compute = _union([(0, 4), (10, 12)]), _union([(1, 2), (3, 5), (11, 20)])
    assert _overlap_length(communication, compute) == 1 + 1 + 1
    assert _overlap_length(communication, []) == 0


@pytest.mark.parametrize("waits", [0, 2])
def test_synchronisations_are_lines_that_wait(waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of CUDA's debug mode, which warns of itself, too."""

    def set_mode(mode: object) -> None:
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=1,
        )

    def train() -> None:
        for _ in range(waits):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    outcome = StepProfile().synchronisations(SimpleNamespace(train=train))  # type: ignore[arg-type]
    assert outcome.values == {"synchronisations": waits}
    assert outcome.verdict == ("slow" if waits else "ok")
