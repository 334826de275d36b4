from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import PlanError
from autoshard.plans import plan_data
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh
from tests.sample_plan import sample_plan
from tests.training import held_by_ranks

TEXT = sample_plan().to_json()


def test_placements_are_stored_as_texts() -> None:
    data = json.loads(TEXT)["plan"]
    assert data["placements"]["h.0.attn.qkv.weight"] == ["R", "S(0,f=3)"]
    assert data["mesh"] == {"dp": 2, "tp": 4}


def test_the_layout_of_the_file_does_not_matter() -> None:
    assert ShardingPlan.from_json(json.dumps(json.loads(TEXT), indent=4)) == sample_plan()


@given(st.integers(0, len(TEXT.rstrip()) - 1))
def test_a_file_cut_short_is_refused(length: int) -> None:
    with pytest.raises(PlanError, match="the plan is cut short or damaged"):
        ShardingPlan.from_json(TEXT[:length])


@pytest.mark.parametrize(
    ("old", "new"), [('"S(0)"', '"R"'), ('"dp": 2', '"dp": 4'), ("0.0123", "0.0124"), ('"mm_0": [1', '"mm_0": [2')]
)
def test_an_edited_file_is_refused(old: str, new: str) -> None:
    assert old in TEXT
    with pytest.raises(PlanError, match="was edited or damaged"):
        ShardingPlan.from_json(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a sharding plan"),
        ('{"format": "autoshard cluster"}', "is not a sharding plan"),
        (
            TEXT.replace('"version": 3', '"version": 1', 1),
            "version 1 of the plan format; this autoshard reads version 3",
        ),
        ('{"format": "autoshard plan", "version": 3}', "lacks its content or its checksum"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ShardingPlan.from_json(text)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("placements", {"w": ["S(0)", "T"]}, r"at placements\.w\.1, 'T' does not match"),
        ("placements", {"w": ["S(0)"]}, r"gives w 1 placements \(S\(0\)\) on a mesh of 2 axes \(dp, tp\)"),
        ("mesh", {"dp": 0}, r"at mesh\.dp, 0 is less than the minimum"),
        ("memory", {}, "at memory"),
        ("extra", 1, "'extra' was unexpected"),
    ],
)
def test_data_with_a_right_checksum_must_follow_the_schema(part: str, value: object, message: str) -> None:
    data = plan_data.to_data(sample_plan()) | {part: value}
    with pytest.raises(PlanError, match=message):
        ShardingPlan.from_json(plan_data.encode(data))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    text = re.sub(r'"cost": [0-9.e+-]+', f'"cost": {number}', TEXT, count=1)
    assert text != TEXT
    with pytest.raises(PlanError, match=rf"edited or damaged since it was saved: {re.escape(number)} is not a finite"):
        ShardingPlan.from_json(text)


def test_decisions_with_names_that_are_numbers_keep_their_checksum() -> None:
    text = plan_data.encode(plan_data.to_data(sample_plan(decisions={10: [1], 9: [2]})))
    assert ShardingPlan.from_json(text).decisions == {"10": [1], "9": [2]}


class _Rows(nn.Linear):
    """Makes rows of two dims, of which one is of a dynamic size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(-1, 6).sin()


def test_blocks_of_a_dynamic_size_serve_other_sizes_behind_a_file() -> None:
    dynamic = {"x": {1: "n"}}
    module = _Rows(6, 6, dtype=torch.float64)
    alone, x = copy.deepcopy(module), torch.randn(2, 5, 6, dtype=torch.float64)
    plan = random_plan(capture(module, (x,), {}, dynamic=dynamic), MeshShape.of({"x": 4}), 0)
    assert "S(0,f=2,b=2)" in plan.to_json()
    with simulated_mesh(x=4) as mesh:
        plan = ShardingPlan.from_json(plan.to_json())
        autoshard.parallelize(module, mesh, (x,), plan=plan, dynamic=dynamic)
        for size in (5, 9, 14):
            x = torch.randn(2, size, 6, dtype=torch.float64)
            for held in held_by_ranks(module(x).detach()):
                torch.testing.assert_close(held, alone(x).detach(), rtol=1e-9, atol=1e-12)
        assert len(vars(module)["_autoshard_runtime"].programs.table) == 1
