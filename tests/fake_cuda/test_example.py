"""A plan on a laptop, a run on the cluster: the two commands of the README, the second of them on fake GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import ROOT, run_by_fork
from tests.workers import Origin

RANK = 3


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the first command writes, in a process that knows of no GPU."""
    folder = tmp_path_factory.mktemp("laptop")
    path = folder / "gpt.plan.json"
    run_by_fork(ROOT / "examples" / "laptop_to_cluster.py", None, folder, "--plan", str(path))
    return path


def test_the_second_command_trains_on_the_device_of_the_rank(gpus: Origin, plan: Path, tmp_path: Path) -> None:
    program = ROOT / "tests" / "fake_cuda" / "example.py"
    said = json.loads(run_by_fork(program, None, tmp_path, str(RANK), str(plan), origin=gpus))
    assert said["devices"] == [f"cuda:{RANK}"]
    assert said["tensors"] > 100, "parameters, gradients and states of the optimizer"
