"""The rows of `docs/numerics.md`, run again, and the page itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from autoshard.specs.axes import MeshShape
from tests import models
from tests.numerics import (
    LOWERED,
    MESHES,
    MODELS,
    OTHERS,
    PAGE,
    PLANNED,
    RANDOMLY,
    REAL,
    SQUARE,
    TIGHT,
    axes,
    page,
    planned_row,
    random_row,
)
from tests.pipeline_rows import CASES as PIPELINES
from tests.pipeline_rows import compare as compare_held
from tests.precision import BFLOAT16_ROUNDING, FACTOR, distances
from tests.tight_limits import tight_row
from tests.training import FEW, OF_ONE_LAYER, TOLERANCE, compare, one_device, relative_difference, train_on_mesh

FAST = {("mlp", mesh) for mesh in MESHES} | {("hf_gpt2", (2,))}
# The page has every model with two layers on every mesh; here one of them has two, which are tied.
SLOW = [
    ("wide_resnet", (3,)),
    ("hf_llama" + OF_ONE_LAYER, (2, 2)),
    ("hf_bert" + OF_ONE_LAYER, (3,)),
    ("hf_vit" + OF_ONE_LAYER, (4,)),
]
CASES = [
    *(pytest.param(*case) for case in sorted(FAST)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]
ALIKE = ("hf_opt", "hf_roberta", "vgg", "hf_qwen3", "lstm", "hf_mixtral", "gshard", "wide_resnet")
"""Models on the page alone: with the operators of GPT-2, BERT, ResNet, Qwen3-MoE and GNMT, or trained by the tests of
the library's units; of the ResNets the smaller one is trained above."""
MESH_OF = {"hf_qwen3_moe": SQUARE, "hf_gemma": SQUARE, "dlrm": SQUARE, "hf_albert": (3,), "hf_whisper": (4,)}
OTHER_CASES = [(model, MESH_OF.get(model, (2,))) for model in OTHERS if model not in ALIKE]


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_planned_training_equals_one_device(model: str, mesh: tuple[int, ...]) -> None:
    fast = (model, mesh) in FAST
    row = planned_row(model, mesh, steps=FEW if fast else 1, effort="full" if fast else "fast")
    assert row.errors.worst <= TOLERANCE
    assert bool(row.collectives) == (math.prod(mesh) > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), OTHER_CASES)
def test_the_other_models_train_as_on_one_device(model: str, mesh: tuple[int, ...]) -> None:
    row = planned_row(model, mesh, steps=1, effort="fast")
    assert row.errors.worst <= TOLERANCE
    assert row.replicated == 0
    assert row.collectives


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), [("unet", (2,))])
def test_other_models_under_a_random_plan(model: str, mesh: tuple[int, ...]) -> None:
    assert random_row(model, mesh, seed=1).errors.worst <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hf_mixtral"])
def test_the_default_experts_equal_the_batched_ones(model: str) -> None:
    """`grouped_mm` has no kernel in float64 on one device; what is captured of it does."""
    trace = train_on_mesh(model, axes(SQUARE), 1, effort="fast", experts="grouped_mm")
    assert compare(trace, one_device(model, 1)).worst <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "mesh", "recompute"),
    [("mlp", SQUARE, "none"), pytest.param("hf_gpt2", (2,), "auto", marks=pytest.mark.slow)],
)
def test_plans_under_the_smallest_limit_equal_one_device(model: str, mesh: tuple[int, ...], recompute: str) -> None:
    row = tight_row(model, mesh, recompute)
    assert row.errors.worst <= TOLERANCE
    assert row.limit < row.unlimited
    assert row.lying["once"]
    assert recompute == "none" or row.recomputed


@pytest.mark.parametrize("model", ["mlp", pytest.param("hf_gpt2", marks=pytest.mark.slow)])
def test_bfloat16_on_a_mesh_is_as_near_to_float64_as_on_one_device(model: str) -> None:
    ours, alone = distances(model, axes(SQUARE))
    assert ours.loss <= max(FACTOR * alone.loss, BFLOAT16_ROUNDING)
    assert ours.gradients <= max(FACTOR * alone.gradients, BFLOAT16_ROUNDING)


def test_every_model_has_a_name() -> None:
    assert MODELS.keys() | {"gpt"} == models.ZOO.keys()


def test_the_page_has_every_row() -> None:
    planned, random, processes, pipelines, limited, lowered = PAGE.read_text("utf-8").split("\n## ")[1:]
    for cases, table in ((PLANNED, planned), (RANDOMLY, random)):
        assert table.count(" of ") >= len(cases)
        assert all(f"| {MODELS[model]} | {mesh} |" in table for model, mesh in cases)
    for model in REAL:
        assert f"| {MODELS[model]} | (2, 2) |" in processes
    for case in PIPELINES:
        row = f"| {MODELS[case.model]} | {MeshShape.of(case.mesh)} | {case.order.name} | {case.microbatches} |"
        assert row in pipelines
    for model, mesh, recompute in TIGHT:
        assert f"| {MODELS[model]} | {mesh} | {recompute} |" in limited
    for model in LOWERED:
        assert f"| {MODELS[model]} | (2, 2) |" in lowered


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


def test_the_comparison_of_pipelines_sees_every_kind() -> None:
    expected = {name: torch.ones(2) for name in ("step 0", "norm 0", "gradient w", "w")}
    assert max(dataclasses.astuple(compare_held([expected, {}], expected))) == 0
    for place, name in enumerate(expected):
        errors = dataclasses.astuple(compare_held([expected, {name: torch.ones(2) + 1e-3}], expected))
        assert [error > 0 for error in errors] == [other == place for other in range(4)]
        missing = {other: value for other, value in expected.items() if other != name}
        assert dataclasses.astuple(compare_held([missing], expected))[place] == math.inf


def test_one_section_of_the_page_is_made_alone() -> None:
    """It replaces its own part, or goes to its place where there was none."""
    before = PAGE.read_text("utf-8")
    others = [section for section in before.split("\n## ")[1:] if not section.startswith("Pipelines\n")]
    made = page({"Pipelines": "\n## Pipelines\n\nnew\n"}, before)
    for text in (made, page({"Pipelines": "\n## Pipelines\n\nnew\n"}, made.replace("\n## Pipelines\n\nnew\n", ""))):
        sections = text.split("\n## ")[1:]
        assert sections.pop(3) == "Pipelines\n\nnew\n"
        assert sections == others
