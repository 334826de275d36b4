"""Rules of losses, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.operators.ctc import losses
from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_and_its_gradient(name: str, dim: int) -> None:
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward_data")
    x = 5 * normal(4, 6, 12)
    assert_sound(forward.default, x, dim, False)
    assert_sound(backward.default, normal(4, 6, 12) + 1, forward(x, dim, False), dim, torch.float64)


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_classes_that_one_rank_holds_may_all_be_masked(name: str) -> None:
    x = normal(4, 12)
    x[:, :7] = -torch.inf
    x[1] = 1e4
    assert_sound(getattr(aten, name).default, x, -1, False, shards="b0 d")


def test_scalar() -> None:
    assert_sound(aten._softmax.default, torch.tensor(2.0), -1, False)


def test_single_precision_is_not_widened() -> None:
    assert_sound(aten._log_softmax.default, normal(4, 12).bfloat16(), -1, False)


def test_safe_softmax_gives_zeros_for_rows_that_are_masked_out() -> None:
    x = normal(4, 12)
    x[2] = -torch.inf
    x[1, :7] = -torch.inf
    assert_sound(aten._safe_softmax.default, x, -1, shards="b0 d")
    assert_sound(aten._safe_softmax.default, x.float(), 1, torch.float64)


def test_exchange_is_two_numbers_per_row() -> None:
    _, rule = bound(aten._log_softmax.default, normal(4, 12), -1, False)
    assert rule.factors[rule.indices("d")[0]].exchanges == (("all_reduce", 2 * 8 * 4),)


REDUCTIONS = [0, 1, 2]


def _likelihood(shape: tuple[int, ...], ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and targets, some of which are to be ignored."""
    classes = 0 if len(shape) == 1 else 1
    samples = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(0, 6, samples, generator=torch.Generator().manual_seed(0))
    if samples:
        target.view(-1)[[0, 5]] = ignored
        target.view(-1)[1] = 2
    return torch.log_softmax(normal(*shape), classes), target


@pytest.mark.parametrize(("shape", "shards"), [((12, 6), "c n"), ((4, 6, 2, 3), "c h n w"), ((6,), "c")])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_nll_loss(shape: tuple[int, ...], shards: str, reduction: int, weighted: bool, ignored: int) -> None:
    name = "nll_loss2d" if len(shape) == 4 else "nll_loss"
    forward, backward = getattr(aten, f"{name}_forward"), getattr(aten, f"{name}_backward")
    scores, target = _likelihood(shape, ignored)
    weight = normal(6).abs() + 0.1 if weighted else None
    loss, total = forward(scores, target, weight, reduction, ignored)
    if reduction:  # without one the total weight is not written
        assert_sound(forward.default, scores, target, weight, reduction, ignored, shards=shards)
    else:
        total = scores.new_zeros(())
    gradient = normal(*loss.shape) + 2
    assert_sound(backward.default, gradient, scores, target, weight, reduction, ignored, total, shards=shards)


def test_nll_loss_where_all_samples_of_a_rank_are_ignored() -> None:
    scores, target = _likelihood((12, 6), -100)
    target[:6] = -100
    assert_sound(aten.nll_loss_forward.default, scores, target, None, 1, -100)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "extra"), [("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,)), ("soft_margin_loss", ())]
)
def test_elementwise_loss(name: str, extra: tuple[float, ...], reduction: int) -> None:
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    x, target = normal(4, 6), normal(6, 4).T.sign()
    assert_sound(forward.default, x, target, reduction, *extra, shards="dim0 dim1")
    gradient = normal(*forward(x, target, reduction, *extra).shape) + 2
    assert_sound(backward.default, gradient, x, target, reduction, *extra)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
def test_binary_cross_entropy(reduction: int, weighted: bool) -> None:
    x, target = normal(4, 6).sigmoid(), (normal(4, 6) + 1).sigmoid()
    weight = normal(4, 6).abs() if weighted else None
    loss = aten.binary_cross_entropy(x, target, weight, reduction)
    assert_sound(aten.binary_cross_entropy.default, x, target, weight, reduction)
    assert_sound(aten.binary_cross_entropy_backward.default, normal(*loss.shape) + 2, x, target, weight, reduction)


def test_no_rule_for_operands_that_are_broadcast() -> None:
    x, target = normal(4, 6), normal(1, 6)
    op = aten.mse_loss.default
    assert rule_for(call_of(op, (x, target), {}, op(x, target))) is None


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, (4, 6), (6,)])
@pytest.mark.parametrize("positive", [None, (6,)])
def test_binary_cross_entropy_with_logits(reduction: int, weight: Any, positive: Any) -> None:
    weights = [None if shape is None else normal(*shape).abs() for shape in (weight, positive)]
    args = (normal(4, 6), normal(4, 6).sigmoid(), *weights, reduction)
    assert_sound(aten.binary_cross_entropy_with_logits.default, *args, shards="dim0 dim1")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("power", "weighted"), [(1, False), (2, True)])
def test_multi_margin_loss(reduction: int, power: int, weighted: bool) -> None:
    scores, target = normal(12, 5), torch.arange(12) % 5
    options = (power, 0.7, normal(5).abs() if weighted else None, reduction)
    assert_sound(aten.multi_margin_loss.default, scores, target, *options, shards="n")
    gradient = normal(*aten.multi_margin_loss(scores, target, *options).shape) + 2
    assert_sound(aten.multi_margin_loss_backward.default, gradient, scores, target, *options, shards="n")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multilabel_margin_loss(reduction: int) -> None:
    scores, target = normal(12, 5), torch.tensor([[1, 3, -1, 0, 0], [2, -1, 0, 0, 0], [0, 1, 2, 3, 4]]).repeat(4, 1)
    loss, is_target = aten.multilabel_margin_loss_forward(scores, target, reduction)
    assert_sound(aten.multilabel_margin_loss_forward.default, scores, target, reduction, shards="n")
    gradient = normal(*loss.shape) + 2
    backward = aten.multilabel_margin_loss_backward.default
    assert_sound(backward, gradient, scores, target, reduction, is_target, shards="n")


def test_a_single_sample_is_whole() -> None:
    assert_sound(aten.multi_margin_loss.default, normal(5), torch.tensor(2), 1, 1, None, 1, shards="")


TARGETS = torch.arange(36).view(12, 3) % 6 + 1
LENGTHS = (torch.arange(12) % 3 + 6, torch.arange(12) % 3 + 1)


@pytest.mark.parametrize("rows", [True, False])
def test_samples_are_independent_where_each_has_its_own_row(rows: bool) -> None:
    scores = normal(8, 12, 7).log_softmax(-1)
    targets = TARGETS if rows else torch.cat([row[:size] for row, size in zip(TARGETS, LENGTHS[1], strict=True)])
    options = (scores, targets, *LENGTHS, 0, False)
    assert_sound(losses.ctc_loss.default, *options, shards="n" if rows else "")
    assert_sound(losses.ctc_loss_backward.default, normal(12) + 2, *options, shards="n" if rows else "")


class Recognizer(nn.Module):
    """A recurrent layer and the loss of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(6, 8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        scores = self.last(self.layer(x)[0]).log_softmax(-1)
        return nn.functional.ctc_loss(scores, TARGETS, lengths, sizes)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_training_on_a_mesh_is_training_on_one_device(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    inputs = {"x": torch.randn(8, 12, 6), "lengths": LENGTHS[0], "sizes": LENGTHS[1]}
    torch.manual_seed(1)
    reference = train(Recognizer(), inputs)
    torch.manual_seed(1)
    module = Recognizer()
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert trace.collectives
