"""Estimates of pipelines: shares of what the whole step takes on one stage's devices."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.search.pipeline_estimates import PipelineEstimates, longest_stage
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape
from tests.targets import target as target_of

WHOLE = 12.0
FINE = [1 / 4096] * 4096
"""Shares of operators so small that stages may be as unequal as their devices, to a thousandth."""


class Plans:
    """Plans of the whole step that take so many seconds, whatever the devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.request = SimpleNamespace(target=target_of(cluster=cluster))
        self.asked: list[MeshShape] = []

    def target(self, effort: str, *, limited: bool) -> Any:
        assert (effort, limited) == ("fast", False)
        return self.request.target

    def plan_on(self, mesh: MeshShape, target: Any) -> Any:
        assert target.cluster.is_uniform
        self.asked.append(mesh)
        if mesh.size == 1:
            raise PlanError("one device is too few")
        return SimpleNamespace(step_seconds=WHOLE)


def shape(**axes: int) -> Shape:
    return Shape(MeshShape.of(axes), "pp")


def test_stages_share_the_step_and_wait_for_one_microbatch() -> None:
    plans: Any = Plans(Cluster.of("v100"))
    estimates = PipelineEstimates(plans, FINE)
    assert estimates.seconds(shape(pp=2, x=4), [1, 4]) == pytest.approx(WHOLE / 2 * (1 + 1 / 12), rel=1e-3)
    assert estimates.seconds(shape(pp=2, x=4), [10]) == pytest.approx(WHOLE / 2 * (1 + 1 / 30), rel=1e-3)
    assert plans.asked == [MeshShape.of({"x": 4})]
    assert estimates.seconds(shape(pp=4), [4]) == 0.0


def test_no_stage_is_shorter_than_the_longest_operator() -> None:
    plans: Any = Plans(Cluster.of("v100"))
    estimates = PipelineEstimates(plans, [0.2, 0.5, 0.3])
    assert estimates.seconds(shape(pp=4, x=4), [4]) == pytest.approx(WHOLE / 2 * (1 + 3 / 12), rel=1e-3)


def test_faster_stages_have_more_of_it() -> None:
    plans: Any = Plans(Cluster.parse("4xV100-32GB + 4xP100-16GB"))
    speed = 15.7 / 10.6
    found = PipelineEstimates(plans, FINE).seconds(shape(pp=2, x=4), [10])
    assert found == pytest.approx(WHOLE / (1 + speed) * (1 + 1 / 30), rel=1e-2)


def test_the_longest_stage_is_that_of_the_best_cuts() -> None:
    """Against all ways to cut a few operators into stretches, on devices of any speed."""
    generator = random.Random(0)
    for _ in range(50):
        shares = [generator.random() for _ in range(generator.randint(1, 7))]
        speeds = [generator.choice((1.0, 1.5, 3.0)) for _ in range(generator.randint(1, 4))]
        cuts = itertools.combinations_with_replacement(range(len(shares) + 1), len(speeds) - 1)
        best = min(
            max(
                sum(shares[start:end]) / speed
                for start, end, speed in zip((0, *cut), (*cut, None), speeds, strict=True)
            )
            for cut in cuts
        )
        whole = sum(shares)
        found = longest_stage([one / whole for one in shares], speeds)
        assert found == pytest.approx(best / whole, rel=1e-5)
