from __future__ import annotations

import math

import pytest
from torch.distributed.tensor import Replicate

from autoshard.plans.module_charts import collectives_chart, module_tree, modules_chart
from autoshard.plans.plan_tables import collective_rows
from autoshard.report import Plot, Tree
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import LAYERS, sample_plan


def test_layers_that_are_alike_are_one_box() -> None:
    tree = module_tree(sample_plan())
    assert list(tree.children) == ["h", "embed"]
    # Four layers differ in a placement from the last two.
    layers = tree.children["h"].children
    assert {node.name: node.count for node in layers.values()} == {"0-3": 4, "4-5": 2}
    (first, _) = layers.values()
    # A module that only holds another one is no box of its own.
    assert set(first.children) == {"mlp", "attn.qkv"}
    assert tree.total(lambda node: node.operators) == pytest.approx(LAYERS * 3e-5)
    assert tree.total(lambda node: node.collectives) == pytest.approx(LAYERS * 1e-4 + 3 * 2e-3)


def test_layers_that_hold_one_module_of_other_names_are_boxes_of_their_own() -> None:
    names = ("h.0.a.weight", "h.1.a.weight", "h.2.b.weight")
    placements = {name: (Replicate(), Replicate()) for name in names}
    shapes = dict.fromkeys(names, (2, 2))
    tree = module_tree(sample_plan(placements=placements, shapes=shapes, choices=(), collectives=()))
    assert {node.name: node.count for node in tree.children["h"].children.values()} == {"0-1.a": 2, "2.b": 1}


def test_the_boxes_add_up_to_the_plan() -> None:
    plan = planned_gpt()
    (chart,) = modules_chart(plan)
    operators, collectives, parameters = (view for view in chart.views if isinstance(view, Tree))
    seconds = sum(choice.seconds for choice in plan.choices)
    total = sum(sent.count * sent.seconds for sent in plan.collectives)
    for tree, expected in ((operators, seconds), (collectives, total)):
        assert sum(box.amount for box in tree.boxes) == pytest.approx(expected)
        assert [box.parent for box in tree.boxes].count(-1) == 1
        assert all(box.parent < place for place, box in enumerate(tree.boxes))
    elements = 0.0
    for name, placements in plan.placements.items():
        ways = math.prod(
            size for size, placement in zip(plan.mesh.sizes, placements, strict=True) if placement.is_shard()
        )
        elements += math.prod(plan.shapes[name]) / ways
    assert sum(box.amount for box in parameters.boxes) == pytest.approx(elements)


def test_the_bars_are_the_collectives_of_the_plan() -> None:
    plan = planned_gpt()
    chart = collectives_chart(plan.mesh, collective_rows(plan.collectives))
    time, bytes = (view for view in chart.views if isinstance(view, Plot))
    seconds = sum(sent.count * sent.seconds for sent in plan.collectives)
    sent = sum(sent.count * sent.bytes for sent in plan.collectives)
    for view, expected in ((time, seconds), (bytes, sent)):
        assert sum(sum(one.x) for one in view.series) == pytest.approx(expected)
    assert {one.name for one in time.series} == {f"{sent.kind} over {sent.axis}" for sent in plan.collectives}
