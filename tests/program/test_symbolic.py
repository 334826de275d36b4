"""Local shapes as expressions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.program._torch import FakeTensorMode
from autoshard.program.graph_emitter import GraphEmitter
from autoshard.size import DynamicSize, at, ceil_div, is_dynamic, symbol
from autoshard.specs import MeshShape
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

BATCH, SEQ = symbol("batch"), symbol("seq")
SIZES = {BATCH: 11, SEQ: 13}
ELSEWHERE = {BATCH: 6, SEQ: 5}


@pytest.fixture
def emit() -> GraphEmitter:
    return GraphEmitter(MeshShape.of({"x": 4}), ("gx",), FakeTensorMode(), torch.device("cpu"), SIZES)


def local(emit: GraphEmitter) -> Any:
    rows = ceil_div(DynamicSize.of(BATCH, SIZES), 4)
    return emit.placeholder("x", (rows, DynamicSize.of(SEQ, SIZES), 8), torch.float32)


def test_shapes_follow_from_operators(emit: GraphEmitter) -> None:
    value = local(emit)
    rows, seq, _ = emit.shape(value)
    flat = emit.call(aten.view.default, value, [rows * seq, 8])
    both = emit.call(aten.cat.default, [flat, flat])
    gathered = emit.call(collectives.all_gather_into_tensor.default, both, 4, "gx")
    assert emit.shape(gathered) == (3 * 13 * 2 * 4, 8)
    assert at(emit.shape(gathered), ELSEWHERE) == (2 * 5 * 2 * 4, 8)
    assert tuple(gathered.meta["val"].shape) == (312, 8)


def test_results_of_several_tensors(emit: GraphEmitter) -> None:
    value = local(emit)
    first, second = emit.call(aten.split_with_sizes.default, value, [3, 5], 2)
    assert at(emit.shape(first), ELSEWHERE) == (2, 5, 3)
    assert at(emit.shape(second), ELSEWHERE) == (2, 5, 5)


def test_numbers_in_arguments_make_shapes_too(emit: GraphEmitter) -> None:
    counted = emit.call(aten.arange.default, ceil_div(DynamicSize.of(SEQ, SIZES), 4), device=torch.device("cpu"))
    (length,) = emit.shape(counted)
    assert is_dynamic(length)
    assert at(length, ELSEWHERE) == 2


def test_what_is_fixed_stays_plain(emit: GraphEmitter) -> None:
    weight = emit.placeholder("w", (8, 6), torch.float32)
    value = emit.call(aten.matmul.default, local(emit), weight)
    assert not any(map(is_dynamic, emit.shape(emit.call(aten.t.default, weight))))
    assert at(emit.shape(value), ELSEWHERE) == (2, 5, 6)
