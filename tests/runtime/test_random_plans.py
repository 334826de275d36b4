"""Any strategies that fit together compute what one device computes, whether a planner would choose them or not."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.capture.joint import capture
from autoshard.specs.axes import MeshShape
from tests.random_plans import random_plan
from tests.training import OF_ONE_LAYER, ONE_LAYER, TOLERANCE, build, compare, one_device, train_random_plan

FSDP: dict[str, Any] = {"forced": 0.5}
OPEN: dict[str, Any] = {"forced": 0.3, "planned_outputs": True}
UNEVEN: dict[str, Any] = {"forced": 0.3, "uneven": 0.5}

FAST = [
    ("mlp", (2, 3), 0, {}),
    ("mlp", (2, 2), 1, OPEN),
    ("mlp", (5,), 2, UNEVEN),
    ("mlp", (5, 2), 3, UNEVEN),
    (ONE_LAYER, (3,), 4, FSDP),
    (ONE_LAYER, (2, 2), 5, OPEN),
]
SLOW = [
    ("mlp", (2, 2, 2), 7, OPEN),
    ("hf_llama" + OF_ONE_LAYER, (5,), 10, UNEVEN),
    ("wide_resnet", (2,), 13, OPEN),
]
CASES = [*(pytest.param(*case) for case in FAST), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def axes(sizes: tuple[int, ...]) -> dict[str, int]:
    return {f"axis{place}": size for place, size in enumerate(sizes)}


@pytest.mark.parametrize(("model", "mesh", "seed", "options"), CASES)
def test_random_strategies_equal_one_device(
    model: str, mesh: tuple[int, ...], seed: int, options: dict[str, Any]
) -> None:
    trace = train_random_plan(model, axes(mesh), seed, **options)
    assert trace.collectives
    assert compare(trace, one_device(model, len(trace.losses))).worst <= TOLERANCE


def test_seeds_draw_different_plans_and_equal_seeds_equal_ones() -> None:
    module, inputs = build("mlp")
    graph, mesh = capture(module, (), inputs), MeshShape.of({"a": 2, "b": 2})
    first, again, other = (random_plan(graph, mesh, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.decisions != other.decisions
