"""Meshes of three axes and more, where not all of them can be open at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autoshard.planner.planner import Planner
from tests.planner.steps import joint_graph, plan_of


def _never_all_of(axes: int, solve: Callable[..., Any]) -> Callable[..., Any]:
    def some(planner: Planner, ask: object, free: frozenset[int], current: object) -> object:
        assert len(free) < axes
        return solve(planner, ask, free, current)

    return some


def test_three_axes_are_planned_in_turn_where_the_tables_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = {"a": 2, "b": 2, "c": 2}
    together = plan_of(joint_graph("mlp"), mesh)
    monkeypatch.setattr("autoshard.planner.multi_axis.MOST_PAIRS", 1)
    monkeypatch.setattr(Planner, "solve_block", _never_all_of(3, Planner.solve_block))
    in_turn = plan_of(joint_graph("mlp"), mesh)
    assert in_turn.lower_bound <= together.cost * (1 + 1e-9)
    assert in_turn.cost >= together.lower_bound * (1 - 1e-9)
