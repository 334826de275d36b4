"""`benchmarks/contest.py`: files of the contest's format, and the command."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Problem, SolverError, solve
from benchmarks.contest import load, main, save
from tests.solver.problems import small_problems

EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def test_the_contest_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "example.json"
    path.write_text(json.dumps(EXAMPLE))
    solution = solve(load(path))
    assert solution.status == "optimal"
    assert solution.cost == 445
    assert solution.assignment == (0, 0, 2, 1, 0)
    assert solution.peak == 50


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
@given(problem=small_problems())
@settings(max_examples=15, deadline=None)
def test_a_saved_problem_is_the_same_problem(
    tmp_path_factory: pytest.TempPathFactory, name: str, problem: Problem
) -> None:
    path = tmp_path_factory.mktemp("problems") / name
    save(problem, path)
    again = load(path)
    assert all(np.array_equal(a, b) for a, b in zip(problem.costs, again.costs, strict=True))
    assert [(e.source, e.target, e.costs.tolist()) for e in problem.edges] == [
        (e.source, e.target, e.costs.tolist()) for e in again.edges
    ]
    assert again.intervals == problem.intervals
    assert again.limit == problem.limit
    assert all(np.array_equal(a, b) for a, b in zip(problem.components, again.components, strict=True))


def test_equal_tables_are_shared_when_read(tmp_path: Path) -> None:
    document = json.loads(json.dumps(EXAMPLE))
    document["problem"]["edges"] = {"nodes": [[0, 1], [0, 3]], "costs": [[1, 10**18], [1, 10**18]]}
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(document))
    problem = load(path)
    assert problem.edges[0].costs is problem.edges[1].costs
    assert problem.edges[0].costs.tolist() == [[1.0, np.inf]]


def broken_documents() -> list[tuple[bytes, str]]:
    short = json.dumps(EXAMPLE).encode()
    missing = {"problem": {"nodes": EXAMPLE["problem"]["nodes"]}}
    misfit = json.loads(short)
    misfit["problem"]["edges"]["costs"][0] = [1, 2, 3]
    return [
        (short[:100], "not a JSON file, or was cut short"),
        (json.dumps(missing).encode(), "not a problem in the contest's format: it lacks '"),
        (json.dumps(misfit).encode(), "an edge table has 3 entries, its nodes need 1 x 2"),
    ]


@pytest.mark.parametrize(("content", "message"), broken_documents())
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(SolverError, match=message):
        load(path)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.json.gz"
    path.write_bytes(gzip.compress(json.dumps(EXAMPLE).encode())[:50])
    with pytest.raises(SolverError, match="cut short"):
        load(path)


def test_the_command_reports_and_ends_with_the_assignment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "example.json"
    path.write_text(json.dumps(EXAMPLE))
    assert main([str(path), "--time-limit", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cost 445" in lines
    assert "gap 0" in lines
    assert lines[-1] == "[0, 0, 2, 1, 0]"


def test_the_command_says_what_is_wrong_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
