"""Shares in proportion to speed under memory, against all shares that there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.cluster.worker_shares import Worker, equal_share_device, shares, workers_of
from autoshard.errors import BudgetError

some_workers = st.lists(st.builds(Worker, st.integers(1, 9), st.integers(3, 20)), min_size=1, max_size=4)


def _times(counts: tuple[int, ...], workers: Sequence[Worker]) -> float:
    return max(count / worker.speed for count, worker in zip(counts, workers, strict=True))


def _difference(counts: tuple[int, ...], workers: list[Worker]) -> float:
    """Formula 1 of Whale, in elements."""
    total, speed = sum(counts), sum(worker.speed for worker in workers)
    return sum(abs(count - total * worker.speed / speed) for count, worker in zip(counts, workers, strict=True))


@given(st.integers(0, 12), some_workers, st.integers(1, 3))
def test_no_shares_that_fit_are_better(total: int, workers: list[Worker], each: int) -> None:
    def memory_of(count: int) -> int:
        return 2 + each * count

    fitting = [
        counts
        for counts in itertools.product(range(total + 1), repeat=len(workers))
        if sum(counts) == total
        and all(memory_of(count) <= worker.memory for count, worker in zip(counts, workers, strict=True))
    ]
    if not fitting:
        with pytest.raises(BudgetError):
            shares(total, workers, memory_of)
        return
    built = shares(total, workers, memory_of)
    assert built in fitting
    fastest = min(_times(counts, workers) for counts in fitting)
    assert _times(built, workers) == pytest.approx(fastest)
    among = [counts for counts in fitting if _times(counts, workers) <= fastest * (1 + 1e-9)]
    assert _difference(built, workers) == pytest.approx(min(_difference(counts, workers) for counts in among))


def test_equal_workers_have_equal_shares() -> None:
    assert shares(12, [Worker(3.0)] * 4, float) == (3, 3, 3, 3)


def test_shares_are_in_proportion_to_speed() -> None:
    assert shares(6, [Worker(2.0), Worker(1.0)], float) == (4, 2)


def test_what_does_not_fit_moves_to_all_who_have_room() -> None:
    """Algorithm 1 moves a whole overload to the worker that has least to do; the others then wait for that one."""
    workers = [Worker(4.0, 10), Worker(1.0, 100), Worker(1.0, 100)]
    assert shares(30, workers, float) == (10, 10, 10)


def test_the_kinds_of_whale_share_a_batch() -> None:
    cluster = Cluster.parse("8xV100-32GB + 8xP100-16GB")
    workers = workers_of(cluster, range(16))
    built = shares(512, workers, lambda count: 4e9 + 2e8 * count)
    assert sum(built) == 512
    assert set(built[:8]) <= {38, 39}
    assert set(built[8:]) <= {25, 26}
    even = _times((32,) * 16, workers)
    assert 1.2 < even / _times(built, workers) < 1.25  # a quarter at best, by the sheet's rates


def test_a_worker_that_holds_not_even_the_model_is_named() -> None:
    with pytest.raises(BudgetError, match=r"worker 1 has 10 B, and 20 B are needed without a single element"):
        shares(2, [Worker(1.0, 30), Worker(1.0, 10)], lambda count: 20 + count)


def test_the_room_that_there_is_is_told() -> None:
    with pytest.raises(BudgetError, match=r"room for 3, 2, 5 in all. Make the batch smaller by 4"):
        shares(9, [Worker(1.0, 3), Worker(1.0, 2)], float)


@pytest.mark.parametrize(("total", "workers"), [(-1, [Worker(1.0)]), (1, [])])
def test_nothing_to_share_is_refused(total: int, workers: list[Worker]) -> None:
    with pytest.raises(ValueError, match="share some elements among one worker at least"):
        shares(total, workers, float)


def test_a_worker_has_speed_and_memory() -> None:
    with pytest.raises(ValueError, match="speed=0"):
        Worker(0.0)
    with pytest.raises(ValueError, match="memory=nan"):
        Worker(1.0, math.nan)


def test_a_device_for_which_equal_shares_are_as_long() -> None:
    fast, slow = (Cluster.preset(name).device for name in ("v100", "p100"))
    built = equal_share_device([fast, slow], [3, 1])
    assert built.peak_flops["float32"] == pytest.approx(
        min(fast.peak_flops["float32"] * 2 / 3, 2 * slow.peak_flops["float32"])
    )
    assert built.memory_bandwidth == pytest.approx(fast.memory_bandwidth * 2 / 3)
    assert built.memory == slow.memory
    assert equal_share_device([slow, slow], [5, 5]) == slow
