from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.capture import capture, shard
from autoshard.capture._torch import StridedShard
from autoshard.capture.annotate import capturing, parse_pin, pin_text
from autoshard.errors import HintError
from tests.capture.interpret import run_joint

NDIM = 3
PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Partial, st.sampled_from(["sum", "avg", "max", "min"])),
    st.builds(Shard, st.integers(0, NDIM - 1)),
    st.builds(lambda dim, factor: StridedShard(dim, split_factor=factor), st.integers(0, NDIM - 1), st.integers(2, 9)),
)


class Pinned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shard(self.linear(x), Shard(-1), Replicate()).square().sum()


@given(st.lists(PLACEMENTS, min_size=1, max_size=3))
def test_text_round_trip(placements: list[Placement]) -> None:
    assert parse_pin(pin_text(tuple(placements), NDIM)) == tuple(placements)


def test_text() -> None:
    placements = (Replicate(), Shard(-3), StridedShard(1, split_factor=3), Partial("sum"))
    assert pin_text(placements, NDIM) == "R;S(0);S(1,f=3);P(sum)"


@pytest.mark.parametrize("text", ["", "S", "S(x)", "S(0);", "Q(1)", "s(0)"])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(HintError, match="is not a placement"):
        parse_pin(text)


def test_identity_outside_of_capture() -> None:
    x = torch.ones(2)
    assert shard(x, Shard(0)) is x


def test_pin_is_seen_forward_and_backward() -> None:
    module, x = Pinned(), torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)
    graph = capture(module, (x,), {})
    pins = [(graph.phase(node), graph.pin(node)) for node in graph.graph.nodes if graph.pin(node)]
    assert pins == [("forward", (Shard(1), Replicate())), ("backward", (Shard(1), Replicate()))]
    step = run_joint(graph, module, (x,))
    module(x).backward()
    torch.testing.assert_close(step.gradients["linear.weight"], module.linear.weight.grad)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(2),), "out of range for a tensor of 2 dims"),
        ((Shard(-3),), "out of range for a tensor of 2 dims"),
        (("S(0)",), "'S\\(0\\)' is no placement"),
        ((), "one placement per mesh axis"),
    ],
)
def test_bad_placements(placements: tuple[Placement, ...], message: str) -> None:
    with capturing(), pytest.raises(HintError, match=message):
        shard(torch.ones(2, 2), *placements)


def test_bad_placement_is_reported_by_capture() -> None:
    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shard(super().forward(x), Shard(7))

    with pytest.raises(HintError, match="S\\(7\\) is out of range"):
        capture(Bad(4, 4), (torch.ones(2, 4),), {})
