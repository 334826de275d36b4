"""Calibration on real processes: what is measured, and that all ranks agree. Nothing here depends on times.

What counts of many timings of the same work.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard
from autoshard.cluster import Cluster, CostModel, Link
from autoshard.cluster.calibrate import Rotation, Stopwatch, fit_links
from autoshard.cluster.measurements import BYTES, FLOPS, Curve, Grouping
from autoshard.cluster.samples import KINDS, SampleCall, groupings, samples
from autoshard.errors import MeshError
from autoshard.specs.axes import MeshShape
from tests.models import mlp
from tests.workers import Workers


def _quick(mesh: DeviceMesh, **options: object) -> autoshard.Cluster:
    """A calibration of few sizes: no call is small enough for a larger one to be tried."""
    return autoshard.calibrate(mesh, largest=512, dtypes=(), repeats=1, patience=0.0, **options)


def measures_and_agrees() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    message: list[str] = []
    state = torch.random.get_rng_state()
    cluster = _quick(mesh, name="here", progress=message.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert message[:1] == (["operators in float32"] if dist.get_rank() == 0 else [])
    texts: list[str | None] = [None, None]
    dist.all_gather_object(texts, cluster.to_json())
    assert texts[0] == texts[1]

    measured = cluster.measured
    assert measured is not None
    assert measured.devices == cluster.devices_per_host == 2
    assert set(measured.collectives) == {(kind, Grouping(2, 1)) for kind in KINDS}
    for key in [("mm", "float32", FLOPS), ("mm", "float64", FLOPS), ("gelu", "float32", BYTES)]:
        assert key in measured.operators
    assert ("gelu", "float64", BYTES) not in measured.operators
    assert set(cluster.device.peak_flops) == {"float32", "bfloat16", "float64"}
    assert cluster.inside == cluster.between
    assert cluster.contention >= 0

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.json")
        cluster.save(path)
        assert autoshard.Cluster.load(path) == cluster
        module, inputs = mlp()
        assert autoshard.plan(module, {"x": 2}, example_kwargs=inputs, cluster=path).step_seconds > 0

    with pytest.raises(MeshError, match="the mesh has 1 devices and the job 2 processes"):
        _quick(DeviceMesh("cpu", [dist.get_rank()], _init_backend=False))


@pytest.mark.slow
def test_two_processes_measure_and_agree() -> None:
    with Workers(2) as workers:
        workers.run(measures_and_agrees)


def test_a_job_of_one_process_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(MeshError, match="two at least"):
            _quick(init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


AMOUNTS = [2.0**power for power in range(8, 27, 2)]


def _made(cluster: Cluster, devices: int) -> dict[tuple[str, Grouping], Curve]:
    """What a cluster's formulas say of every grouping; sizes are 2, where rings and trees are the same."""
    curves = {}
    for grouping in groupings(devices):
        if grouping.size == 2:
            sizes = {"a": devices // 2 // grouping.stride, "x": 2, "b": grouping.stride}
            model = CostModel(cluster, MeshShape.of(sizes))
            for kind in KINDS:
                seconds = tuple(model.collective(kind, int(bytes), 1) for bytes in AMOUNTS)
                curves[kind, grouping] = Curve(tuple(AMOUNTS), seconds)
    return curves


def test_links_are_found_again() -> None:
    inside, between = Link(4e9, 1e-5), Link(1e9, 5e-5)
    cluster = dataclasses.replace(Cluster.preset("cpu"), devices_per_host=2, inside=inside, between=between)
    for link, result in zip((inside, between), fit_links(_made(cluster, 8), 8, 2), strict=True):
        assert result.bandwidth == pytest.approx(link.bandwidth)
        assert result.latency == pytest.approx(link.latency)


def test_one_host_has_one_kind_of_link() -> None:
    cluster = dataclasses.replace(Cluster.preset("cpu"), devices_per_host=8, inside=Link(4e9, 1e-5))
    inside, between = fit_links(_made(cluster, 4), 4, 4)
    assert inside == between
    assert inside.bandwidth == pytest.approx(4e9)


def test_seconds_that_do_not_grow_are_all_latency() -> None:
    flat = {("shift", Grouping(2, 1)): Curve((256.0, 512.0), (1.0, 1.0))}
    inside, _ = fit_links(flat, 2, 2)
    assert inside.latency == pytest.approx(1.0, rel=0.01)
    assert inside.bandwidth > 0


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
