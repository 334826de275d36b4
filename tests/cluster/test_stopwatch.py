"""What counts of many timings of the same work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from autoshard.cluster.operator_samples import SampleCall, samples
from autoshard.cluster.stopwatch import Rotation, Stopwatch
from tests.workers import Workers


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def watch(seconds: Sequence[float]) -> Stopwatch:
    """A stopwatch by whose clock one timing after another takes so long."""
    moments = [0.0]
    for one in seconds:
        moments += [moments[-1], moments[-1] + one]
    clock = iter(moments[1:])
    return Stopwatch(torch.device("cpu"), len(seconds), patience=1.0, clock=lambda: next(clock))


def work() -> None:
    """Takes no time by a clock that is made up."""


def test_what_takes_now_this_long_and_now_that_counts_as_its_mean(alone: None) -> None:
    assert watch([1.0, 3.0, 1.0, 3.0, 3.0]).mean_seconds([work], [1.0]) == [pytest.approx(2.2)]


def test_a_disturbance_counts_as_three_times_the_median_at_most(alone: None) -> None:
    assert watch([1.0, 1.0, 100.0, 1.0]).mean_seconds([work], [1.0]) == [pytest.approx(1.5)]


def test_short_work_is_timed_as_many_calls_at_once(alone: None) -> None:
    assert watch([0.1, 0.1]).mean_seconds([work], [0.001]) == [pytest.approx(0.002)]


def counts_the_last() -> None:
    actual = [[1.0, 5.0], [2.0, 3.0]][dist.get_rank()]
    assert watch(actual).mean_seconds([work], [1.0]) == [pytest.approx(3.5)]


@pytest.mark.slow
def test_a_timing_ends_when_the_last_process_is_done() -> None:
    with Workers(2) as workers:
        workers.run(counts_the_last)


def test_work_takes_turns_with_copies_on_data_of_their_own() -> None:
    sample = samples(torch.float32, torch.device("cpu"))[0]
    built: list[SampleCall] = []

    def make() -> SampleCall:
        built.append(sample.make(4))
        return built[-1]

    rotation = Rotation(make, sample.make(4).amounts()[1])
    assert len({call.args[0].data_ptr() for call in built}) == len(built) > 1
    before = [call.args[0].clone() for call in built]
    for _ in range(2 * len(built)):
        rotation()
    assert all(torch.equal(call.args[0], kept) for call, kept in zip(built, before, strict=True))


def test_copies_of_much_data_are_few_and_their_results_stay() -> None:
    built: list[torch.Tensor] = []

    def make() -> object:
        number = float(len(built))
        built.append(torch.full((4,), number))
        return built[-1].clone

    rotation = Rotation(make, 2.0**25)  # type: ignore[arg-type]
    assert len(built) == 2
    for _ in range(5):
        rotation()
    assert [float(kept[0]) for kept in rotation._kept] == [1.0, 0.0]
