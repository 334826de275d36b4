from __future__ import annotations

from rich.console import Console

from autoshard.cli.calibration import cluster_table
from autoshard.cluster import Cluster
from tests.cluster.test_measurements import measured_cluster


def _printed(cluster: Cluster) -> str:
    console = Console(width=120, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(cluster_table(cluster))
    return capture.get()


def test_a_preset_shows_its_figures() -> None:
    text = _printed(Cluster.preset("h100"))
    assert "H100 SXM5 80GB" in text
    assert "bfloat16 989,000 GFLOP/s" in text
    assert "0.58 s" in text
    assert "all_gather" not in text


def test_a_measured_cluster_shows_its_collectives() -> None:
    rows = [
        line.split() for line in _printed(measured_cluster()).splitlines() if line.lstrip().startswith("all_gather")
    ]
    assert rows[0][:3] == ["all_gather", "2", "1"]
    assert rows[1][:3] == ["all_gather", "2", "2"]
    assert rows[0][3:7] == ["256", "B", "1", "s"]


def test_kinds_of_device_are_shown() -> None:
    text = _printed(Cluster.parse("8xV100-32GB + 4xP100-16GB"))
    assert "8 x V100 SXM2 32GB" in text
    assert "4 x P100 SXM2 16GB" in text
