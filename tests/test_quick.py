"""The list of tests that `make quick` runs."""

from __future__ import annotations

import pytest

from tests.programs import ROOT

LINES = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize("line", LINES)
def test_a_line_names_tests(line: str, request: pytest.FixtureRequest) -> None:
    path = line.partition("::")[0]
    assert (ROOT / path).exists()
    collected = [item.nodeid for item in request.session.items if item.nodeid.startswith(path)]
    # Where a few files are run alone, the others are not known.
    assert not collected or any(node.startswith(line) for node in collected)
