from __future__ import annotations

import dataclasses

from autoshard.plans.alternative import Alternative
from tests.sample_plan import sample_plan


def test_sentences_of_plans_that_are_faster_and_that_do_not_fit() -> None:
    plan = sample_plan()
    faster = Alternative.possible(plan, dataclasses.replace(plan, step_seconds=0.0123 / 2))
    assert faster.sentence.startswith("It is possible, and faster: step 6.15 ms in place of 12.3 ms (-50.0 %)")
    slower = dataclasses.replace(plan, step_seconds=0.0246, device_memory=2**32)
    sentence = Alternative.possible(plan, slower).sentence
    assert sentence.startswith("It is possible, but peaks at 4.5 GiB of 4.0 GiB: step 24.6 ms in place of 12.3 ms")


def test_answers_without_a_plan_and_as_a_page() -> None:
    answer = Alternative.too_large(2**30, None)
    assert (str(answer), answer.plan) == ("No plan that has this fits in 1.0 GiB.", None)
    assert "fits in 1.0 GiB" in answer._repr_html_()
    assert str(Alternative.impossible("30 does not divide evenly.")) == "It cannot be: 30 does not divide evenly."
    plan = sample_plan()
    same = Alternative.same(plan)
    assert (str(same), same.plan) == ("The plan has it already.", plan)
    assert same.difference is not None
    assert same.difference.seconds == 0
