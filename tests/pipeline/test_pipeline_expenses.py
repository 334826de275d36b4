from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Pipeline, PipelinePlan, PlanError
from autoshard.plans.expenses import COMPUTE, Amount, Term
from autoshard.plans.plan_difference import PlanDifference
from tests.planner.steps import links


class Tied(nn.Module):
    """An embedding, layers, and an output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.tokens(ids))), ids)


@functools.cache
def plan_of(schedule: str, virtual: int) -> PipelinePlan:
    """A model with a tied embedding in four microbatches, data parallel inside of two pipeline ranks."""
    with torch.device("meta"):
        module, ids = Tied(), torch.empty(16, dtype=torch.int64)
    plan = autoshard.plan(
        module,
        {"pp": 2, "dp": 2},
        (ids,),
        cluster=links(1e10, 1e-7, contention=0.5),
        hints={"": autoshard.replicate("dp")},
        pipeline=Pipeline(schedule=schedule, microbatches=4, virtual=virtual),
        search=autoshard.Search(effort="fast"),
    )
    assert isinstance(plan, PipelinePlan)
    return plan


@pytest.mark.parametrize(("schedule", "virtual"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_terms_add_up_to_the_step(schedule: str, virtual: int) -> None:
    plan = plan_of(schedule, virtual)
    spent = plan.expenses()
    total = spent.compute + sum(spent.communication.values()) - spent.overlap + spent.bubble + spent.other
    assert total == pytest.approx(plan.step_seconds, rel=1e-12)
    assert spent.step_seconds == plan.step_seconds
    # Ranks that do not compute wait for others, or for messages and reductions.
    assert 0 < spent.bubble < plan.bubble * plan.step_seconds
    assert 0 < spent.exposed <= sum(spent.communication.values())
    assert 0 < spent.other < plan.step_seconds / 10


def test_work_of_a_stage_counts_for_all_microbatches_and_gradients_are_reduced_once() -> None:
    plan = plan_of("1F1B", 1)
    terms = plan.expenses().terms
    computed = sum(choice.seconds for stage in plan.stages for choice in stage.choices)
    assert plan.expenses().compute == pytest.approx(computed * 4 / 2)
    assert terms[Term(COMPUTE, "", "forward", "layers.1.1")].count % 4 == 0
    (stage,) = (stage for stage in plan.stages if "layers.0.0.weight" in stage.placements)
    reduced = [sent for sent in stage.collectives if sent.module == "layers.0.0" and sent.gradient]
    assert reduced
    amount = terms[Term("all_reduce", "dp", "backward", "layers.0.0")]
    assert amount.bytes == sum(sent.count * sent.bytes for sent in reduced)
    assert amount.seconds == pytest.approx(sum(sent.count * sent.seconds for sent in reduced) / 2)


def test_messages_and_tied_gradients_are_communication_over_the_axis_of_the_pipeline() -> None:
    plan = plan_of("1F1B", 1)
    spent, (first, last) = plan.expenses(), plan.costs
    sent = spent.terms[Term("send", "pp", "forward", plan.modules[0][1])]
    assert sent == Amount(4, 4 * first.forward_bytes, pytest.approx(4 * first.forward_send_seconds / 2))
    back = spent.terms[Term("send", "pp", "backward", plan.modules[1][0])]
    assert back == Amount(4, 4 * last.backward_bytes, pytest.approx(4 * last.backward_send_seconds / 2))
    # The embedding lies on both ranks.
    assert spent.terms[Term("all_reduce", "pp", "backward", "tokens")] == Amount(
        2, first.tied_bytes + last.tied_bytes, pytest.approx((first.tied_seconds + last.tied_seconds) / 2)
    )
    assert first.tied_bytes > 0


def test_the_difference_of_two_schedules_is_most_of_all_bubble() -> None:
    difference = PlanDifference.of(plan_of("1F1B", 1), plan_of("Interleaved1F1B", 2))
    changed = sum(change.seconds for change in difference.changes)
    total = changed - difference.overlap + difference.bubble + difference.other
    assert total == pytest.approx(difference.seconds, rel=1e-6)
    assert difference.bubble < 0
    assert "bubble" in difference.summary()
    assert "Interleaved1F1B, 4 microbatches, 2 stages per rank in place of 1F1B, 4 microbatches" in difference.summary()
    printed = str(difference)
    assert "communication on pp" in printed
    assert "rank 1" in printed


def test_expenses_survive_the_file_and_need_costs() -> None:
    plan = plan_of("1F1B", 1)
    text = plan.to_json()
    assert str(PipelinePlan.from_json(text).expenses()) == str(plan.expenses())
    assert "the mean of the ranks along pp" in str(plan.expenses())
    with pytest.raises(PlanError, match="no costs of its stages"):
        dataclasses.replace(plan, costs=()).expenses()
