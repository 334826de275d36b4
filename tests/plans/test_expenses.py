from __future__ import annotations

import dataclasses

import pytest

import autoshard
from autoshard import ShardingPlan
from autoshard.memory.footprint import Memory
from autoshard.plans.expenses import Amount, Expenses, Term
from tests.models import hf_llama
from tests.planner.steps import links
from tests.sample_plan import sample_plan


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    """A plan that splits the layers over tp."""
    module, inputs = hf_llama()
    hints = {"model.layers.*.mlp": autoshard.split("tp")}
    cluster, search = links(1e10, 1e-7, contention=0.5), autoshard.Search(effort="fast")
    plan = autoshard.plan(module, {"dp": 2, "tp": 4}, (), inputs, hints=hints, cluster=cluster, search=search)
    assert isinstance(plan, ShardingPlan)
    return plan


def test_terms_add_up_to_the_step(plan: ShardingPlan) -> None:
    spent = plan.expenses()
    total = spent.compute + sum(spent.communication.values()) - spent.overlap + spent.other
    assert total == pytest.approx(plan.step_seconds, rel=1e-12)
    assert sum(amount.seconds for terms in spent.modules.values() for amount in terms.values()) == pytest.approx(
        spent.compute + sum(spent.communication.values()), rel=1e-12
    )
    # Waits and copies are no less than nothing, and nothing hides more than there is.
    assert spent.exposed > 0
    assert spent.slowdown > 0
    assert spent.overlap < sum(spent.communication.values())
    assert spent.other >= 0


def test_communication_is_that_of_the_collectives(plan: ShardingPlan) -> None:
    spent = plan.expenses()
    for axis in ("dp", "tp"):
        over = [sent for sent in plan.collectives if sent.axis == axis]
        assert over
        assert spent.sent[axis] == sum(sent.count * sent.bytes for sent in over)
        assert spent.communication[axis] == pytest.approx(sum(sent.count * sent.seconds for sent in over))


def test_memory_of_modules_is_the_peak(plan: ShardingPlan) -> None:
    spent = plan.expenses()
    assert sum(held for kinds in spent.held.values() for held in kinds.values()) == plan.memory.peak
    by_kind = {kind: sum(kinds.get(kind, 0) for kinds in spent.held.values()) for kind in spent.memory}
    assert by_kind == spent.memory
    up = "model.layers.0.mlp.up_proj"
    rows, columns = plan.shapes[f"{up}.weight"]
    assert spent.held[up]["parameters"] == rows * columns  # four bytes an element, of a quarter of them


def test_expenses_survive_the_file(plan: ShardingPlan) -> None:
    assert str(ShardingPlan.from_json(plan.to_json()).expenses()) == str(plan.expenses())


def test_equal_layers_are_one_row(plan: ShardingPlan) -> None:
    assert "model.layers.*.mlp.up_proj" in plan.expenses()._repr_html_()
    (row,) = (line for line in str(plan.expenses()).splitlines() if line.strip().startswith("model.layers.*.mlp.up"))
    assert row.split()[:2] == ["model.layers.*.mlp.up_proj", "2"]


def test_a_plan_of_an_older_version_has_only_what_it_tells() -> None:
    old = sample_plan()
    spent = Expenses(old)
    assert spent.terms[Term("all_reduce", "tp", "forward", "h.0.mlp")] == Amount(1, 1 << 20, 1e-4)
    assert spent.exposed == pytest.approx(old.step_seconds - 6 * 3e-5)
    assert spent.other == pytest.approx(0.0, abs=1e-15)
    assert "held at the peak" not in str(spent)


def test_rows_over_the_limit_are_summed_up() -> None:
    choices = sample_plan().choices[:1]
    many = tuple(dataclasses.replace(choices[0], module=f"part{'x' * i}", seconds=1e-3 * (i + 1)) for i in range(33))
    text = str(Expenses(sample_plan(choices=many, collectives=(), memory=Memory())))
    # The last three modules take 1, 2 and 3 ms.
    assert text.splitlines()[-1].split() == ["3", "more", "3", "6", "ms"]
