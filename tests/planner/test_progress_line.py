"""Progress of long work is logged from time to time if there is no terminal."""

from __future__ import annotations

import importlib.util
import io
import logging
import time
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import autoshard
from autoshard.planner import progress_line as progress
from autoshard.planner.progress_line import Progress
from tests.runtime.meshes import one_device
from tests.training import build, fast_links


def _wait(seconds: float) -> None:
    with progress.show_progress(False, "capture of Model"):
        time.sleep(seconds)


def test_what_takes_long_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    with caplog.at_level(logging.INFO, "autoshard"), progress.show_progress(False) as report:
        report(Progress("messages", 2.0, 1.0, 3.0))
        time.sleep(0.2)
    said = [record.getMessage() for record in caplog.records]
    assert 2 <= len(said) <= 10
    # Of the report that came last, how long its phase takes, rather than when the report came.
    assert said[0] == "planning for 0 s, 0 s of them in messages: 2 s per step, at least 1 (gap 50.00%)"


def test_what_is_done_soon_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autoshard"):
        _wait(0.0)
    assert not caplog.records


def test_every_report_is_logged_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autoshard"), progress.show_progress(True) as report:
        for cost in (3.0, 2.0):
            report(Progress("messages", cost, 1.0, 3.0))
    assert [record.getMessage()[:13] for record in caplog.records] == ["messages: 3 s", "messages: 2 s"]


def test_it_is_seen_where_nobody_set_up_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    monkeypatch.setattr(progress, "log", logging.Logger("autoshard"))  # which has no handlers, nor parents
    _wait(0.1)
    assert capsys.readouterr().err.startswith("autoshard: capture of Model for 0 s\n")


def test_a_notebook_shows_a_line_if_it_has_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ipywidgets, and in other processes than notebooks, reports are logged."""
    installed = {"ipywidgets"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    assert progress._draws_widgets(notebook)
    assert not progress._draws_widgets(Console(file=io.StringIO()))
    installed.clear()
    assert not progress._draws_widgets(notebook)


def test_a_capture_says_which_part_of_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Every part of a capture is reported when it begins, as phases of a search are."""
    with caplog.at_level(logging.INFO, "autoshard"):
        autoshard.plan(nn.Linear(2, 2), {"a": 2}, (torch.zeros(2, 2),), search=autoshard.Search(verbose=True))
    said = [record.getMessage() for record in caplog.records[:3]]
    assert [line.split(" of ")[0] for line in said] == ["export", "trace", "simplification"]
    assert said[0].startswith("export of forward: after ")


def test_costs_at_other_prices_are_not_told_as_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """With a price of memory, a cost is many times the seconds of a step."""
    module, inputs = build("mlp")
    options: dict[str, Any] = {"cluster": fast_links(), "recompute": "none"}
    peak = autoshard.plan(module, {"a": 4}, (), inputs, **options).memory.peak
    with caplog.at_level(logging.INFO, "autoshard"):
        options |= {"memory_limit": peak - 1, "search": autoshard.Search(verbose=True)}
        plan = autoshard.plan(module, {"a": 4}, (), inputs, **options)
    lines = [record.getMessage() for record in caplog.records]
    assert any("at other prices" in line for line in lines)
    costs = [float(line.split(": ")[1].split(" s per step")[0]) for line in lines if "s per step" in line]
    assert max(costs) <= 2 * plan.cost


def test_a_new_kind_of_call_says_what_takes_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    module, x = nn.Linear(2, 2), torch.zeros(4, 2)
    with one_device("cpu") as mesh, caplog.at_level(logging.INFO, "autoshard"):
        autoshard.parallelize(module, mesh, (x,))
        caplog.clear()
        module(x[:2])
    assert any(record.getMessage().startswith("capture of Linear") for record in caplog.records)


def test_a_pipeline_says_what_takes_long(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    with caplog.at_level(logging.INFO, "autoshard"):
        autoshard.plan(module, {"pp": 2}, (torch.zeros(4, 4),))
    assert any("planning of Sequential as a pipeline" in record.getMessage() for record in caplog.records)
