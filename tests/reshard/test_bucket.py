"""Reductions joined in buckets: fewer collectives, equal numbers."""

from __future__ import annotations

import pytest
import torch

from autoshard.capture.joint import capture
from autoshard.planner.problem import Wishes
from autoshard.reshard.bucket import bucket_reductions
from tests import models
from tests.partition.meshes import per_rank, simulated
from tests.partition.programs import locals_of, run_halves, step_on
from tests.planner.steps import (
    KINDS,
    bytes_of,
    captured,
    collectives_of,
    every_parameter,
    halves_of,
    links,
    planner_of,
    program_of,
)

_SLOW = links(bandwidth=1e9, latency=1e-9)
"""With a large batch, behind links like these, the best plan is data parallel."""


@pytest.mark.parametrize("forced", [False, True], ids=["reduced", "scattered"])
@pytest.mark.parametrize("limit", [25 * 2**20, 12_000, 1])
def test_bucketed_reductions_give_the_same_numbers(forced: bool, limit: int) -> None:
    module, inputs = models.mlp(dtype=torch.float64, batch=1920)
    graph = capture(module, (), inputs)
    wishes = Wishes(forced=every_parameter(graph) if forced else frozenset())
    with simulated(x=2) as mesh:
        step = step_on(graph, mesh, wishes, _SLOW)
        tensors = locals_of(step, module, inputs, mesh)
        plain = halves_of(step)
        before = run_halves(plain, step, tensors)
        for half in plain:
            bucket_reductions(half.graph, limit)
            half.graph.lint()
            half.recompile()
        after = run_halves(plain, step, tensors)
        for one, other in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True):
            for ours, theirs in zip(per_rank(one, mesh).values(), per_rank(other, mesh).values(), strict=True):
                assert torch.equal(ours, theirs)
    starts = [node for node in plain[1].graph.nodes if node.target in KINDS]
    reductions = [node for node in starts if KINDS[node.target] in ("all_reduce", "reduce_scatter")]
    assert len(reductions) == {25 * 2**20: 1, 12_000: 2, 1: 4}[limit]


def test_a_bucket_holds_what_the_limit_allows_and_all_bytes_are_reduced() -> None:
    limit = 40_000
    planner = planner_of(captured("gpt", batch=512), {"x": 2}, cluster=_SLOW)
    _, backward = halves_of(program_of(planner, planner.plan()))
    total = sum(size * n for (kind, _, size), n in collectives_of(backward).items() if kind == "all_reduce")
    bucket_reductions(backward.graph, limit)
    sizes = []
    for node in backward.graph.nodes:
        if "all_reduce" in str(node.target):
            source = node.args[0]
            parts = source.args[0] if source.target is torch.ops.aten.cat.default else [source]
            sizes.append(sum(bytes_of(part.args[0] if len(parts) > 1 else part) for part in parts))
    assert sum(sizes) == total
    assert len(sizes) > 1
    assert max(sizes) <= limit
