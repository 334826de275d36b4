"""Every count against the one that torch makes while it runs the operator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autoshard.cluster import Cluster, CostModel, Device, Link, flops
from autoshard.cluster.cost import work_of_call
from autoshard.operators.large_losses.loss_operator import operators as losses
from autoshard.operators.recurrent.recurrence import steps
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

LATENCY, BANDWIDTH = 1.0, 100.0  # of the links inside a host
KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "shift", "slice", "make_partial", "copy")
DEVICE = Device("unit", 1, {"float32": 100.0, "bfloat16": 200.0, "float64": 50.0}, 10.0, 0.5)


def model(mesh: dict[str, int], devices_per_host: int = 8) -> CostModel:
    cluster = Cluster("unit", DEVICE, devices_per_host, inside=Link(BANDWIDTH, LATENCY), between=Link(10.0, 3.0))
    return CostModel(cluster, MeshShape.of(mesh))


@pytest.mark.parametrize(
    ("mesh", "devices_per_host", "spans"),
    [
        ({"dp": 8, "tp": 8}, 8, [True, False]),
        ({"dp": 4, "tp": 2}, 8, [False, False]),
        ({"pp": 2, "dp": 4, "tp": 2}, 8, [True, False, False]),
        ({"x": 64}, 8, [True]),
        ({"x": 3, "y": 3}, 8, [True, True]),  # the middle group of y holds ranks 6, 7 and 8
        ({"x": 3, "y": 2}, 4, [True, False]),
        ({"x": 1, "y": 16}, 8, [False, True]),
    ],
)
def test_an_axis_pays_the_network_if_any_group_spans_hosts(
    mesh: dict[str, int], devices_per_host: int, spans: list[bool]
) -> None:
    costs = model(mesh, devices_per_host)
    assert [costs.axis_link(axis) is costs.cluster.between for axis in range(len(mesh))] == spans


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 1 * 3 + 200 * 3 / 100),
        ("all_reduce", 2 * 2 * 1 + 2 * 200 / 100),  # up and down a tree
        ("reduce_scatter", 1 * 3 + 200 * 3 / 4 / 100),
        ("all_to_all", 1 * 3 + 200 * 3 / 4 / 100),
        ("shift", 1 + 200 / 100),
        ("slice", 2 * 200 / 4 / 10),
        ("make_partial", 2 * 200 / 10),
        ("copy", 2 * 200 / 10),
    ],
)
def test_collectives_by_hand(kind: str, seconds: float) -> None:
    assert model({"tp": 4}).collective(kind, 200, 0) == pytest.approx(seconds)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="'gossip'"):
        model({"tp": 4}).collective("gossip", 1, 0)


@given(st.sampled_from(KINDS), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 8))
def test_collectives_are_monotone_in_bytes_and_free_on_one_device(kind: str, small: int, more: int, size: int) -> None:
    costs = model({"x": size})
    assert 0 <= costs.collective(kind, small, 0) <= costs.collective(kind, small + more, 0)
    assert size > 1 or costs.collective(kind, small, 0) == 0


@given(st.integers(1, 10**9), st.integers(2, 8))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(part: int, size: int) -> None:
    costs = model({"x": size})
    halves = costs.collective("reduce_scatter", part * size, 0) + costs.collective("all_gather", part, 0)
    tree = 2 * math.ceil(math.log2(size)) * LATENCY + 2 * part * size / BANDWIDTH
    assert costs.collective("all_reduce", part * size, 0) == pytest.approx(min(halves, tree))


def test_a_gradient_pays_its_share_of_the_latency() -> None:
    costs = model({"x": 4})
    for kind in ("all_reduce", "reduce_scatter"):
        small, large = 400, 2 * GRADIENT_BUCKET_BYTES
        assert costs.gradient_collective(kind, large, 0) == pytest.approx(costs.collective(kind, large, 0))
        assert costs.gradient_collective(kind, small, 0) < costs.collective(kind, small, 0)
    assert costs.gradient_collective("all_gather", 400, 0) == costs.collective("all_gather", 400, 0)


def test_the_ring_leaves_each_host_once_by_the_ports_of_all_its_devices() -> None:
    costs = model({"x": 8}, devices_per_host=4)
    link, inside = costs.cluster.between, costs.cluster.inside
    expected = link.latency + 6 * inside.latency + 7 * 100 / (4 * link.bandwidth)
    assert costs.collective("all_gather", 100, 0) == pytest.approx(expected)


def test_compute_is_a_roofline_over_the_overhead() -> None:
    costs = model({"x": 1})
    assert costs.compute(1000.0, 10.0, torch.float32) == pytest.approx(10.5)
    assert costs.compute(1000.0, 10.0, torch.bfloat16) == pytest.approx(5.5)
    assert costs.compute(1000.0, 300.0, torch.float32) == pytest.approx(30.5)
    assert costs.compute(0.0, 0.0, torch.float32) == 0.5


aten = torch.ops.aten


class Ours(TorchDispatchMode):
    """Sums `flops` over the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        results = result if isinstance(result, (tuple, list)) else [result]
        self.total += flops(func, operands, [r.shape for r in results if isinstance(r, torch.Tensor)], args)
        return result


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


CASES = {
    "mm": lambda: tensor(3, 4) @ tensor(4, 5),
    "addmm": lambda: torch.addmm(tensor(5), tensor(3, 4), tensor(4, 5)),
    "bmm": lambda: torch.bmm(tensor(2, 3, 4), tensor(2, 4, 5)),
    "baddbmm": lambda: torch.baddbmm(tensor(2, 3, 5), tensor(2, 3, 4), tensor(2, 4, 5)),
    "convolution": lambda: torch.nn.functional.conv2d(tensor(2, 4, 9, 9), tensor(6, 4, 3, 3), tensor(6), stride=2),
    "transposed convolution": lambda: torch.nn.functional.conv_transpose2d(tensor(2, 4, 5, 5), tensor(4, 6, 3, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_agree_with_torch(name: str) -> None:
    expected = FlopCounterMode(display=False)
    with Ours() as ours, expected:
        CASES[name]().sum().backward()
    assert ours.total == expected.get_total_flops() > 0


def test_a_group_of_channels_meets_its_own_weight_alone() -> None:
    with Ours() as ours:
        torch.nn.functional.conv2d(tensor(2, 4, 9, 9), tensor(6, 2, 3, 3), groups=2).sum().backward()
    assert ours.total == 3 * 2 * (2 * 6 * 7 * 7) * (2 * 3 * 3)


def test_attention_is_two_products_forward_and_five_backward() -> None:
    query, key, value = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7))
    with Ours() as ours:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert ours.total == (2 + 5) * 2 * (2 * 3) * (5 * 7) * 8


@pytest.mark.parametrize(("rows", "columns", "seen"), [(8, 8, 32), (8, 20, 32), (20, 8, 8 * 8 // 2 + 12 * 8)])
def test_a_causal_mask_leaves_out_what_lies_above_the_diagonal(rows: int, columns: int, seen: int) -> None:
    shapes = ((2, 3, rows, 8), (2, 3, columns, 8), (2, 3, columns, 8))
    forward = aten._scaled_dot_product_flash_attention.default
    args = (*shapes, 0.0, True)
    assert flops(forward, shapes, shapes[:1], args) == 2 * 2 * 6 * seen * 8
    assert flops(forward, shapes, shapes[:1], (*shapes, 0.0, False)) == 2 * 2 * 6 * rows * columns * 8
    math = aten._scaled_dot_product_attention_math.default
    assert flops(math, shapes, shapes[:1], (*shapes, None, 0.0, True)) == 2 * 2 * 6 * rows * columns * 8


def test_the_input_of_the_first_layer_needs_no_gradient() -> None:
    shapes = ((2, 6, 4, 4), (2, 4, 9, 9), (6, 4, 3, 3))
    args = (*shapes, [6], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    half = flops(aten.convolution_backward.default, shapes, ((6, 4, 3, 3), (6,)), args)
    both = flops(aten.convolution_backward.default, shapes, shapes[1:], (*args[:-1], [True, True, True]))
    assert both == 2 * half > 0


def test_recurrence_multiplies_the_state_once_per_step() -> None:
    once = 2 * (5 * 3 * 16) * 4
    states, gates, cells = (3, 4), (5, 3, 16), (5, 3, 4)
    assert flops(steps.lstm_steps.default, (gates, states, states, (16, 4)), (cells, cells, gates)) == once
    results = (gates, states, states, cells)
    assert flops(steps.lstm_steps_backward.default, (cells, states, (16, 4), cells, gates), results) == once
    assert flops(steps.gru_steps_backward.default, (), (gates, gates, states)) == once
    assert flops(steps.rnn_steps.default, (cells, states, (4, 4)), (cells,)) == once / 4


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.view.default, aten._softmax.default])
def test_other_operators_are_bound_by_bytes(op) -> None:
    assert flops(op, ((3, 4), (3, 4)), ((3, 4),)) == 0.0


def test_losses_in_pieces_make_their_logits_twice_and_stream_them() -> None:
    rows, width, classes = 6, 8, 10
    hidden, weight = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(classes, width, dtype=torch.bfloat16)
    of_rows, absent, product = torch.empty(rows), torch.empty(0), 2 * rows * width * classes
    forward = work_of_call(losses.logit_statistics.default, [hidden, weight, of_rows], [of_rows, of_rows])
    assert (forward.flops, forward.repeated, forward.dtype) == (product, 0, torch.bfloat16)
    operands = [of_rows, of_rows, hidden, weight, of_rows, of_rows]
    for gradients, products in (([hidden, weight, absent], 3), ([hidden, absent, absent], 2)):
        backward = work_of_call(losses.logit_statistics_backward.default, operands, gradients)
        assert (backward.flops, backward.repeated) == (products * product, product)
        assert backward.streamed > forward.streamed > 0
    # Sums of a gradient in single precision, once for a piece: as much as a pass over logits, if a piece is as wide.
    hidden, weight = (torch.empty(size, 4096, dtype=torch.bfloat16, device="meta") for size in (rows, classes))
    operands = [of_rows, of_rows, hidden, weight, of_rows, of_rows]
    wide = work_of_call(losses.logit_statistics_backward.default, operands, [hidden, weight, absent])
    assert wide.streamed - backward.streamed == pytest.approx(rows * classes * (4 + 2 * 4) * (1 - width / 1024))
    assert model({"x": 1}).compute(1000.0, 10.0, torch.float32, streamed=20.0) == pytest.approx(10.5 + 2.5)
