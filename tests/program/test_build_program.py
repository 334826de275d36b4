"""Programs for all sizes hold no number that was one size's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.program.build_program import check_size_generic
from autoshard.program.localize import LocalStep
from autoshard.size import DynamicSize, symbol

BATCH = symbol("batch")


def program(end: Any, op: Any = torch.ops.aten.slice.Tensor) -> LocalStep:
    graph = fx.Graph()
    graph.output((graph.call_function(op, (graph.placeholder("x"), 0, 0, end)),))
    return LocalStep(fx.GraphModule(torch.nn.Module(), graph), (), ())


def size(batch: int) -> int:
    return DynamicSize.of(BATCH, {BATCH: batch}) * 2


def test_expressions_are_steady() -> None:
    check_size_generic(program(size(5)), program(size(7)), {BATCH: 7})


def test_a_number_that_was_a_size_is_found() -> None:
    with pytest.raises(RuleError, match=r"at batch = 7 it would call aten.slice.Tensor.*10.*should call.*14"):
        check_size_generic(program(int(size(5))), program(int(size(7))), {BATCH: 7})


def test_another_operator_is_found() -> None:
    with pytest.raises(RuleError, match="narrow"):
        check_size_generic(program(size(5)), program(size(7), torch.ops.aten.narrow.default), {BATCH: 7})
