from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from autoshard.capture import capture
from autoshard.operators.attention import masks
from autoshard.operators.attention.attention_operator import operators
from tests.capture.interpret import run_joint
from tests.releases import skip_without

LENGTH = 12


Mask = Callable[[Tensor], Tensor]


class Masked(nn.Module):
    """Attention under each of some masks that functions of the input make: losses by the names of these functions."""

    def __init__(self, *masks: Mask, queries: int = LENGTH) -> None:
        super().__init__()
        self.masks, self.queries = masks, queries
        self.into = nn.ModuleDict({mask.__name__: nn.Linear(8, 24).double() for mask in masks})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        losses = {}
        for place, mask in enumerate(self.masks):
            query, key, value = self.into[mask.__name__](x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
            query = query[:, :, : self.queries]
            # The scale tells the calls apart.
            y = scaled_dot_product_attention(query, key, value, attn_mask=self.mask(mask, x), scale=1.0 / (place + 1))
            losses[mask.__name__] = y.square().mean()
        return losses

    def mask(self, mask: Mask, x: Tensor) -> Tensor:
        return mask(x)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.arange(x.shape[1], device=x.device)
    return count.unsqueeze(1), count


def causal(x: Tensor) -> Tensor:
    query, key = positions(x)
    return key <= query


def window(x: Tensor) -> Tensor:
    query, key = positions(x)
    return (key <= query) & (key > query - 5)


def of_documents(x: Tensor) -> Tensor:
    """Positions per sample, as models find out where packed samples begin: here in one piece."""
    place = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    document = (place.diff(dim=-1, prepend=place[:, :1] - 1) != 1).cumsum(-1)
    batch = torch.arange(x.shape[0])[:, None, None, None]
    query, key = place[0][None, None, :, None], place[0][None, None, None, :]
    return (document[batch, query] == document[batch, key]) & (key <= query)


def as_numbers(x: Tensor) -> Tensor:
    hidden = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype)
    return hidden.triu(1)[None, None].expand(x.shape[0], 1, -1, -1)


def nothing(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)


def later_alone(x: Tensor) -> Tensor:
    query, key = positions(x)
    return key >= query


def of_blocks(x: Tensor) -> Tensor:
    query, key = positions(x)
    return (key <= query) & (key // 4 == query // 4)


def distances(x: Tensor) -> Tensor:
    query, key = positions(x)
    return -(query - key).abs().to(x.dtype)


def of_numbers(x: Tensor) -> Tensor:
    return causal(x) & (x.sum(-1) < 100)[:, None, None, :]


def triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def one_row_shown(x: Tensor) -> Tensor:
    mask = causal(x)
    mask[2] = True
    return mask


def one_key_moved(x: Tensor) -> Tensor:
    query, key = positions(x)
    key = key + 0
    key[3] = 7
    return key <= query


def one_row_of_ones(x: Tensor) -> Tensor:
    mask = triangle(x)
    mask[2, :] = True
    return mask


def beside(x: Tensor) -> Tensor:
    query, key = positions(x)
    return (key <= query + 1) & (key > query - 5)


def every_other(x: Tensor) -> Tensor:
    count = torch.arange(0, 2 * x.shape[1], 2)
    return torch.arange(x.shape[1]) <= count.unsqueeze(1)


KNOWN: dict[Mask, tuple[bool, int]] = {
    causal: (True, 0),
    triangle: (True, 0),
    window: (True, 5),
    of_documents: (True, 0),
    as_numbers: (True, 0),
    nothing: (False, 0),
    zeros: (False, 0),
}
UNKNOWN = (
    later_alone,
    of_blocks,
    distances,
    of_numbers,
    one_row_shown,
    one_key_moved,
    one_row_of_ones,
    beside,
    every_other,
)
NUMBERS = (as_numbers, zeros)  # masks of numbers, which are not followed at sizes that change

Arguments = dict[str, tuple[Any, bool, int]]
"""By the name of a mask, what attention gets instead: the mask, the causal flag, the window."""


def called(module: Masked, dynamic: bool = False) -> tuple[Arguments, fx.Graph]:
    """What attention gets in the graph, and the graph, which computes what the module does."""
    x = torch.randn(3, LENGTH, 8, dtype=torch.float64)
    captured = capture(module, (x,), {}, dynamic={"x": {0: "batch", 1: "length"}} if dynamic else None)
    graph = captured.graph_module.graph
    found = {}
    for node in graph.find_nodes(op="call_function", target=operators.attention.default):
        mask, _, causal, window, scale = node.args[3:8]
        found[module.masks[round(1 / scale) - 1].__name__] = (mask, causal, window)
    assert found.keys() == module.into.keys()
    losses = module(x)
    torch.stack([*losses.values()]).sum().backward()
    run = run_joint(captured, module, (x,))
    expected = {f"into.{name}.weight": layer.weight.grad for name, layer in module.into.items()}
    assert_close(run.output, losses, rtol=1e-9, atol=1e-9)
    assert_close({name: run.gradients[name] for name in expected}, expected, rtol=1e-9, atol=1e-9)
    return found, graph


def assert_flags(found: Arguments, graph: fx.Graph, masks: Sequence[Mask]) -> None:
    assert found == {mask.__name__: (None, *KNOWN[mask]) for mask in masks}
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default)


def assert_no_flags(found: Arguments) -> None:
    assert {name for name, (mask, *flags) in found.items() if mask is None or flags != [False, 0]} == set()


@pytest.mark.parametrize("small", [1 << 22, 40])
def test_what_a_flag_says(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of masks so large that they are looked at rows at a time."""
    monkeypatch.setattr(masks, "_SMALL", small)
    assert_flags(*called(Masked(*KNOWN)), [*KNOWN])


def test_what_no_flag_says_stays() -> None:
    assert_no_flags(called(Masked(*UNKNOWN))[0])


def first_queries(x: Tensor) -> Tensor:
    return causal(x)[:8]


def all_of_first_queries(x: Tensor) -> Tensor:
    return nothing(x)[:, :, :8]


def test_fewer_queries_than_keys() -> None:
    """A causal flag would count queries from the first key, and these do."""
    found, _ = called(Masked(first_queries, all_of_first_queries, queries=8))
    assert found["first_queries"][0] is not None
    assert found["all_of_first_queries"][0] is None


class Kept(Masked):
    """A causal mask in a buffer."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.register_buffer("kept", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def mask(self, mask: Mask, x: Tensor) -> Tensor:
        return self.get_buffer("kept")


def test_a_buffer_may_change() -> None:
    assert_no_flags(called(Kept())[0])


def test_at_all_sizes() -> None:
    """What a flag says and what none says, with sizes that change."""
    known = [mask for mask in KNOWN if mask not in NUMBERS]
    assert_flags(*called(Masked(*known, queries=1 << 60), dynamic=True), known)
    assert_no_flags(called(Masked(*UNKNOWN, *NUMBERS, queries=1 << 60), dynamic=True)[0])


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=32, use_cache=False
    )
    with torch.device("meta"):
        module, ids = transformers.LlamaForCausalLM(config), torch.zeros(2, 8, dtype=torch.int64)
    graph = capture(module, (), {"input_ids": ids, "labels": ids}).graph_module.graph
    calls = graph.find_nodes(op="call_function", target=operators.attention.default)
    assert [(call.args[3], call.args[5]) for call in calls] == [(None, True)] * 2


def _language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 40, "attn_implementation": "sdpa", "use_cache": False}
    if name == "llama":
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
        config = transformers.LlamaConfig(hidden_size=16, **sizes, **common)
        return transformers.LlamaForCausalLM(config).double()
    drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=4, n_positions=32, **drops, **common)
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_language_models_of_dynamic_sizes_are_causal(name: str) -> None:
    if name == "llama":
        skip_without("export of repeated key heads of any length")
    torch.manual_seed(0)
    module = _language_model(name)
    dims = {0: "batch", 1: "length"}
    graph = capture(
        module, (), {"input_ids": torch.ones(3, 8, dtype=torch.int64)}, grad=False, dynamic={"input_ids": dims}
    )
    (node,) = graph.graph_module.graph.find_nodes(op="call_function", target=operators.attention.default)
    assert node.args[3] is None
    assert tuple(node.args[5:7]) == (True, 0)
