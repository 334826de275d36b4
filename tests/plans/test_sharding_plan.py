from __future__ import annotations

import dataclasses

import pytest

from autoshard.errors import PlanError
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.notebooks import check_repr, shown
from tests.sample_plan import sample_plan


def test_gap_is_relative_to_the_cost() -> None:
    assert sample_plan(cost=2.0, lower_bound=1.5).gap == pytest.approx(0.25)
    assert sample_plan(cost=2.0, lower_bound=2.0).gap == 0.0
    assert sample_plan(cost=0.0, lower_bound=0.0).gap == 0.0


def test_a_plan_is_equal_after_a_round_trip() -> None:
    plan = sample_plan()
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_a_plan_is_equal_after_a_file(tmp_path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan


def test_what_a_prompt_shows_of_a_plan_is_one_line() -> None:
    plan = sample_plan()
    line = f"{len(plan.placements)} parameters and buffers on {plan.mesh}"
    assert line in repr(plan)
    check_repr(plan)


def test_a_notebook_shows_the_tables_of_a_plan() -> None:
    page = shown(sample_plan(hints={"<b>": "a & b"}))
    assert ["h.*.attn.qkv.weight", "6", "192x64", "R", "S(0,f=3)", "never"] in page.rows
    # Sharded placements stand out, as on a terminal.
    assert any("color: #" in style for style in page.styles)
    assert page.tags["b"] == 0


def test_a_missing_file_is_a_plan_error(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"no_such\.json.*cannot be read"):
        ShardingPlan.load(tmp_path / "no_such.json")


def test_every_placement_row_has_one_placement_per_axis() -> None:
    plan = sample_plan()
    with pytest.raises(AssertionError, match="2 placements on a mesh of 1 axes"):
        dataclasses.replace(plan, mesh=MeshShape.of({"dp": 8}))


def test_check_accepts_what_the_plan_was_made_for() -> None:
    plan = sample_plan()
    plan.check(MeshShape.of({"dp": 2, "tp": 4}), plan.fingerprint, {k: list(v) for k, v in plan.shapes.items()})


@pytest.mark.parametrize(
    ("mesh", "change", "fingerprint", "message"),
    [
        ({"dp": 8}, {}, "ab" * 32, r"made for the mesh dp=2, tp=4; this mesh is dp=8"),
        (
            {"dp": 2, "tp": 4},
            {"embed.weight": (7, 64)},
            "ab" * 32,
            r"embed\.weight \(planned \(1024, 64\), here \(7, 6",
        ),
        ({"dp": 2, "tp": 4}, {"new.bias": (3,)}, "ab" * 32, r"the plan lacks new\.bias"),
        ({"dp": 2, "tp": 4}, {"embed.weight": None}, "ab" * 32, r"the model lacks embed\.weight"),
        ({"dp": 2, "tp": 4}, {}, "cd" * 32, r"captured graph does not \(cdcdcdcdcdcd here, abababababab planned\)"),
    ],
)
def test_check_names_the_difference(mesh, change, fingerprint, message) -> None:
    plan = sample_plan()
    shapes = {name: shape for name, shape in (plan.shapes | change).items() if shape is not None}
    with pytest.raises(PlanError, match=message):
        plan.check(MeshShape.of(mesh), fingerprint, shapes)


def test_check_names_few_of_many_differences() -> None:
    plan = sample_plan()
    with pytest.raises(PlanError, match=r"the model lacks embed\.weight, .* and 10 more"):
        plan.check(plan.mesh, plan.fingerprint, {})


def test_the_representation_says_that_time_ended_the_search() -> None:
    assert "time limit" not in repr(sample_plan())
    ended = dataclasses.replace(
        sample_plan(), method="messages, ended by time_limit=3 s: a longer search may find a faster plan"
    )
    assert "; the time limit ended the search; print it to see more)" in repr(ended)
