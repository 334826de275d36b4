"""Losses that are computed in pieces: found in the graphs of models, and only where nothing else reads the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.operators.large_losses import loss_in_pieces, loss_operator
from autoshard.operators.large_losses.loss_in_pieces import has_large_logits
from tests.capture.interpret import run_joint

VOCABULARY, WIDTH, BATCH, LENGTH = 11, 6, 3, 5
_STATISTICS = torch.ops.autoshard.logit_statistics.default


class Head(nn.Module):
    """A table of embeddings, a layer, and a head, whose logits a function takes."""

    def __init__(self, loss: Callable[[Head, Tensor, Tensor], Any], tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.register_buffer("weights", torch.linspace(0.5, 2, VOCABULARY))
        if tied:
            self.head.weight = self.table.weight
        self.loss = loss

    def forward(self, tokens: Tensor) -> Any:
        return self.loss(self, self.inner(self.table(tokens)).tanh(), tokens)


def shifted(head: Head, hidden: Tensor, tokens: Tensor, **options: Any) -> Tensor:
    """The loss of the next token, as Hugging Face had it."""
    logits = head.head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
    return functional.cross_entropy(logits, tokens[..., 1:].contiguous().view(-1), **options)


def capped(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = torch.tanh(head.head(hidden) / 3) * 3.0
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1)


def scaled(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = head.head(hidden) * 0.25
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens.reshape(-1), weight=head.weights)


def by_log_softmax(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    log_probs = functional.log_softmax(head.head(hidden), -1)
    return functional.nll_loss(log_probs.flatten(0, 1), tokens.flatten(), ignore_index=2, reduction="sum")


def classes_second(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(head.head(hidden).transpose(1, 2), tokens, reduction="none").mean()


def without_layer(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ head.head.weight.t()).flatten(0, 1), tokens.flatten())


def penalised(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    target = tokens.flatten()
    logits = head.head(hidden).flatten(0, 1)
    return functional.cross_entropy(logits, target) + 0.01 * logits.logsumexp(-1).square().mean()


def last_token(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(head.head(hidden)[:, -1], tokens[:, 0])


LOSSES = (shifted, capped, scaled, by_log_softmax, classes_second, without_layer, penalised, last_token)


def tokens_of(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def is_in_pieces(graph: JointGraph) -> bool:
    """Whether the graph has statistics of logits, and nothing as large as logits."""
    nodes = graph.graph.find_nodes(op="call_function", target=_STATISTICS)
    shapes = [getattr(node.meta["val"], "shape", ()) for node in graph.graph.nodes if node.op == "call_function"]
    return bool(nodes) and not any(len(shape) > 1 and VOCABULARY in shape[1:] for shape in shapes)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_in_pieces, "LARGE_LOGITS", 4)
    monkeypatch.setattr(loss_operator, "LEAST_STEP", 3)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tied", [False, True])
def test_numbers_are_those_of_the_module(loss: Callable[..., Tensor], tied: bool) -> None:
    module, tokens = Head(loss, tied=tied, bias=not tied).double(), tokens_of()
    graph = capture(module, (tokens,), {}, devices=1)
    assert len(graph.graph.find_nodes(op="call_function", target=_STATISTICS)) == 1
    assert loss is without_layer or is_in_pieces(graph)
    step = run_joint(graph, module, (tokens,))
    expected = module(tokens)
    expected.backward()
    torch.testing.assert_close(step.output, expected.detach(), rtol=1e-9, atol=0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def returned(head: Head, hidden: Tensor, tokens: Tensor) -> Any:
    logits = head.head(hidden)
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


def measured(head: Head, hidden: Tensor, tokens: Tensor) -> Any:
    logits = head.head(hidden).flatten(0, 1)
    return functional.cross_entropy(logits, tokens.flatten()), logits.argmax(-1)


def taught(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Targets are probabilities, of another head."""
    probabilities = head.table(tokens).flatten(0, 1) @ head.head.weight.t()
    return functional.cross_entropy(head.head(hidden).flatten(0, 1), probabilities)


def squared(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(head.head(hidden).square().flatten(0, 1), tokens.flatten())


def some_classes(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(head.head(hidden)[..., :7].flatten(0, 1), tokens.flatten() % 7)


def twice_normalised(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    return functional.nll_loss(2 * functional.log_softmax(head.head(hidden), -1).flatten(0, 1), tokens.flatten())


def penalised_probabilities(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    log_probs = functional.log_softmax(head.head(hidden).flatten(0, 1), -1)
    return functional.nll_loss(log_probs, tokens.flatten()) + log_probs.logsumexp(-1).mean()


def over_positions(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The dim of the loss is that of positions."""
    return functional.cross_entropy(head.head(hidden), tokens[:, :1].expand(-1, VOCABULARY) % LENGTH)


@pytest.mark.parametrize(
    "loss",
    [returned, measured, taught, squared, some_classes, twice_normalised, penalised_probabilities, over_positions],
)
def test_logits_that_are_read_otherwise_stay_whole(loss: Callable[..., Any]) -> None:
    graph = capture(Head(loss), (tokens_of(),), {}, devices=1)
    assert not graph.graph.find_nodes(op="call_function", target=_STATISTICS)


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_the_head_has_read_may_not_change_before_the_loss(is_changed: bool) -> None:
    def loss(head: Head, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = head.head(hidden)
        (hidden if is_changed else hidden + 1).zero_()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    graph = capture(Head(loss), (tokens_of(),), {}, devices=1, grad=False)
    assert bool(graph.graph.find_nodes(op="call_function", target=_STATISTICS)) != is_changed


def test_logits_that_are_few_on_every_device_stay_whole() -> None:
    module, tokens = Head(capped), tokens_of()
    elements = BATCH * LENGTH * VOCABULARY
    whole = capture(module, (tokens,), {}, devices=elements // 4 + 1)
    assert not whole.graph.find_nodes(op="call_function", target=_STATISTICS)
    assert not has_large_logits(whole.graph, elements // 4 + 1)
    assert has_large_logits(whole.graph, elements // 4)
    assert is_in_pieces(capture(module, (tokens,), {}, devices=elements // 4))
    assert capture(module, (tokens,), {}).fingerprint == whole.fingerprint


@pytest.mark.parametrize("autocast", [False, True])
def test_products_have_the_precision_of_the_layer(autocast: bool) -> None:
    module, tokens = Head(shifted), tokens_of()
    policy = None if autocast else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph = capture(module, (tokens,), {}, devices=1, mp_policy=policy)
    (node,) = graph.graph.find_nodes(op="call_function", target=_STATISTICS)
    hidden, weight = node.all_input_nodes[:2]
    assert hidden.meta["val"].dtype == weight.meta["val"].dtype == torch.bfloat16
    assert node.meta["val"][0].dtype == torch.float32


@pytest.mark.parametrize(("loss", "dims"), [(shifted, {0: "batch"}), (capped, {0: "batch", 1: "length"})])
def test_dynamic_sizes(loss: Callable[..., Tensor], dims: dict[int, str]) -> None:
    assert is_in_pieces(capture(Head(loss), (tokens_of(),), {}, devices=1, dynamic={"tokens": dims}))


class Wide(nn.Module):
    """The head of Llama-3-8B behind one of its feed-forward layers, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128256, 4096)
        self.up, self.down = nn.Linear(4096, 14336, bias=False), nn.Linear(14336, 4096, bias=False)
        self.head = nn.Linear(4096, 128256, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(tokens)
        logits = self.head(hidden + self.down(functional.silu(self.up(hidden)))).float()
        return functional.cross_entropy(logits.view(-1, 128256), labels.view(-1))


def test_a_limit_decides_whether_a_wide_model_has_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        module = Wide().bfloat16()
        inputs = {name: torch.empty(16, 4096, dtype=torch.int64) for name in ("tokens", "labels")}
    monkeypatch.undo()
    logits = 2 * 4096 * 128256 * 4
    options: dict[str, Any] = {"cluster": "h100", "optimizer": "adamw", "search": autoshard.Search(effort="fast")}
    whole = autoshard.plan(module, {"dp": 8}, (), inputs, **options)
    limit = whole.memory.peak - 2 * logits
    pieces = autoshard.plan(module, {"dp": 8}, (), inputs, memory_limit=limit, **options)
    assert not whole.is_in_pieces
    assert pieces.is_in_pieces
    assert pieces.memory.peak < limit
    assert whole.step_seconds < pieces.step_seconds < 1.25 * whole.step_seconds
    # A limit that costs less than to make logits twice leaves them whole.
    assert not autoshard.plan(module, {"dp": 8}, (), inputs, memory_limit=whole.memory.peak - 1, **options).is_in_pieces


class Narrow(nn.Module):
    """A small model of a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2**15, 64)
        self.head = nn.Linear(64, 2**15)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), tokens.flatten())


def test_a_frontier_goes_from_losses_in_pieces_to_whole_logits() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_operator, "LEAST_STEP", 1024)
        patch.setattr(loss_in_pieces, "FEW_LOGITS", 2**20)
        with torch.device("meta"):
            module = Narrow()
            tokens = torch.empty(8, 4096, dtype=torch.int64)
        plans = autoshard.frontier(module, {"dp": 2}, (tokens,), gaps=2, cluster="h100")
    assert plans[0].is_in_pieces
    assert not plans[-1].is_in_pieces
    pieces = [plan.is_in_pieces for plan in plans]
    assert pieces == sorted(pieces, reverse=True)
