"""Capture with dynamic sizes: the graph says what a capture at any of these sizes would have said."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from autoshard.capture import capture
from autoshard.capture.joint_graph import JointGraph
from autoshard.errors import CaptureError, InputError
from autoshard.size import at, is_dynamic, symbol
from tests import models

TOKENS = {"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}
BATCH, SEQ = symbol("batch"), symbol("seq")


class Scores(nn.Module):
    """Numbers made of sizes: as integers, quotients and roots."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x).flatten(0, 1)
        return scores.sum() / x.shape[0] + scores.mean() * x.shape[1] ** 0.5


def tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(batch, seq, dtype=torch.int64) for name in ("input_ids", "labels")}


def described(graph: JointGraph, sizes: dict[Any, int]) -> list[Any]:
    """Operators, arguments and shapes with sizes taken at `sizes`, as text."""
    lines = []
    number = {node: index for index, node in enumerate(graph.graph.nodes)}

    def there(leaf: Any) -> Any:
        return f"%{number[leaf]}" if isinstance(leaf, torch.fx.Node) else at(leaf, sizes)

    for node in graph.graph.nodes:
        if node.op == "call_function":
            shapes = node.meta.get("sizes")
            if shapes is None:
                shapes = tuple(
                    tuple(value.shape) if isinstance(value, torch.Tensor) else None
                    for value in pytree.tree_leaves(node.meta["val"])
                )
            arguments = torch.fx.node.map_aggregate((node.args, node.kwargs), there)
            lines.append(f"{node.target} {arguments} {at(shapes, sizes)}")
    return lines


@cache
def dynamic_gpt() -> JointGraph:
    module, inputs = models.gpt(layers=1)
    return capture(module, (), inputs, dynamic=TOKENS)


@pytest.mark.parametrize(("batch", "seq"), [(3, 5), (12, 12)])
def test_the_graph_at_other_sizes_is_the_graph_captured_there(batch: int, seq: int) -> None:
    there = capture(models.gpt(layers=1)[0], (), tokens(batch, seq))
    assert described(dynamic_gpt(), {BATCH: batch, SEQ: seq}) == described(there, {})


def test_numbers_computed_from_sizes_are_expressions() -> None:
    graph = capture(Scores(), (torch.zeros(4, 9, 4, dtype=torch.float64),), {}, dynamic={"x": {0: "batch", 1: "seq"}})
    numbers = [
        leaf for node in graph.graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs)) if is_dynamic(leaf)
    ]
    assert {float(at(number, {BATCH: 5, SEQ: 16})) for number in numbers} >= {5.0, 4.0, 80.0}


def test_fake_tensors_have_the_shapes_of_the_example() -> None:
    graph = dynamic_gpt()
    values = [value for node in graph.graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    assert not any(
        isinstance(size, torch.SymInt) for value in values if isinstance(value, torch.Tensor) for size in value.shape
    )
    assert graph.dynamic is not None
    assert graph.dynamic.example == {BATCH: models.BATCH, SEQ: models.SEQUENCE}


def test_the_fingerprint_knows_what_is_dynamic() -> None:
    module, inputs = models.mlp()
    prints = {
        capture(module, (), inputs, dynamic=dynamic).fingerprint
        for dynamic in (None, {"x": {0: "batch"}, "target": {0: "batch"}})
    }
    assert len(prints) == 2


def test_ranges_that_the_model_sets_are_found() -> None:
    module, inputs = models.hf_bert(layers=1)
    sizes = {0: "batch", 1: "seq"}
    graph = capture(module, (), inputs, dynamic={"input_ids": sizes, "attention_mask": sizes, "labels": {0: "batch"}})
    assert graph.dynamic is not None
    assert graph.dynamic.ranges[SEQ] == (2, module.config.max_position_embeddings)
    assert not graph.dynamic.serves({BATCH: 4, SEQ: module.config.max_position_embeddings + 1})
    assert graph.dynamic.serves({BATCH: 4, SEQ: 5})


def test_a_multiple_is_told_to_torch_and_kept_by_calls() -> None:
    module, inputs = models.mlp()
    quadruple = 4 * Dim("batch")
    graph = capture(module, (), inputs, dynamic={"x": {0: quadruple}, "target": {0: quadruple}})
    assert graph.dynamic is not None
    (name,) = graph.dynamic.example
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert graph.dynamic.sizes_of(shapes | {"x": (8, 48), "target": (8, 48)}) == {name: 2}
    with pytest.raises(InputError, match=r"dim 0 of x is 10, and was declared to be 4\*batch"):
        graph.dynamic.sizes_of(shapes | {"x": (10, 48), "target": (10, 48)})


def test_dims_of_one_name_have_one_size() -> None:
    module, inputs = models.mlp()
    graph = capture(module, (), inputs, dynamic={"x": {0: "batch"}, "target": {0: "batch"}})
    assert graph.dynamic is not None
    with pytest.raises(
        InputError, match='dim 0 of target is 6, but dim 0 of x is 4, and both were declared as "batch"'
    ):
        graph.dynamic.sizes_of({"x": (4, 48), "target": (6, 48)})


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"y": {0: "batch"}}, "there is no input 'y'; the inputs are x, target"),
        ({"x": {2: "batch"}}, r"x has shape \[12, 24\], and so no dim 2: dims are 0 to 1"),
        ({"x": {0: "a batch"}}, "'a batch' is neither a name"),
        ({"x": {0: 4}}, "4 is neither a name"),
    ],
)
def test_what_is_no_dynamic_size_is_refused(dynamic: Any, message: str) -> None:
    module, inputs = models.mlp()
    with pytest.raises(InputError, match=message):
        capture(module, (), inputs, dynamic=dynamic)


def test_an_example_of_one_is_refused() -> None:
    module, inputs = models.mlp()
    with pytest.raises(InputError, match="0 or 1 in the example"):
        capture(module, (), {name: tensor[:1] for name, tensor in inputs.items()}, dynamic={"x": {0: "batch"}})


def test_a_size_that_the_model_fixes_is_refused_with_the_reason() -> None:
    module, inputs = models.mlp()
    with pytest.raises(CaptureError, match=r"Constraints violated \(batch\).*leave the size out of dynamic"):
        capture(module, (), inputs, dynamic={"x": {0: "batch"}})  # the target's size is given, and must be equal
