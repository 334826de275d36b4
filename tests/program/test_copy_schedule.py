"""Copies to and from the host in a program: how many are under way at once, and who waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autoshard.capture.host_copies import AWAIT_COPY, START_TO_DEVICE, START_TO_HOST, TO_DEVICE, TO_HOST
from autoshard.program.copy_schedule import _AHEAD, schedule_copies

aten = torch.ops.aten
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)
LIMITS = st.integers(4, 160)


def _call(graph: fx.Graph, op: object, *args: fx.Node, size: int, position: int) -> fx.Node:
    node = graph.call_function(op, args)
    node.meta = {"val": torch.empty(size, device="meta"), "position": position}
    return node


def _half(sizes: Sequence[int], forward: bool) -> fx.Graph:
    """A half that makes tensors one after another and copies each to the host, or reads one copy after another."""
    graph, results = fx.Graph(), []
    inputs = [graph.placeholder(f"x{number}") for number in range(len(sizes))]
    for place, (node, size) in enumerate(zip(inputs, sizes, strict=True)):
        node.meta["val"] = torch.empty(size, device="meta")
        if forward:
            made = _call(graph, aten.sin.default, node, size=size, position=place)
            results.append(_call(graph, TO_HOST, made, size=size, position=place))
        else:
            copy = _call(graph, TO_DEVICE, node, size=size, position=2 * place)
            results.append(_call(graph, aten.cos.default, copy, size=size, position=2 * place + 1))
            results.append(_call(graph, aten.sin.default, copy, size=size, position=2 * place + 1))
    graph.output(tuple(results))
    return graph


def _most_under_way(graph: fx.Graph) -> int:
    """Return the most bytes of copies that have begun and are not awaited."""
    started: dict[fx.Node, int] = {}
    most = 0
    for node in graph.nodes:
        if node.target in (START_TO_HOST, START_TO_DEVICE):
            started[node] = node.meta["val"].nbytes
            most = max(most, sum(started.values()))
        elif node.target is AWAIT_COPY:
            del started[node.args[0]]
    assert not started
    return most


@given(sizes=SIZES, limit=LIMITS, forward=st.booleans())
def test_copies_under_way_keep_the_limit(sizes: list[int], limit: int, forward: bool) -> None:
    graph = _half(sizes, forward)
    schedule_copies(graph, limit)
    graph.lint()
    largest = 4 * max(sizes)
    assert _most_under_way(graph) <= max(min(limit, _AHEAD * largest), largest)
    waits = [node for node in graph.nodes if node.target is AWAIT_COPY]
    assert len(waits) == len(sizes)
    positions = [node.meta["position"] for node in graph.nodes if "position" in node.meta]
    assert positions == sorted(positions)
    # What reads a copy reads it once it is there; a copy to the host holds its source until then.
    for wait in waits:
        copy = wait.args[0]
        assert isinstance(copy, fx.Node)
        assert set(copy.users) == {wait}
        assert wait.args[1:] == (copy.args if forward else ())
        reader = wait.next
        while reader.target is START_TO_DEVICE:
            reader = reader.next
        assert forward or reader in wait.users


def test_copies_begin_as_early_and_end_as_late_as_the_limit_allows() -> None:
    one = 4 * 8
    forward, backward = _half([8] * 4, True), _half([8] * 4, False)
    for graph in (forward, backward):
        schedule_copies(graph, 2 * one)
    order = {
        graph: [
            node.target for node in graph.nodes if node.op == "call_function" and node.target is not aten.sin.default
        ]
        for graph in (forward, backward)
    }
    start, back, wait, read = START_TO_HOST, START_TO_DEVICE, AWAIT_COPY, aten.cos.default
    assert order[forward] == [start, start, wait, start, wait, start, wait, wait]
    assert order[backward] == [back, back, wait, back, read, wait, back, read, wait, read, wait, read]
