from __future__ import annotations

import dataclasses

import pytest
from torch.distributed.tensor import Shard

import autoshard
from autoshard import ShardingPlan
from autoshard.plans.plan_data import Collective
from autoshard.plans.plan_difference import PlanDifference
from tests.models import hf_llama
from tests.sample_plan import sample_plan


def test_changes_add_up_to_the_difference_of_the_steps() -> None:
    module, inputs = hf_llama()
    search = autoshard.Search(effort="fast")
    plans = [
        autoshard.plan(module, {"dp": 2, "tp": 2}, (), inputs, hints=hints, search=search)
        for hints in ({}, {"model.layers.*.mlp.up_proj.weight": {"tp": Shard(0)}})
    ]
    difference = PlanDifference.of(*plans)
    assert difference.changes
    spent = sum(change.seconds for change in difference.changes)
    assert spent - difference.overlap + difference.other == pytest.approx(difference.seconds, rel=1e-6)
    assert difference.seconds == pytest.approx(plans[1].step_seconds - plans[0].step_seconds)
    held = sum(change.after - change.before for change in difference.memory_changes)
    assert held == plans[1].memory.peak - plans[0].memory.peak


def sent(kind: str, module: str, seconds: float, size: int = 1024) -> Collective:
    return Collective(kind, "tp", size, 1, module, "forward", seconds)


def plan(*collectives: Collective, step: float) -> ShardingPlan:
    return sample_plan(collectives=collectives, step_seconds=step)


def test_layers_that_differ_alike_are_one_change() -> None:
    before = plan(*(sent("all_reduce", f"h.{layer}.mlp", 1e-3) for layer in range(6)), step=0.01)
    after = plan(
        *(sent("all_reduce", f"h.{layer}.mlp", 1e-3) for layer in range(2)),
        *(sent("all_gather", f"h.{layer}.mlp", 3e-3) for layer in range(2, 6)),
        step=0.018,
    )
    changes = [(c.name, c.module, c.modules, c.seconds) for c in PlanDifference.of(before, after).changes]
    assert changes == [
        ("all-gather on tp", "h.{2-5}.mlp", 4, pytest.approx(12e-3)),
        ("all-reduce on tp", "h.{2-5}.mlp", 4, pytest.approx(-4e-3)),
    ]


def test_the_summary_names_the_largest_changes_where_they_are() -> None:
    before = plan(*(sent("all_reduce", f"h.{layer}.mlp.down", 1e-3) for layer in range(6)), step=0.010)
    after = plan(
        *(sent("all_gather", f"h.{layer}.mlp.{name}", 1e-3) for layer in range(6) for name in ("up", "down")),
        sent("all_gather", "head", 1e-5),
        step=0.016,
    )
    text = PlanDifference.of(before, after).summary()
    assert text.startswith(
        "step 16 ms in place of 10 ms (+60.0 %): +12 ms all-gather on tp in h.*.mlp, -6 ms all-reduce"
    )


def test_work_that_moves_to_the_other_half_is_named() -> None:
    gathers = tuple(sent("all_gather", f"h.{layer}.mlp", 1e-3) for layer in range(6))
    moved = tuple(dataclasses.replace(gather, phase="backward") for gather in gathers)
    difference = PlanDifference.of(plan(*gathers, step=0.010), plan(*moved, step=0.012))
    assert [(change.phase, change.module) for change in difference.changes] == [
        ("forward", "h.*.mlp"),
        ("backward", "h.*.mlp"),
    ]
    assert difference.summary().endswith(", 6 ms all-gather on tp in h.*.mlp in the backward half instead")


def test_the_summary_names_layers_that_run_again_and_the_peak() -> None:
    before = sample_plan()
    memory = dataclasses.replace(before.memory, peak=2**32)
    after = dataclasses.replace(before, recomputed=("h.0", "h.1"), memory=memory)
    text = (
        "step 12.3 ms in place of 12.3 ms (+0.0 %): 2 layers run again in place of 0 layers; "
        "peak 4.0 GiB in place of 4.5 GiB"
    )
    assert PlanDifference.of(before, after).summary() == text


def test_no_difference_has_no_change() -> None:
    same = sample_plan()
    difference = PlanDifference.of(same, dataclasses.replace(same))
    assert (difference.changes, difference.memory_changes, difference.seconds) == ((), (), 0.0)
    assert difference.summary() == "step 12.3 ms in place of 12.3 ms (+0.0 %)"
