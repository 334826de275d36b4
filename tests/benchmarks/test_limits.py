"""`benchmarks/limits.py`: plans of a small model within limits, kept and read again; what is passed over."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import models

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def limits() -> Iterator[Any]:
    """The module of the benchmark, which imports others as a script does, with one more model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("limits")
        patch.setitem(module.CASES, "mlp", module.Case(lambda batch: models.ZOO["mlp"](batch=batch), 8))
        yield module


def asked(**changes: Any) -> argparse.Namespace:
    defaults = {
        "limits": 2,
        "quick": True,
        "cluster": "h100",
        "recompute": "auto",
        "offload": "none",
        "offload_optimizer": "none",
        "time_limit": 60.0,
        "work_limit": None,
    }
    return argparse.Namespace(**{**defaults, **changes})


@pytest.fixture(scope="module")
def found(limits: Any) -> Any:
    return limits.planned("mlp", "8", asked(), None)


@pytest.mark.parametrize("name", ["limits", "problems", "same_plans", "checkmate"])
def test_a_benchmark_runs_as_a_script_from_any_folder(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_limits_go_from_the_largest_peak_to_the_smallest(limits: Any, found: Any) -> None:
    free, larger, smallest = found.rows
    assert (free.limit, free.peak > larger.limit > smallest.limit) == (None, True)
    assert smallest.limit == smallest.peak, "the smallest peak is a limit that is kept"
    assert larger.peak <= larger.limit
    assert larger.limit / smallest.limit == pytest.approx(free.peak / larger.limit, rel=1e-3)
    assert not list(limits.faults(found.rows))
    assert limits.table(found, None).row_count == 3


def test_figures_are_kept_and_their_limits_are_asked_for_again(limits: Any, found: Any, tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    other = dataclasses.replace(found, mesh="8x8")
    limits.write(path, True, [other])
    limits.write(path, True, [found])
    kept = limits.read(path, True)
    assert kept == {("mlp", "8"): found, ("mlp", "8x8"): other}
    assert limits.read(path, False) == {}, "models of full depth have figures of their own"
    slower = [dataclasses.replace(row, step=2 * row.step) for row in found.rows]
    again = limits.planned("mlp", "8", asked(limits=None), dataclasses.replace(found, rows=tuple(slower)))
    assert [row.limit for row in again.rows] == [row.limit for row in found.rows]
    assert limits.ratios(again, kept["mlp", "8"]) == pytest.approx([1.0] * 3)
    assert limits.ratios(again, dataclasses.replace(found, rows=tuple(slower))) == pytest.approx([0.5] * 3)
    assert limits.ratios(again, dataclasses.replace(found, rows=found.rows[:1]))[1:] == [None, None], "it fits no limit"


def test_a_plan_that_fits_a_limit_and_was_not_taken_is_told(limits: Any) -> None:
    free = limits.Row(None, 1.0, 100, 0.0, "", 0.0)
    half = limits.Row(80, 2.0, 50, 0.0, "", 0.0)
    assert not list(limits.faults([free, half, limits.Row(60, 2.0, 60, 0.0, "", 0.0)]))
    assert len(list(limits.faults([free, half, limits.Row(60, 2.5, 60, 0.0, "", 0.0)]))) == 1
    assert len(list(limits.faults([free, half, limits.Row(60, None, 70, 1.0, "", 0.0)]))) == 1
    assert len(list(limits.faults([free, half, limits.Row(60, 1.5, 60, 0.0, "", 0.0)]))) == 1, "the smaller is faster"
