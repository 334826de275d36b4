"""What is said where no plan fits: ways out that were tried, with what they need."""

from __future__ import annotations

import re

import pytest

from autoshard.errors import BudgetError
from autoshard.memory.budget import parse_bytes
from autoshard.planner.recompute import planned
from tests.planner.steps import captured, planner_of


def _said(recompute: str) -> str:
    planner = planner_of(captured("gpt", layers=2, batch=32), {"x": 2}, memory_limit=1000, recompute=recompute)
    with pytest.raises(BudgetError) as caught:
        planned(planner)
    return str(caught.value)


def test_recomputation_is_named_with_a_limit_that_it_keeps() -> None:
    said = re.search(r'allow recomputation \(recompute="full" needs ([^)]+)\)', _said("none"))
    assert said is not None
    limit = int(1.05 * parse_bytes(said[1]))  # one decimal is said
    graph = captured("gpt", layers=2, batch=32)
    assert planned(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="full")).memory.peak <= limit
    with pytest.raises(BudgetError):
        planned(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="none"))


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_what_was_asked_for_already_is_no_way_out(recompute: str) -> None:
    said = _said(recompute)
    assert "add devices (x=4 needs" in said
    assert "recomputation" not in said
