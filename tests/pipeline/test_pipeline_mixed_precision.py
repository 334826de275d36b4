"""Pipelines in mixed precision: the policy's casts in every stage, tied parameters and messages included."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate

import autoshard
from autoshard.pipeline.graph.microbatch_step import capture_microbatch, is_cast
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.runtime.shards import gather_full_tensor
from tests.pipeline.chain import balance_stages
from tests.test_mixed_precision import BF16, BF16_TOLERANCE, Tied, example, one_device
from tests.training import fast_links, relative_difference
from tests.workers import Workers

WIDER = MixedPrecisionPolicy(torch.float64, torch.float64)
ONE_SCALE = {"scale": None}
LOWER = MixedPrecisionPolicy(BF16, torch.float32)


def trained(policy: MixedPrecisionPolicy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one step on two stages, and the gradients of this rank's."""
    torch.manual_seed(0)
    module, inputs = Tied(), example()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipeline = autoshard.parallelize(
        module, mesh, (), inputs, cluster=fast_links(), mp_policy=policy, search=autoshard.Search(effort="fast"),
        pipeline=autoshard.Pipeline(microbatches=2, batch_dims=ONE_SCALE),
    )  # fmt: skip
    assert isinstance(pipeline, PipelineModule)
    loss = pipeline.train_step(**inputs)
    gradients = {name: gather_full_tensor(one.grad) for name, one in pipeline.named_parameters()}
    assert all(one.dtype == torch.float32 for one in gradients.values())
    return loss, gradients


def compared(workers: Workers, policy: MixedPrecisionPolicy, dtype: torch.dtype, tolerance: float) -> None:
    loss, expected = one_device(dtype)
    found = workers.run(trained, policy)
    assert set().union(*(gradients for _, gradients in found)) == expected.keys()
    for ours, gradients in found:
        assert abs(float(ours - loss)) <= tolerance * float(loss)
        for name, gradient in gradients.items():
            assert relative_difference({name: [gradient]}, {name: expected[name][:1]}) <= tolerance


def test_compute_in_float64_equals_one_device_in_float64(two: Workers) -> None:
    compared(two, WIDER, torch.float64, 1e-6)  # gradients are rounded to float32 at the end


def test_bfloat16_is_near_one_device_in_bfloat16(two: Workers) -> None:
    compared(two, LOWER, BF16, BF16_TOLERANCE)


def test_every_stage_casts_what_it_holds_once() -> None:
    graph = capture_microbatch(Tied(), (), example(), mp_policy=LOWER)
    parts = cut(graph, balance_stages(graph, 3), 3)
    assert any(part.shared for part in parts)
    for part in parts:
        forward = [node for node in part.step.graph.nodes if part.step.phase(node) == "forward"]
        cast = [node.all_input_nodes[0] for node in forward if is_cast(node)]
        held = [item.node for item in part.step.parameters]
        assert [node for node in cast if node in held] == held
        assert all(value.like.dtype == BF16 for value in part.passed if value.like.is_floating_point())


@pytest.mark.parametrize("policy", [LOWER, MixedPrecisionPolicy(BF16)], ids=["float32", "bfloat16"])
def test_gradients_are_reduced_once_per_step_in_the_dtype_of_the_policy(policy: MixedPrecisionPolicy) -> None:
    def reduction_seconds(ranks: int) -> float:
        plan = autoshard.plan(
            Tied(), {"pp": 2, "dp": ranks}, (), example(512), mp_policy=policy, cluster=fast_links(),
            hints={"*": {"dp": Replicate()}}, search=autoshard.Search(effort="fast"),
            pipeline=autoshard.Pipeline(microbatches=4, schedule="GPipe", batch_dims=ONE_SCALE, virtual=1),
        )  # fmt: skip
        assert isinstance(plan, PipelinePlan)
        return max(cost.reduction_seconds for cost in plan.costs)

    # One rank hands gradients on at the end of the step, and reduces none.
    assert reduction_seconds(2) > 2 * reduction_seconds(1)
