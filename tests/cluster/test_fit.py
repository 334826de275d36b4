"""Links fitted to collectives that obey the formulas exactly are those that made them."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.cluster import Cluster, CostModel, Link
from autoshard.cluster.collective_samples import KINDS, groupings
from autoshard.cluster.curve import Curve
from autoshard.cluster.fit import fit_links
from autoshard.cluster.measurements import Grouping
from autoshard.specs.axes import MeshShape

BYTES = [2.0**power for power in range(8, 27, 2)]


def _made(cluster: Cluster, devices: int) -> dict[tuple[str, Grouping], Curve]:
    """What a cluster's formulas say of every grouping; sizes are 2, where rings and trees are the same."""
    curves = {}
    for grouping in groupings(devices):
        if grouping.size == 2:
            sizes = {"a": devices // 2 // grouping.stride, "x": 2, "b": grouping.stride}
            model = CostModel(cluster, MeshShape.of(sizes))
            for kind in KINDS:
                seconds = tuple(model.collective(kind, int(bytes), 1) for bytes in BYTES)
                curves[kind, grouping] = Curve(tuple(BYTES), seconds)
    return curves


def test_links_are_found_again() -> None:
    inside, between = Link(4e9, 1e-5), Link(1e9, 5e-5)
    cluster = dataclasses.replace(Cluster.preset("cpu"), devices_per_host=2, inside=inside, between=between)
    for link, found in zip((inside, between), fit_links(_made(cluster, 8), 8, 2), strict=True):
        assert found.bandwidth == pytest.approx(link.bandwidth)
        assert found.latency == pytest.approx(link.latency)


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
