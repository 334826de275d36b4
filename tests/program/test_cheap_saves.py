"""Saved tensors that the backward half computes where it reads them: the same results, from fewer tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from autoshard.program.cheap_saves import compute_where_read
from autoshard.program.split import split
from tests.planner.steps import flow_of, joint_graph, planner_of, program_of
from tests.training import fast_links

aten = torch.ops.aten
ONE = (aten.relu.default, aten.tanh.default, aten.t.default)
TWO = (aten.mul.Tensor, aten.add.Tensor, aten.mm.default)


class _Half:
    """A graph on square matrices that grows call by call."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(3, 3, dtype=torch.float64)
        return node

    def call(self, op: Any, *args: fx.Node) -> fx.Node:
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*(arg.meta["val"] for arg in args))
        return node


def _run(graph: fx.Graph, *inputs: Tensor) -> Any:
    return fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)


@hypothesis.given(strategies.data())
def test_results_stay_and_nothing_else_is_saved(data: strategies.DataObject) -> None:
    forward, backward = _Half(), _Half()

    def grow(half: _Half, nodes: list[fx.Node], calls: int) -> list[fx.Node]:
        for _ in range(calls):
            op = data.draw(strategies.sampled_from((*ONE, *TWO)))
            args = [data.draw(strategies.sampled_from(nodes)) for _ in range(1 if op in ONE else 2)]
            nodes = [*nodes, half.call(op, *args)]
        return nodes

    made = grow(forward, [forward.placeholder("x"), forward.placeholder("y")], data.draw(strategies.integers(1, 8)))
    kept = data.draw(strategies.lists(strategies.sampled_from(made), min_size=1, unique=True))
    saved = {backward.placeholder(f"saved_{number}"): node for number, node in enumerate(kept)}
    results = grow(backward, [*saved], data.draw(strategies.integers(1, 6)))[len(saved) :]
    backward.graph.output(tuple(results))
    forward.graph.output(tuple(kept))
    inputs = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = _run(backward.graph, *_run(forward.graph, *inputs))

    dropped = compute_where_read(backward.graph, saved)
    backward.graph.lint()
    left = {placeholder: node for placeholder, node in saved.items() if placeholder not in dropped}
    assert list(backward.graph.find_nodes(op="placeholder")) == list(left)
    forward.graph.output_node().args = (tuple(left.values()),)
    found = _run(backward.graph, *_run(forward.graph, *inputs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # Products are never computed again.
    assert all(saved[placeholder].target is not aten.mm.default for placeholder in dropped)


def test_what_is_read_by_a_product_stays_saved() -> None:
    forward, backward = _Half(), _Half()
    x = forward.placeholder("x")
    activated = forward.call(aten.relu.default, x)
    doubled = forward.call(aten.add.Tensor, activated, x)
    saved = dict(zip((backward.placeholder(name) for name in "abc"), (x, activated, doubled), strict=True))
    first, second, third = saved
    backward.graph.output((backward.call(aten.mm.default, first, second), backward.call(aten.tanh.default, third)))
    assert compute_where_read(backward.graph, saved) == {third}


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_the_plan_counts_what_the_program_saves(name: str) -> None:
    planner = planner_of(joint_graph(name), {"x": 2}, cluster=fast_links().with_compiler)
    plan = planner.plan()
    program, step = planner.program(flow_of(planner, plan)), program_of(planner, plan)
    saved = Counter(tuple(node.meta["val"].shape) for node in program.backward.saved.values())
    bytes_saved = {}
    for compiled in (True, False):
        forward: Any = split(step, compiled).forward
        results = getattr(forward, "_orig_mod", forward).graph.output_node().args[0][len(step.forward_outputs) :]
        bytes_saved[compiled] = sum(node.meta["val"].nbytes for node in results)
        if compiled:
            assert Counter(tuple(node.meta["val"].shape) for node in results) == saved
    assert bytes_saved[True] < bytes_saved[False]
