"""Placements of inputs and outputs by name: the syntax of hints, and the names of other calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import autoshard
from autoshard.errors import AutoshardError, HintError, PlanError
from tests.runtime.meshes import simulated_mesh
from tests.training import fast_links

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESH = {"dp": 2, "tp": 2}
X, Y = torch.empty(4, 6), torch.empty(4, 8)


class Scored(nn.Module):
    """Rows, in a list, and with labels their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        rows = self.linear(x) * mask
        return {"rows": [rows, rows.T]} if y is None else {"loss": (rows - y).square().mean(), "rows": [rows, rows.T]}


def plan(**options: Any) -> autoshard.ShardingPlan:
    planned = autoshard.plan(Scored(), MESH, (X, torch.empty(8), Y), cluster=fast_links(), **options)
    assert isinstance(planned, autoshard.ShardingPlan)
    return planned


INPUTS: list[tuple[dict[str, Any], dict[str, tuple[Placement, ...]]]] = [
    ({}, {"x": (S0, R), "mask": (R, R), "y": (S0, R)}),
    ({"data_axes": ("dp", "tp")}, {"x": (S0, S0), "mask": (R, R), "y": (S0, S0)}),
    ({"input_placements": {"x": {"tp": S1}}}, {"x": (S0, S1), "mask": (R, R), "y": (S0, R)}),
    ({"input_placements": {"*": (None, R)}}, {"x": (S0, R), "mask": (R, R), "y": (S0, R)}),
    ({"input_placements": {"m*": {"dp": S0}, "?": [R, Shard(-1)]}}, {"x": (R, S1), "mask": (S0, R), "y": (R, S1)}),
]


@pytest.mark.parametrize(("options", "placements"), INPUTS)
def test_local_inputs_lie_as_asked_and_as_rows_elsewhere(
    options: dict[str, Any], placements: dict[str, tuple[Placement, ...]]
) -> None:
    assert plan(inputs="local", **options).input_placements == placements


@pytest.mark.parametrize(
    ("options", "placements"),
    [
        ({}, [(R, R), (R, R), (R, R)]),
        ({"outputs": "local"}, [(R, R), (S0, R), (S1, R)]),
        ({"outputs": "local", "output_placements": {"rows[0]": {"tp": S1}}}, [(R, R), (S0, S1), (S1, R)]),
        ({"output_placements": {"rows[*]": {"tp": S0}}}, [(R, R), (R, S0), (R, S0)]),
    ],
)
def test_outputs_come_back_as_asked_and_as_rows_elsewhere(
    options: dict[str, Any], placements: list[tuple[Placement, ...]]
) -> None:
    names = ("loss", "rows[0]", "rows[1]")
    assert plan(**options).output_placements == dict(zip(names, placements, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"input_placements": {"x": (S0,)}}, HintError, r"input_placements\['x'\].*1 placements for the 2 axes"),
        ({"input_placements": {"x": {"ep": S0}}}, HintError, r"names the mesh axis 'ep'; the axes of this mesh are dp"),
        ({"input_placements": {"x": Partial()}}, HintError, "cannot be Partial"),
        ({"input_placements": {"x": Shard(2)}}, HintError, r"shards dim 2 of x, which has 2 dims"),
        ({"input_placements": {"x": {"dp": S0}, "*": R}}, HintError, r"contradict each other on x, mesh axis 'dp'"),
        ({"input_placements": {"labels": S0}}, HintError, "no input 'labels'"),
        ({"input_placements": {"[xy]": S0}}, HintError, r"no input '\[xy\]'; the inputs are x, mask, y"),
        ({"output_placements": {"logits": S0}}, HintError, "no output 'logits'; the outputs are"),
        ({"outputs": "local", "output_placements": "planned"}, PlanError, "do not tell how they lie"),
        ({"inputs": "global", "data_axes": ("dp",)}, PlanError, 'data_axes is for inputs="local"'),
        ({"inputs": "global", "example_inputs": "local"}, PlanError, 'is for inputs="local"'),
        ({"outputs": "rows"}, PlanError, r"outputs='rows': choose \"global\""),
    ],
)
def test_values_that_are_not_valid(options: dict[str, Any], error: type[AutoshardError], text: str) -> None:
    with pytest.raises(error, match=text):
        plan(**{"inputs": "local", **options})


def test_names_of_other_calls_are_no_errors() -> None:
    """An argument may be left out, and a later call may lack outputs of the first one."""
    with simulated_mesh(**MESH) as mesh:
        module = autoshard.parallelize(
            *(Scored(), mesh, (X, torch.empty(8), Y)),
            cluster=fast_links(),
            inputs="local",
            input_placements={"y": {"dp": S0}},
            output_placements={"*loss*": R, "*rows*": S0},
        )
        module.eval()
        rows = module(torch.ones(2, 6), torch.ones(8))
        assert tuple(rows["rows"][0].placements) == (S0, S0)
