"""What a dry run says of calls: seconds forward and backward, what is saved, and what lies in whose memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from autoshard.program.dry_run import CallCost, DryRun
from tests.pipeline.exporting import cost_model

aten = torch.ops.aten


def _call(op: Any, shapes: Sequence[tuple[int, ...]], needs: Sequence[bool], *rest: Any) -> CallCost:
    graph = fx.Graph()
    operands = []
    for place, shape in enumerate(shapes):
        operand = graph.placeholder(f"x{place}")
        operand.meta["val"] = torch.empty(shape, device="meta")
        operands.append(operand)
    return DryRun(cost_model()).call_cost(graph.call_function(op, (*operands, *rest)), needs)


def _product(rows: int, inner: int, columns: int) -> float:
    cost = cost_model()
    moved = 4 * (rows * inner + inner * columns + rows * columns)
    return cost.compute(2.0 * rows * inner * columns, moved, torch.float32, "mm")


@pytest.mark.parametrize(
    ("needs", "products"), [((True, True), 2), ((False, True), 1), ((True, False), 1), ((False, False), 0)]
)
def test_a_product_costs_in_backward_what_needs_gradients(needs: tuple[bool, bool], products: int) -> None:
    found = _call(aten.mm.default, [(256, 256), (256, 256)], needs)
    assert found.forward_seconds == pytest.approx(_product(256, 256, 256))
    assert found.backward_seconds == pytest.approx(products * _product(256, 256, 256))
    assert found.saved_operands == tuple(place for place in (0, 1) if needs[1 - place])
    assert found.needs_gradient == (any(needs),)


def test_composite_operators_are_priced_as_what_they_run() -> None:
    found = _call(aten.conv2d.default, [(8, 64, 32, 32), (64, 64, 3, 3)], (True, True), None, [1, 1], [1, 1])
    work = 2 * 8 * 64 * 32 * 32 * 64 * 9
    least = work / cost_model().cluster.device.peak(torch.float32)
    assert found.forward_seconds > least
    assert found.backward_seconds > 2 * least


def test_views_cost_nothing_and_lie_in_their_operand() -> None:
    found = _call(aten.view.default, [(4, 6)], (True,), [24])
    assert found.forward_seconds == found.backward_seconds == 0.0
    assert found.aliases == (0,)
    assert found.saved_operands == ()


def test_results_and_what_is_inside_are_saved() -> None:
    exponential = _call(aten.exp.default, [(4, 6)], (True,))
    assert exponential.saved_results == (0,)
    assert exponential.result_bytes == (96,)
    dropout = _call(aten.dropout.default, [(4, 6)], (True,), 0.5, True)
    assert dropout.saved_inside > 0
    assert _call(aten.add.Tensor, [(4, 6), (4, 6)], (True, True)).saved_operands == ()


def test_calls_in_place_have_gradients_too() -> None:
    found = _call(aten.relu_.default, [(4, 6)], (True,))
    assert found.aliases == (0,)
    assert found.backward_seconds > 0


def test_a_call_of_one_operand_twice_is_told_from_one_of_two() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for operand in (x, y):
        operand.meta["val"] = torch.empty(4, device="meta")
    run = DryRun(cost_model())
    assert run.call_cost(graph.call_function(aten.mul.Tensor, (x, x)), (True,)).saved_operands == (0,)
    assert run.call_cost(graph.call_function(aten.mul.Tensor, (x, y)), (True, True)).saved_operands == (0, 1)
