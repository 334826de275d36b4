from __future__ import annotations

import math

import pytest
from torch.distributed.tensor import Replicate

from autoshard.plans.module_figures import collectives_figure, module_tree, modules_figure
from tests.plans.planned_gpt import planned_gpt
from tests.plans.test_step_figures import check_figure
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
    (figure,) = modules_figure(plan)
    check_figure(figure)
    operators, collectives, parameters = (view.data[0] for view in figure.views)
    seconds = sum(choice.seconds for choice in plan.choices)
    total = sum(sent.count * sent.seconds for sent in plan.collectives)
    for tree, expected in ((operators, seconds), (collectives, total)):
        unit = expected / sum(tree["values"])
        assert min(abs(unit / known - 1) for known in (1.0, 1e-3, 1e-6)) < 1e-9
        assert len(tree["ids"]) == len(set(tree["ids"]))
        assert set(tree["parents"]) - {""} <= set(tree["ids"])
    elements = 0.0
    for name, placements in plan.placements.items():
        ways = math.prod(
            size for size, placement in zip(plan.mesh.sizes, placements, strict=True) if placement.is_shard()
        )
        elements += math.prod(plan.shapes[name]) / ways
    assert sum(parameters["values"]) == pytest.approx(elements)


def test_the_bars_are_the_collectives_of_the_plan() -> None:
    plan = planned_gpt()
    (figure,) = collectives_figure(plan)
    check_figure(figure)
    time, bytes = figure.views
    seconds = sum(sent.count * sent.seconds for sent in plan.collectives)
    sent = sum(sent.count * sent.bytes for sent in plan.collectives)
    for view, expected, units in ((time, seconds, (1.0, 1e-3, 1e-6)), (bytes, sent, (1.0, 2**10, 2**20))):
        drawn = sum(x for trace in view.data for x in trace["x"])
        assert min(abs(expected / drawn / unit - 1) for unit in units) < 1e-9
    assert {trace["name"] for trace in time.data} == {f"{sent.kind} over {sent.axis}" for sent in plan.collectives}


def test_a_plan_without_collectives_has_no_chart_of_them() -> None:
    assert list(collectives_figure(sample_plan(collectives=()))) == []
