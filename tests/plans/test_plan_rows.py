from __future__ import annotations

import pytest

from autoshard.plans import plan_rows
from autoshard.plans.contents import Collective
from autoshard.units import format_seconds
from tests.sample_plan import sample_plan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (3.2e-5, "32 µs"), (0.0123, "12.3 ms"), (1.0, "1 s"), (75.44, "75.4 s")],
)
def test_seconds_are_written_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rows_count_every_parameter_once() -> None:
    plan = sample_plan()
    assert sum(row.count for row in plan_rows.plan_tensors(plan)["parameter"]) == len(plan.placements)


def test_work_of_one_module_is_added_before_layers_are_put_together() -> None:
    sent = [
        Collective("all_reduce", "tp", 10, count, f"h.{layer}", "forward", 1.0)
        for layer, count in ((0, 1), (0, 2), (1, 3), (2, 5))
    ]
    rows = plan_rows.collective_rows(sent)
    assert [(row.module, row.count, row.bytes, row.seconds) for row in rows] == [
        ("h.{0-1}", 6, 60, 6.0),
        ("h.2", 5, 50, 5.0),
    ]


def test_the_totals_of_rows_are_the_totals_of_the_plan() -> None:
    plan = sample_plan()
    rows = plan_rows.collective_rows(plan.collectives)
    assert sum(row.count for row in rows) == sum(one.count for one in plan.collectives)
    assert sum(row.bytes for row in rows) == sum(one.count * one.bytes for one in plan.collectives)
