"""Gradients that are added up over the microbatches and reduced once per step, in processes, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from autoshard.reshard.reductions import DeferredReduction
from autoshard.runtime.shards import gather_full_tensor
from autoshard.tools.verify.float64 import default_float64
from tests.pipeline.pipelines import assert_equal, model, pipeline_of, plan_by_hand, train_model_alone, train_pipeline
from tests.training import Calls
from tests.workers import Workers

MODEL: dict[str, Any] = {"layers": 1, "tied": True}


def plan_of(name: str, virtual: int, placement: Any, reduced: DeferredReduction = "step") -> PipelinePlan:
    """Stages of two ranks each, which differ in their part of the batch."""
    module, inputs = model("gpt", **MODEL)
    order = schedule(name, 2, 2, virtual)
    return plan_by_hand(module, inputs, {"pp": 2, "dp": 2}, order, hints={"*": placement}, reduced=reduced)


def counted(plan: PipelinePlan) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """The collectives of one step inside this rank's stages, and what training leaves behind.

    Gradients of two steps add up.
    """
    module, inputs = model("gpt", **MODEL)
    pipeline = pipeline_of(module, inputs, plan)
    with default_float64():
        with Calls() as calls:
            pipeline.train_step(**inputs)
        once = {name: gather_full_tensor(one.grad).clone() for name, one in pipeline.named_parameters()}
        pipeline.train_step(**inputs)
        twice = {name: gather_full_tensor(one.grad) for name, one in pipeline.named_parameters()}
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=1e-9, atol=1e-11)
    return dict(calls.counts), train_pipeline(pipeline, inputs)


def test_replicated_parameters_under_a_zero_bubble_schedule(four: Workers) -> None:
    found = four.run(counted, plan_of("ZBVZeroBubble", 2, Replicate()))
    assert_equal([held for _, held in found], train_model_alone("gpt", 1, **MODEL))
    # The second rank of the pipeline, which computes no loss, reduces what its two stages have added up.
    assert [counts["all_reduce"] for counts, _ in found[2:]] == [1, 1]


@pytest.mark.parametrize("reduced", ["step", "microbatch"])
def test_sharded_parameters(four: Workers, reduced: DeferredReduction) -> None:
    found = four.run(counted, plan_of("1F1B", 1, Shard(0), reduced))
    assert_equal([held for _, held in found], train_model_alone("gpt", 1, **MODEL))
