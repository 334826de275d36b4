"""What measurements say of amounts that were not measured.

Measured clusters: their prices, and their file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Cluster, CostModel
from autoshard.cluster.measurements import BYTES, FLOPS, INTENSITY, Curve, Grouping, Measurements
from autoshard.errors import MeshError
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

SECONDS = st.floats(1e-2, 10.0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    count = draw(st.integers(1, 10))
    return Curve.through((2.0**power for power in range(3, 3 + count)), [draw(SECONDS) for _ in range(count)])


def test_rates_are_interpolated_between_powers_of_two() -> None:
    curve = Curve((4.0, 8.0), (2.0, 2.5))  # rates 2 and 3.2
    assert curve.at(6) == pytest.approx(6 / 2.6)
    assert curve.at(5) == pytest.approx(5 / 2.3)


def test_outside_the_nearest_counts() -> None:
    curve = Curve((4.0, 8.0), (2.0, 2.5))
    assert curve.at(0) == curve.at(1) == 2.0  # latency alone
    assert curve.at(80) == pytest.approx(25.0)  # the rate of the largest


@given(curves(), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_never_takes_less(curve: Curve, amount: float, more: float) -> None:
    assert curve.at(amount) <= curve.at(amount + more) * (1 + 1e-9)


@given(curves())
def test_it_is_continuous_at_measured_amounts(curve: Curve) -> None:
    for amount, seconds in zip(curve.amounts, curve.seconds, strict=True):
        assert curve.at(amount) == pytest.approx(seconds)
        assert curve.at(amount * (1 - 1e-9)) == pytest.approx(seconds, rel=1e-6)
        assert curve.at(amount * (1 + 1e-9)) == pytest.approx(seconds, rel=1e-6)


@given(st.lists(SECONDS, min_size=1, max_size=10))
def test_a_curve_through_noise_rises_and_keeps_what_rises(seconds: list[float]) -> None:
    amounts = range(1, 1 + len(seconds))
    curve = Curve.through(amounts, seconds)
    assert all(low <= high for low, high in itertools.pairwise(curve.seconds))
    assert min(seconds) * (1 - 1e-9) <= curve.seconds[0]
    assert curve.seconds[-1] <= max(seconds) * (1 + 1e-9)
    rising = sorted(seconds)
    assert Curve.through(amounts, rising).seconds == pytest.approx(tuple(rising))


def test_neighbours_that_fall_share_their_mean() -> None:
    assert Curve.through((1, 2, 4), (1.0, 9.0, 4.0)).seconds == pytest.approx((1.0, 6.0, 6.0))


@pytest.mark.parametrize(
    ("amounts", "seconds", "message"),
    [
        ((), (), "0 amounts have 0 seconds"),
        ((1.0, 2.0), (1.0,), "2 amounts have 1 seconds"),
        ((0.0,), (1.0,), "amount 0 takes 1 s: both must be above zero"),
        ((1.0,), (-1.0,), "takes -1 s: both must be above zero"),
        ((2.0, 1.0), (1.0, 1.0), "amounts must rise"),
        ((1.0, 2.0), (2.0, 1.0), "more never takes less"),
    ],
)
def test_what_is_no_measurement_is_refused(amounts: tuple, seconds: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(amounts, seconds)


def test_rates_are_amounts_by_seconds() -> None:
    curve = Curve.of_rates((10.0, 100.0), (5.0, 20.0), "a table")
    assert curve.seconds == (2.0, 5.0)
    assert curve.rates == (5.0, 20.0)
    assert curve.source == "a table"
    assert curve == Curve((10.0, 100.0), (2.0, 5.0))


def test_the_slowest_of_curves_is_slower_than_each() -> None:
    first, second = Curve((1.0, 10.0), (2.0, 4.0)), Curve((3.0, 30.0), (1.0, 90.0))
    slowest = Curve.slowest([first, second])
    assert slowest.amounts == (1.0, 3.0, 10.0, 30.0)
    for amount in slowest.amounts:
        assert slowest.at(amount) == max(first.at(amount), second.at(amount))


LINE = Curve((256.0, 512.0), (1.0, 1.5))
NEAR, FAR = Grouping(2, 1), Grouping(2, 2)


def measured_cluster() -> Cluster:
    """Four devices whose neighbours are twice as fast as others, and operators of hand-made speeds."""
    slow = Curve(LINE.amounts, tuple(2 * one for one in LINE.seconds))
    collectives = {("all_gather", NEAR): LINE, ("all_gather", FAR): slow, ("all_reduce", NEAR): LINE}
    operators = {
        ("add", "float32", BYTES): Curve((10.0, 20.0), (1.0, 2.0)),
        ("copy", "float32", BYTES): Curve((10.0, 20.0), (3.0, 6.0)),
        ("view", "float32", BYTES): Curve((1.0,), (0.25,)),
        ("mm", "float32", FLOPS): Curve((100.0, 1000.0), (1.0, 5.0)),
        ("mm", "float32", INTENSITY): Curve((1.0, 100.0), (0.5, 0.5)),
        ("add", "float64", BYTES): Curve((10.0, 20.0), (4.0, 8.0)),
    }
    measured = Measurements(4, collectives, operators)
    return dataclasses.replace(Cluster.preset("cpu"), name="mine", contention=0.9, measured=measured)


def costs(mesh: dict[str, int]) -> CostModel:
    return CostModel(measured_cluster(), MeshShape.of(mesh))


def test_collectives_are_as_measured_for_the_grouping_of_their_axis() -> None:
    model = costs({"dp": 2, "tp": 2})
    assert model.collective("all_gather", 256, 1) == 1.0
    assert model.collective("all_gather", 256, 0) == 2.0
    assert model.collective("all_gather", 512, 0) == 3.0


def test_an_axis_that_was_not_measured_falls_back_to_the_formula() -> None:
    preset = CostModel(dataclasses.replace(measured_cluster(), measured=None), MeshShape.of({"x": 4}))
    with pytest.warns(
        UserWarning, match=r"measured on 4 devices, and no collective over mesh axis x \(4 devices, 1 apart"
    ):
        model = costs({"x": 4})
    assert model.collective("all_gather", 256, 0) == preset.collective("all_gather", 256, 0)
    assert costs({"dp": 2, "tp": 2}).collective("all_reduce", 256, 0) > 0
    assert costs({"x": 1, "y": 2}).collective("all_reduce", 256, 0) == 0.0


def test_a_gradient_pays_its_share_of_a_group() -> None:
    model = costs({"dp": 2, "tp": 2})
    group = model.collective("all_reduce", GRADIENT_BUCKET_BYTES, 1)
    assert model.gradient_collective("all_reduce", GRADIENT_BUCKET_BYTES // 4, 1) == pytest.approx(group / 4)
    assert model.gradient_collective("all_reduce", 2 * GRADIENT_BUCKET_BYTES, 1) == pytest.approx(2 * group)
    assert model.gradient_collective("all_gather", 256, 1) == model.collective("all_gather", 256, 1)


def test_local_steps_take_the_time_of_a_copy() -> None:
    model = costs({"dp": 2, "tp": 2})
    assert model.collective("copy", 5, 0) == pytest.approx(3.0)
    assert model.collective("slice", 20, 0) == pytest.approx(6.0)


def test_operators_take_the_largest_of_their_work_their_bytes_and_their_narrowness() -> None:
    model = costs({"x": 2})
    assert model.compute(1000, 10, torch.float32, "mm") == pytest.approx(5.0)
    assert model.compute(100, 200, torch.float32, "mm") == pytest.approx(100.0)  # half an operation for every byte
    assert model.compute(0, 20, torch.float32, "relu") == pytest.approx(2.0)
    assert model.compute(0, 20, torch.float32, "clone") == pytest.approx(6.0)
    assert model.compute(0, 0, torch.float32) == 1.0


def test_dtypes_that_were_not_measured_run_as_those_that_were() -> None:
    model = costs({"x": 2})
    assert model.compute(0, 20, torch.float64) == pytest.approx(8.0)
    assert model.compute(0, 20, torch.float64, "clone") == pytest.approx(6.0)
    for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.complex64):
        assert model.compute(0, 20, dtype) == pytest.approx(2.0)


def test_views_cost_a_call_where_calls_were_measured() -> None:
    assert costs({"x": 2}).view() == 0.25
    assert CostModel(Cluster.preset("h100"), MeshShape.of({"x": 2})).view() == 0.0


def test_a_measured_cluster_is_equal_after_a_file(tmp_path: Path) -> None:
    cluster = measured_cluster()
    cluster.save(tmp_path / "mine.json")
    loaded = Cluster.load(tmp_path / "mine.json")
    assert loaded == cluster
    assert hash(loaded) == hash(cluster)
    assert loaded.contention == 0.9


def _broken(change: object) -> str:
    data = json.loads(measured_cluster().to_json())
    change(data["measured"])  # type: ignore[operator]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(devices=3), "measured.collectives.0: 3 devices cannot be split into groups of 2"),
        (lambda data: data["collectives"][1].update(seconds=[1.0, -2.0]), "at measured.collectives.1.seconds.1"),
        (
            lambda data: data["collectives"][1].update(seconds=[2.0, 1.0]),
            "measured.collectives.1: amount 512 takes 1 s",
        ),
        (lambda data: data["collectives"][0].update(amounts=[512, 256]), "amounts must rise"),
        (lambda data: data["operators"][2].update(seconds=[1, 2]), "measured.operators.2: 1 amounts have 2 seconds"),
        (lambda data: data["operators"][0].update(amounts_are="words"), "at measured.operators.0.amounts_are"),
        (lambda data: data.pop("devices"), "at measured, 'devices' is a required property"),
    ],
)
def test_measurements_that_are_none_are_refused(change: object, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        Cluster.from_json(_broken(change))


def test_a_file_cut_short_is_refused() -> None:
    text = measured_cluster().to_json()
    with pytest.raises(MeshError, match=r"is not JSON: .*cut short"):
        Cluster.from_json(text[: len(text) // 2])


def test_a_negative_contention_is_refused() -> None:
    data = json.loads(measured_cluster().to_json()) | {"contention": -0.1}
    with pytest.raises(MeshError, match="at contention"):
        Cluster.from_json(json.dumps(data))
