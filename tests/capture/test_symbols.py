"""Flat modules with dynamic sizes: what is traced of them is what is traced of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autoshard.capture._torch import fake_mode
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.symbols import with_symbols
from autoshard.errors import CaptureError
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.stage_modules import cut
from autoshard.size import DynamicSize, Ratio, evaluate, symbol
from tests import models

BATCH = symbol("batch")
EXAMPLE = {BATCH: 6}


def told(graph: JointGraph) -> list[Any]:
    """Operators in order, with their dynamic arguments and shapes."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            numbers: list[Any] = []
            fx.node.map_aggregate((node.args, node.kwargs, node.meta.get("sizes")), numbers.append)
            found.append((str(node.target), [str(getattr(one, "expr", "")) for one in numbers]))
    return found


@pytest.mark.parametrize(("name", "options"), [("gpt", {"layers": 1}), ("unet", {})])
def test_a_module_of_one_stage_is_captured_as_the_model_is(name: str, options: dict[str, int]) -> None:
    module, inputs = models.ZOO[name](batch=4, **options)
    sizes = BatchCall(module, (), inputs).dynamic_sizes
    whole = export_forward(module, (), inputs, dynamic=sizes)
    (stage,) = cut(whole, dict.fromkeys((node.name for node in whole.operators), 0), 1)
    flat = capture(stage.module, *stage.example, dynamic=stage.dynamic)
    direct = capture(module, (), inputs, dynamic=sizes)
    assert flat.dynamic is not None
    assert direct.dynamic is not None
    assert flat.dynamic.dims == direct.dynamic.dims
    assert flat.dynamic.example == direct.dynamic.example
    assert told(flat) == told(direct)


def expressions() -> st.SearchStrategy[int]:
    """Sizes as models compute them."""
    numbers = st.integers(1, 7)
    return st.recursive(
        st.one_of(numbers, st.just(DynamicSize.of(BATCH, EXAMPLE))),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
            st.tuples(inner, numbers).map(lambda pair: pair[0] - pair[1]),
            st.tuples(inner, numbers).map(lambda pair: pair[0] // pair[1]),
            st.tuples(inner, numbers).map(lambda pair: -(-pair[0] // pair[1])),
            st.tuples(inner, numbers).map(lambda pair: pair[0] % pair[1]),
        ),
        max_leaves=6,
    )


def graph_with(number: Any, factor: int, rest: int) -> Exported:
    """A tensor of `factor` rows for each of the batch, and `rest` more, filled with a number."""
    graph = fx.Graph()
    rows = DynamicSize.of(factor * BATCH + rest, EXAMPLE)
    node = graph.placeholder("x")
    node.meta["sizes"] = ((3, rows),)
    made = graph.call_function(torch.ops.aten.fill.Scalar, (node, number))
    graph.output((made,))
    item = ExportedInput("input", "x", torch.empty(3, int(rows)), None)
    return Exported(fx.GraphModule(torch.nn.Module(), graph), (item,), (made,), None, None, {})  # type: ignore[arg-type]


@given(expressions(), st.integers(1, 4), st.integers(0, 2), st.integers(2, 9))
def test_numbers_are_computed_of_the_sizes_of_inputs(number: int, factor: int, rest: int, batch: int) -> None:
    traced = with_symbols(graph_with(number, factor, rest), fake_mode())
    expected = int(evaluate(number.expr, {BATCH: batch})) if isinstance(number, DynamicSize) else number
    (result,) = traced.graph_module(torch.empty(3, factor * batch + rest))
    assert result.eq(expected).all()
    assert traced.dynamic == {"x": {1: "batch"}}


@given(st.integers(1, 9), st.integers(2, 9))
def test_quotients_are_computed_of_the_sizes_of_inputs(above: int, batch: int) -> None:
    traced = with_symbols(graph_with(Ratio.of(above / (2 * BATCH), EXAMPLE), 1, 0), fake_mode())
    (result,) = traced.graph_module(torch.empty(3, batch))
    torch.testing.assert_close(result[0, 0].item(), above / (2 * batch), rtol=1e-6, atol=0.0)


def test_what_no_size_is_computed_of_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"batch\*\*\(1/3\).* can't be computed"):
        with_symbols(graph_with(Ratio.of(sympy.cbrt(BATCH), EXAMPLE), 1, 0), fake_mode())
