"""Ranks of a job on GPUs run plans that were made without one: the same graph, device and collectives for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import RANKS, Case, cases, pipelines
from tests.programs import run_by_fork
from tests.workers import Origin

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CASES = [(rank, case) for rank in RANKS for case in cases(rank)]
Report = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reports(gpus: Origin, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Report]:
    """What every rank says of its cases: each a process, as belief in GPUs can not be taken away again."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    run_by_fork(HERE / "plans.py", None, folder, str(folder))
    run_by_fork(HERE / "rank.py", len(RANKS), folder, str(folder), origin=gpus)
    return {rank: json.loads((folder / f"rank-{rank}.json").read_text()) for rank in RANKS}


@pytest.mark.parametrize(("rank", "case"), CASES, ids=[f"{rank}-{case.model}-{case.mesh}" for rank, case in CASES])
def test_a_plan_made_without_a_gpu_runs_on_the_device_of_the_rank(
    reports: dict[int, Report], rank: int, case: Case
) -> None:
    report = reports[rank][case.plan]
    assert not report["error"], report["error"]
    assert {name: device for name, device in report["devices"].items() if device != f"cuda:{rank}"} == {}
    assert not report["lint"]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", pipelines(), ids=[f"{case.model}-{case.mesh}" for case in pipelines()])
def test_a_pipeline_planned_without_a_gpu_runs_on_the_device_of_the_rank(
    reports: dict[int, Report], rank: int, case: Case
) -> None:
    report = reports[rank][case.plan]
    assert not report["error"], report["error"]
    planned, captured = report["fingerprints"]
    assert captured == planned
    kinds = {name.split()[0] for name in report["devices"]}
    assert kinds == {"output", "gradient", "parameter"}
    assert {name: device for name, device in report["devices"].items() if device != f"cuda:{rank}"} == {}
    assert not report["without gradient"]
    assert not report["lint"]


@pytest.mark.parametrize("case", [case for case in pipelines() if case.mesh == "rows"], ids=lambda case: case.model)
def test_ranks_of_one_stage_call_the_same_collectives(reports: dict[int, Report], case: Case) -> None:
    first, second = (said[case.plan] for said in reports.values())
    assert first["collectives"]
    assert first["collectives"] == second["collectives"]


@pytest.mark.parametrize("case", cases(RANKS[0]), ids=lambda case: case.model)
def test_ranks_call_the_same_collectives(reports: dict[int, Report], case: Case) -> None:
    first, *others = (report[case.plan] for report in reports.values())
    assert not first["error"], first["error"]
    assert all(other["collectives"] == first["collectives"] for other in others)
    assert all(other["without gradient"] == first["without gradient"] for other in others)


def test_there_are_collectives(reports: dict[int, Report]) -> None:
    """Else the comparison of ranks compares nothing."""
    called = [said["collectives"] for report in reports.values() for said in report.values() if not said["error"]]
    assert sum(map(bool, called)) > 0.9 * len(CASES)
