from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention, noop_mask
from torch.nn.attention.flex_attention import flex_attention as under_another_name

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.operators.attention import masks
from autoshard.operators.attention.attention_operator import operators
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.capture.interpret import run_joint
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

LENGTH, HEADS = 8, 4
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 5, [0] * 8])
BIAS = torch.linspace(-1, 1, 2 * LENGTH * LENGTH).view(2, 1, LENGTH, LENGTH).double()

Modification = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def window(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 5)


def of_documents(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (DOCUMENTS[b, query] == DOCUMENTS[b, key]) & (query >= key)


def later_alone(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key > query  # the last query attends to nothing


class Flexible(nn.Module):
    """FlexAttention with a table of biases; what modifies scores is given the table."""

    def __init__(
        self, mask: Modification | None = None, score: Callable[[Tensor], Modification] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.into = nn.Linear(8, 3 * HEADS * 4).double()
        self.table = nn.Parameter(torch.linspace(-1, 1, HEADS * 2 * LENGTH).view(HEADS, 2 * LENGTH).double())
        self.mask, self.score, self.options = mask, score, options

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.into(x).unflatten(-1, (3, HEADS, 4)).movedim(-3, 0).transpose(-3, -2)
        if self.options.get("enable_gqa"):
            key, value = key[:, :2], value[:, :2]
        return query, key, value

    def blocks(self) -> BlockMask | None:
        return self.mask and create_block_mask(self.mask, None, None, LENGTH, LENGTH, device="cpu")

    def forward(self, x: Tensor) -> Any:
        score = self.score and self.score(self.table)
        return under_another_name(*self.operands(x), score, self.blocks(), **self.options)


def relative(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: score + table[h, query - key + LENGTH]


def slopes(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: score - (query - key) * torch.exp2(-(h + 1))


def capped(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: 2 * torch.tanh(score / 2)


def capped_and_relative(table: Tensor) -> Modification:
    def modified(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = 2 * torch.tanh(score / 2)
        score += table[h, query - key + LENGTH]
        return score

    return modified


def added_in_place(table: Tensor) -> Modification:
    def modified(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score.add_(table[h, query - key + LENGTH])
        return score

    return modified


def read_one_by_one(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: score + BIAS[b][0][query][key]


def hiding(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: torch.where(query >= key, score, -math.inf)


def untouched(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: score


def twice(table: Tensor) -> Modification:
    return lambda score, b, h, query, key: score + score


FORMS: dict[str, tuple[Flexible, bool]] = {
    "plain": (Flexible(), True),
    "causal": (Flexible(causal), True),
    "window": (Flexible(window, scale=0.3), True),
    "documents": (Flexible(of_documents), True),
    "later": (Flexible(later_alone), True),
    "grouped": (Flexible(causal, relative, enable_gqa=True), True),
    "untouched": (Flexible(causal, untouched), True),
    "relative": (Flexible(causal, relative), True),
    "slopes": (Flexible(None, slopes), True),
    "one by one": (Flexible(None, read_one_by_one), True),
    "in place": (Flexible(causal, added_in_place), True),
    "hiding": (Flexible(None, hiding), True),
    "capped": (Flexible(causal, capped, kernel_options={"BLOCK_M": 64}), False),
    "capped and relative": (Flexible(later_alone, capped_and_relative, enable_gqa=True), False),
    "twice": (Flexible(window, twice), False),
    "logarithms": (Flexible(later_alone, relative, return_lse=True), False),
    "asked for": (Flexible(causal, slopes, return_aux=AuxRequest(lse=True)), False),
    "results": (Flexible(causal, capped, return_aux=AuxRequest()), False),
    "results of sums": (Flexible(causal, slopes, return_aux=AuxRequest()), True),
}


def modified_scores(module: Flexible, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, written out position by position, and values."""
    query, key, value = module.operands(x)
    key, value = (each.repeat_interleave(HEADS // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * module.options.get("scale", 0.5)
    score = module.score and module.score(module.table)
    rows = []
    for place in torch.cartesian_prod(*map(torch.arange, scores.shape)):
        one = scores[tuple(place)]
        one = score(one.clone(), *place) if score else one
        rows.append(one if module.mask is None or module.mask(*place) else torch.full_like(one, -math.inf))
    return torch.stack(rows).view(scores.shape), value


def dense(module: Flexible, x: Tensor) -> tuple[Tensor, Tensor]:
    """Result and logarithms."""
    scores, value = modified_scores(module, x)
    alone = (scores == -math.inf).all(-1, keepdim=True)
    filled = scores.masked_fill(alone, 0)
    logarithms = filled.logsumexp(-1).masked_fill(alone.squeeze(-1), -math.inf)
    return filled.softmax(-1).masked_fill(alone, 0) @ value, logarithms


def example() -> Tensor:
    return torch.linspace(-1, 1, 2 * LENGTH * 8).sin().mul(3).view(2, LENGTH, 8).double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_results_are_those_of_torch_and_gradients_those_of_the_formula(form: str) -> None:
    module, is_fused = FORMS[form]
    x = example()
    graph = capture(module, (x,), {}, tangents="all")
    assert (operators.attention.default in {node.target for node in graph.graph.nodes}) == is_fused
    with torch.no_grad():
        expected = module(x)
    found = run_joint(graph, module, (x,))  # the tangents are ones
    torch.testing.assert_close(found.output, expected)
    wanted, logarithms = dense(module, x)
    loss = wanted.sum()
    if sum(item.kind == "tangent" for item in graph.inputs) > 1:
        loss = loss + logarithms[logarithms > -math.inf].sum()
    loss.backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert found.gradients.get(name) is None
        else:
            torch.testing.assert_close(found.gradients[name], parameter.grad)


def test_the_greatest_scores_which_torch_gives_on_gpus_alone() -> None:
    module, x = Flexible(later_alone, capped, return_aux=AuxRequest(max_scores=True)), example()
    (_, aux) = run_joint(capture(module, (x,), {}), module, (x,)).output
    torch.testing.assert_close(aux.max_scores, modified_scores(module, x)[0].amax(-1))
    assert aux.lse is None


@pytest.mark.parametrize(("form", "flags"), [("plain", (False, 0)), ("causal", (True, 0)), ("window", (True, 5))])
def test_masks_of_positions_are_said_by_flags(form: str, flags: tuple[bool, int]) -> None:
    graph = capture(FORMS[form][0], (example(),), {})
    (call,) = graph.graph.find_nodes(op="call_function", target=operators.attention.default)
    assert call.args[3] is None
    assert call.args[5:7] == flags


def test_masks_of_long_sequences_are_said_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_SMALL", 32)
    test_masks_of_positions_are_said_by_flags("window", (True, 5))


def test_a_block_mask_of_outside_is_its_mask() -> None:
    class Outside(Flexible):
        def __init__(self) -> None:
            super().__init__(causal)
            self.held = super().blocks()

        def blocks(self) -> BlockMask | None:
            return self.held

    module, x = Outside(), example()
    found = run_joint(capture(module, (x,), {}), module, (x,))
    torch.testing.assert_close(found.output, dense(module, x)[0])


class Refused(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor) -> Any:
        return flex_attention(query, key, key, **self.options)


def _half_of_the_blocks() -> BlockMask:
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4, mask_mod=noop_mask, seq_lengths=(8, 8))


@pytest.mark.parametrize(
    ("options", "heads", "words"),
    [
        ({}, 2, "share key heads"),
        ({"block_mask": create_block_mask(causal, None, None, 6, 6, device="cpu")}, 4, "of lengths (6, 6)"),
        ({"block_mask": _half_of_the_blocks()}, 4, "without mask_mod"),
        ({"score_mod": lambda score, b, h, q, k: torch.stack([score, score]).sum()}, 4, "calls stack"),
        ({"score_mod": lambda score, b, h, q, k: score + DOCUMENTS[b].sum()}, 4, "calls sum"),
        ({"score_mod": lambda score, b, h, q, k: score + DOCUMENTS[b, 1:][0]}, 4, "by other than numbers"),
        ({"return_lse": True, "return_aux": AuxRequest()}, 4, "not both"),
    ],
)
def test_what_has_no_meaning_is_refused_with_its_line(options: dict[str, Any], heads: int, words: str) -> None:
    query, key = torch.randn(2, 4, 8, 4), torch.randn(2, heads, 8, 4)
    with pytest.raises(CaptureError, match=r"test_flex_attention\.py:.*flex_attention") as raised:
        capture(Refused(**options), (query, key), {})
    assert words in str(raised.value)


def test_torchs_function_is_its_own_again() -> None:
    codes = flex_attention.__code__, create_block_mask.__code__
    capture(FORMS["causal"][0], (example(),), {})
    assert (flex_attention.__code__, create_block_mask.__code__) == codes


def flexible_llama() -> models.Model:
    module, inputs = models.hf_llama(dtype=torch.float64, layers=1)
    module.config._attn_implementation = "flex_attention"
    return module, inputs


def test_a_model_of_transformers_trains_on_a_mesh_as_on_one_device() -> None:
    alone, inputs = models.hf_llama(dtype=torch.float64, layers=1)
    with Float64Mode():
        reference = train(alone, inputs)
    with simulated_mesh(dp=2, tp=2) as mesh:
        module, inputs = flexible_llama()
        with Float64Mode():
            autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        with default_float64():
            trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert any(not placement.is_replicate() for each in trace.placements.values() for placement in each)
