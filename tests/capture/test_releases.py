"""A torch newer than the releases that were tried is used, with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from autoshard.capture import joint, releases
from autoshard.capture.joint import capture

MAJOR, MINOR = releases.NEWEST_TRIED


@pytest.mark.parametrize("release", ["2.12.0", f"{MAJOR}.{MINOR}.9+cu130", f"{MAJOR}.{MINOR}.0.dev20260101", "nightly"])
def test_tried_releases_are_used_without_a_word(release: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        releases.warn_of_untried_release(release)


def test_the_first_capture_warns_once_of_a_newer_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "warn_of_untried_release", lambda: releases.warn_of_untried_release("99.1.0+cu140"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            capture(nn.Linear(2, 2), (torch.ones(2, 2),), {})
    told = [warning for warning in seen if f"torch 99.1.0+cu140 is newer than {MAJOR}.{MINOR}" in str(warning.message)]
    assert [warning.filename for warning in told] == [__file__]
