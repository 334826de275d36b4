"""Dynamic sizes, local inputs, autocast, hints and shares on GPUs, by plans that were made without one."""

from __future__ import annotations

import json

import pytest

from tests.fake_cuda.call_variants import CALL_VARIANTS
from tests.programs import ROOT, run_by_fork
from tests.workers import Origin

RANK = 3


@pytest.fixture(scope="module")
def devices(gpus: Origin, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Where outputs and gradients of every way lie."""
    folder = tmp_path_factory.mktemp("ways")
    for name, way in CALL_VARIANTS.items():
        way.plan().save(folder / f"{name}.json")
    program = ROOT / "tests" / "fake_cuda" / "call_variants.py"
    found: dict[str, list[str]] = json.loads(run_by_fork(program, None, folder, str(RANK), str(folder), origin=gpus))
    return found


@pytest.mark.parametrize("way", CALL_VARIANTS)
def test_a_plan_made_without_a_gpu_serves_all_ways_of_calling(devices: dict[str, list[str]], way: str) -> None:
    assert devices[way] == [f"cuda:{RANK}"]
