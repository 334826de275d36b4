"""The figures of a cluster as text, and as a notebook and a prompt show them."""

from __future__ import annotations

from autoshard.cluster import Cluster
from tests.cluster.test_measurements import measured_cluster
from tests.notebooks import check_repr, shown


def test_a_preset_shows_its_figures() -> None:
    text = str(Cluster.preset("h100"))
    assert "H100 SXM5 80GB" in text
    assert "bfloat16 989,000 GFLOP/s" in text
    assert "0.58 s" in text
    assert "all_gather" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_measured_cluster_shows_its_collectives() -> None:
    text = str(measured_cluster())
    rows = [line.split() for line in text.splitlines() if line.lstrip().startswith("all_gather")]
    assert rows[0][:3] == ["all_gather", "2", "1"]
    assert rows[1][:3] == ["all_gather", "2", "2"]
    assert rows[0][3:7] == ["256", "B", "1", "s"]


def test_kinds_of_device_are_shown() -> None:
    text = str(Cluster.parse("8xV100-32GB + 4xP100-16GB"))
    assert "8 x V100 SXM2 32GB" in text
    assert "4 x P100 SXM2 16GB" in text


def test_a_notebook_shows_the_tables() -> None:
    rows = shown(measured_cluster()).rows
    assert ["collective", "groups of", "ranks apart", "smallest", "middle", "largest"] in rows
    assert any(row[:3] == ["all_gather", "2", "1"] for row in rows)
    mixed = shown(Cluster.parse("8xV100-32GB + 4xP100-16GB"))
    assert [row[1].partition(",")[0] for row in mixed.rows if row[0] == "device"] == [
        "8 x V100 SXM2 32GB",
        "4 x P100 SXM2 16GB",
    ]


def test_a_prompt_shows_one_line() -> None:
    assert repr(Cluster.preset("h100")).startswith("Cluster(h100: H100 SXM5 80GB ")
    assert "12 x devices of different kinds, the smallest " in repr(Cluster.parse("8xV100-32GB + 4xP100-16GB"))
    for cluster in (measured_cluster(), Cluster.preset("h100"), Cluster.parse("8xV100-32GB + 4xP100-16GB")):
        check_repr(cluster)
