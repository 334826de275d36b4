from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import fx

from autoshard.capture.continuation import Continuation, LayeredGraph, UnpredictableError, difference
from autoshard.capture.repeated_layers import Depth, Repetition

aten = torch.ops.aten

BINARY = [aten.add.Tensor, aten.mul.Tensor]
# What an operator of a layer may read: an operator before it, the layer before, the first layer, or what all share.
READS = ("weight", "before", "result", "previous", "first", "shared")


@dataclass(frozen=True)
class Recipe:
    """Layers of a model: the operator, the readings and the submodule of every node of a layer; and its rests."""

    forward: tuple[tuple[int, str, str, str], ...]
    backward: tuple[tuple[int, str, str], ...]
    ahead: int
    shares: bool

    def graph(self, count: int, odd: int | None = None) -> LayeredGraph:
        """Return the graph of so many layers, one of which may have another operator."""
        graph = fx.Graph()
        names: dict[fx.Node, str] = {}
        made: dict[tuple[str, int], fx.Node] = {}

        def node(path: str, tag: str, target: Any, *operands: fx.Node) -> fx.Node:
            new = graph.call_function(target, operands)
            stack = {part: (part, "Module") for part in ("", path)}
            new.meta = {"module_path": path, "partitioner_tag": tag, "nn_module_stack": stack}
            return new

        def give(name: str) -> fx.Node:
            new = graph.placeholder(f"given_{len(names) + 1}")
            names[new] = name
            new.meta = {"partitioner_tag": "is_forward", "module_path": ""}
            return new

        shared = give("embedding")
        for layer in range(count):
            made["weight", layer] = give(f"layers.{layer}.weight")
        result = shared
        for index in range(self.ahead):
            result = node("", "is_forward", BINARY[index % 2], result, shared)
        first = inputs = result
        for layer in range(count):
            before = previous = result
            for kind, left, right, part in self.forward:
                known = {
                    "weight": made["weight", layer], "before": before, "result": result, "previous": previous,
                    "first": first, "shared": shared
                }  # fmt: skip
                target = aten.sub.Tensor if odd == layer else BINARY[kind]
                before, result = result, node(f"layers.{layer}.{part}", "is_forward", target, known[left], known[right])
                first = result if first is inputs and layer == 0 else first
            made["result", layer] = result
        gradient = node("", "is_backward", aten.neg.default, result)
        collected = None
        gradients = []
        for layer in reversed(range(count)):
            path = f"layers.{layer}.inner"
            for kind, left, part in self.backward:
                known = {
                    "weight": made["weight", layer], "before": gradient, "result": made["result", layer],
                    "previous": gradient, "first": first, "shared": shared
                }  # fmt: skip
                path = f"layers.{layer}.{part}"
                gradient = node(path, "is_backward", BINARY[kind], gradient, known[left])
            gradients.append(gradient)
            if self.shares:
                collected = (
                    gradient if collected is None else node(path, "is_backward", aten.add.Tensor, collected, gradient)
                )
        ends = [node("", "is_backward", aten.neg.default, each) for each in (gradient, collected) if each is not None]
        graph.output((*ends, *reversed(gradients)))
        return LayeredGraph(graph, names, Depth([Repetition("layers", 0, 1, count, count)], count))


parts = st.sampled_from(["attention", "mlp"])
kinds, reads = st.integers(0, 1), st.sampled_from(READS)
recipes = st.builds(
    Recipe,
    st.lists(st.tuples(kinds, reads, reads, parts), min_size=1, max_size=5).map(tuple),
    st.lists(st.tuples(kinds, reads, parts), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2),
    st.booleans(),
)


def continued(first: LayeredGraph, second: LayeredGraph, count: int) -> fx.Graph:
    continuation = Continuation(first, second, count)
    graph = continuation.graph()
    results: Any = second.graph.output_node().args[0]
    places = [(node, None if index < 2 else second.places[node]) for index, node in enumerate(results)]
    order = continuation.order(places, lambda each: each[1])
    graph.output(tuple(continuation.result(place, period, node) for (node, place), period in order))
    return graph


@given(recipes, st.integers(6, 9))
@settings(max_examples=150, deadline=None)
def test_what_is_predicted_of_one_depth_holds_of_all(recipe: Recipe, count: int) -> None:
    graphs = {layers: recipe.graph(layers) for layers in (2, 3, 4, 5, count)}
    was_continued = False
    for first in (2, 3):
        try:
            third = continued(graphs[first], graphs[first + 1], first + 2)
        except UnpredictableError:
            continue
        if difference(third, graphs[first + 2].graph) is None:
            was_continued = True
            assert difference(continued(graphs[first], graphs[first + 1], count), graphs[count].graph) is None
    assert was_continued


def test_a_layer_that_differs_is_seen() -> None:
    recipe = Recipe(((0, "previous", "weight", "mlp"),), ((1, "weight", "mlp"),), 1, False)
    predicted = continued(recipe.graph(2), recipe.graph(3), 6)
    assert difference(predicted, recipe.graph(6).graph) is None
    found = difference(predicted, recipe.graph(6, odd=4).graph)
    assert found is not None
    assert "sub" in found


@pytest.mark.parametrize("change", ["name", "argument", "meta", "length"])
def test_any_difference_is_told(change: str) -> None:
    recipe = Recipe(((0, "previous", "weight", "mlp"),), ((1, "weight", "mlp"),), 1, False)
    first, second = recipe.graph(3).graph, recipe.graph(3).graph
    assert difference(first, second) is None
    node = list(second.nodes)[5]
    if change == "name":
        node.name = "other"
    elif change == "argument":
        node.update_arg(0, node.args[1])
    elif change == "meta":
        node.meta["val"] = torch.zeros(2)
    else:
        second.call_function(aten.neg.default, (node,))
    assert difference(first, second) is not None
