"""The rows of `docs/numerics.md`, run again, and the page itself."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.numerics import MESHES, MODELS, PAGE, REAL, planned_row
from tests.training import TOLERANCE, compare, one_device, relative_difference

FAST = {("mlp", mesh) for mesh in MESHES} | {("hf_gpt2", (2,)), ("hf_llama", (2, 2)), ("resnet18", (3,))}
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in itertools.product(MODELS, MESHES)
]


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_planned_training_equals_one_device(model: str, mesh: tuple[int, ...]) -> None:
    row = planned_row(model, mesh)
    assert row.errors.worst <= TOLERANCE
    assert bool(row.collectives) == (math.prod(mesh) > 1)


def test_the_page_has_every_row() -> None:
    planned, random, processes = PAGE.read_text("utf-8").split("\n## ")[1:]
    for model, mesh in itertools.product(MODELS.values(), MESHES):
        assert f"| {model} | {mesh} |" in planned
        assert (f"| {model} | {mesh} |" in random) == (mesh != (1,))
    for model in REAL:
        assert f"| {MODELS[model]} | (2, 2) |" in processes


def test_the_comparison_sees_small_differences() -> None:
    trace = one_device("mlp")
    assert compare(trace, trace).worst == 0
    wrong = {name: [values[0] * (1 + 1e-8)] for name, values in trace.gradients.items()}
    assert compare(dataclasses.replace(trace, gradients=wrong), trace).worst > TOLERANCE
    ones = {"a": [torch.ones(3)]}
    assert relative_difference({"a": [torch.ones(3), torch.ones(3) + 1e-3]}, ones) == pytest.approx(1e-3, rel=1e-3)
    assert relative_difference({}, ones) == math.inf
    assert relative_difference({"a": [torch.ones(1)]}, ones) == math.inf
    assert relative_difference({"a": [torch.full((3,), math.nan)]}, ones) == math.inf
