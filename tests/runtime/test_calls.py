"""What is told of programs for calls of other sizes, and how many are kept.

Shards of different lengths: whole sizes are found from those of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.runtime import call_programs
from autoshard.runtime.calls import CallSizes, whole_shapes
from tests.runtime.meshes import simulated_mesh


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings that are logged, as far as they are by then."""

    class Warnings(list[str]):
        def __iter__(self) -> Iterator[str]:
            return (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)

    with caplog.at_level(logging.INFO, "autoshard"):
        yield Warnings()


def _sizes(dynamic: Any = None, quiet: bool = False) -> CallSizes:
    return CallSizes("Model", dynamic or {}, quiet=quiet)


def _tokens(batch: int, length: int) -> dict[str, tuple[int, ...]]:
    return {"tokens": (batch, length), "labels": (batch, length), "table": (9, 3)}


def test_the_third_size_names_the_option_that_spares_the_others(log_lines: list[str]) -> None:
    sizes = _sizes()
    for number, call in enumerate([(4, 8), (4, 16)]):
        sizes.record("training", _tokens(*call), 2.0)
        sizes.record("evaluation", _tokens(4, 8 + number), 1.0)
    assert not list(log_lines)
    sizes.record("training", _tokens(4, 24), 2.0)
    sizes.record("training", _tokens(4, 32), 2.0)
    (line,) = log_lines
    assert "Model: 3 calls that differ in little" in line
    assert "made in 8.0 s" in line
    assert "dynamic={'tokens': {1: 'length'}, 'labels': {1: 'length'}}" in line


def test_sizes_that_change_in_their_own_ways_have_names_of_their_own(log_lines: list[str]) -> None:
    sizes = _sizes()
    for one, other in ((2, 8), (3, 9), (2, 7)):
        sizes.record(0, {"x": (one, other), "y": (other, one)}, 1.0)
    (line,) = log_lines
    assert "{'x': {0: 'batch', 1: 'length'}, 'y': {0: 'length', 1: 'batch'}}" in line


def test_plain_values_are_told_of_and_what_was_said_already_is_not(log_lines: list[str]) -> None:
    sizes, dynamic = _sizes(), _sizes({"tokens": {1: "n"}, "labels": {1: "n"}})
    for length in range(3):
        dynamic.record(0, _tokens(4, 8 + length), 1.0)
        _sizes(quiet=True).record(0, _tokens(4, 8 + length), 1.0)
        sizes.record(0, _tokens(4, 8), 1.0)
    (line,) = log_lines
    assert "plain argument" in line


@pytest.fixture
def mesh() -> DeviceMesh:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def test_programs_that_were_not_used_for_longest_go(
    mesh: DeviceMesh, log_lines: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_programs, "MOST_PROGRAMS", 2)
    module = autoshard.parallelize(nn.Linear(4, 4), mesh)
    built = []
    for rows in (2, 4, 2, 6, 2, 4):
        before = len(caplog.records)
        module(torch.ones(rows, 4))
        built.append(sum("was made in" in one.getMessage() for one in caplog.records[before:]))
    assert built == [1, 1, 0, 1, 0, 1]
    (line,) = log_lines
    assert "dynamic={'input': {0: 'batch'}}" in line


ROWS, COLUMNS = 2, 3


def part(size: int, ranks: int, rank: int) -> int:
    length = -(-size // ranks)
    return max(0, min(length, size - rank * length))


@given(shape=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_whole_sizes_are_those_that_the_parts_are_of(shape: tuple[int, int]) -> None:
    places = np.ndindex(ROWS, COLUMNS)
    split = np.array([[part(shape[0], ROWS, row), part(shape[1], COLUMNS, column)] for row, column in places])
    alike = np.array([[shape[0], part(shape[1], ROWS, row)] for row, _ in np.ndindex(ROWS, COLUMNS)])
    tables = {
        "split": split.reshape(ROWS, COLUMNS, 2),
        "alike": alike.reshape(ROWS, COLUMNS, 2),
        "scalar": np.zeros((ROWS, COLUMNS, 0), dtype=np.int64),
    }
    placements = {"split": (Shard(0), Shard(1)), "alike": (Shard(-1), Replicate()), "scalar": (Shard(0), Replicate())}
    with simulated_mesh(a=ROWS, b=COLUMNS) as mesh:
        assert isinstance(mesh, DeviceMesh)
        assert whole_shapes(tables, placements, mesh) == {"split": [*shape], "alike": [*shape], "scalar": []}
