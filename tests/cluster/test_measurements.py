"""Measured clusters: their prices, and their file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from autoshard.cluster import Cluster, CostModel
from autoshard.cluster.curve import Curve
from autoshard.cluster.measurements import Grouping, Measurements
from autoshard.cluster.operator_curves import BYTES, FLOPS, INTENSITY
from autoshard.errors import MeshError
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

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
    ("change", "said"),
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
def test_measurements_that_are_none_are_refused(change: object, said: str) -> None:
    with pytest.raises(MeshError, match=re.escape(said)):
        Cluster.from_json(_broken(change))


def test_a_file_cut_short_is_refused() -> None:
    text = measured_cluster().to_json()
    with pytest.raises(MeshError, match=r"is not JSON: .*cut short"):
        Cluster.from_json(text[: len(text) // 2])


def test_a_negative_contention_is_refused() -> None:
    data = json.loads(measured_cluster().to_json()) | {"contention": -0.1}
    with pytest.raises(MeshError, match="at contention"):
        Cluster.from_json(json.dumps(data))
