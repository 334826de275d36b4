from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autoshard.capture.joint import capture
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.propagation import Worklist
from autoshard.specs.axes import MeshShape


def batched(module: nn.Module, *inputs: Tensor, **options: Any) -> list[tuple[str, str]]:
    """Every operator, in the order of the graph, and its factors of the batch."""
    rules = GraphRules(capture(module, inputs, {}, **options), MeshShape.of({"x": 2}))
    found = rules.batch_factors()
    named = {}
    for node in rules.operators:
        factors = rules.rules[node].factors
        names = [f"{factors[one].name}:{int(factors[one].size)}" for one in sorted(found.get(node, ()))]
        named[node.name] = (str(node.target).split(".")[1], " ".join(names))
    return list(named.values())


class Sequences(nn.Module):
    """Batches of sequences, which products see as one dim of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.positions = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x + self.positions.tanh())
        return x.transpose(0, 1).reshape(20, 10).exp().sum()


def test_the_batch_is_followed_through_views_and_gradients() -> None:
    assert batched(Sequences(), torch.randn(4, 5, 6)) == [
        ("tanh", ""),  # of a parameter
        ("add", "dim0:4"),
        ("t", ""),
        ("view", "d0:4"),
        ("mm", "i.0:4"),
        ("_unsafe_view", "d0:4"),
        ("transpose", "d0:4"),
        ("clone", "dim1:4"),
        ("_unsafe_view", "d1:4"),
        ("exp", "dim0.1:4"),  # rows of a sequence first, then of the batch
        ("sum", "d0.1:4"),
        ("expand", "new0.1:4"),
        ("mul", "dim0.1:4"),
        ("view", "d1:4"),
        ("transpose", "d1:4"),
        ("clone", "dim0:4"),
        ("_unsafe_view", "d0:4"),
        ("t", "d0.0:4"),
        ("mm", "k.0:4"),  # the weight's gradient: a sum over the batch
        ("mm", "i.0:4"),
        ("view", "d0:4"),
        ("sum", "d0:4"),
        ("view", ""),
        ("tanh_backward", ""),
    ]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, mask: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(mask @ x).flatten(0, 1), labels.flatten())


def test_the_batch_is_what_most_inputs_begin_with() -> None:
    inputs = torch.randn(5, 5), torch.randn(4, 5, 6), torch.zeros(4, 5, dtype=torch.long)
    found = batched(Masked(), *inputs, grad=False)
    assert all("5" not in factors for _, factors in found)
    assert found[-2:] == [("_log_softmax", "b0.0:4"), ("nll_loss_forward", "n.0:4")]


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten().exp()


def test_a_dim_that_holds_the_batch_and_more_is_split_by_samples_first() -> None:
    assert batched(Flat(), torch.randn(3, 5)) == [("view", "d0:3"), ("exp", "dim0.0:3")]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, scale: Tensor | None = None) -> Tensor:
        loss = self.weight.square().sum()
        return loss if scale is None else loss * scale


def test_without_a_batch_nothing_is_of_it() -> None:
    assert {factors for _, factors in batched(Weights())} == {""}
    assert {factors for _, factors in batched(Weights(), torch.tensor(2.0))} == {""}


NUMBERS = st.lists(st.integers(0, 9))


@given(NUMBERS, st.dictionaries(st.integers(0, 9), NUMBERS))
def test_it_is_a_dictionary_whose_first_key_is_taken_out(first: list[int], then: dict[int, list[int]]) -> None:
    waiting, expected = dict.fromkeys(first), []
    left = {number: list(more) for number, more in then.items()}
    while waiting:
        expected.append(next(iter(waiting)))
        del waiting[expected[-1]]
        waiting.update(dict.fromkeys(left.pop(expected[-1], [])))
    left, found = {number: list(more) for number, more in then.items()}, []
    worklist = Worklist(first)
    for number in worklist:
        found.append(number)
        worklist.add(left.pop(number, []))
    assert found == expected
