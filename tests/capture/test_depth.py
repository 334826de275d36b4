from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.capture import JointGraph, capture
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.depth import capture_repeated
from autoshard.capture.joint import CaptureOptions, capture_call

LAYERS = 5
LEAST = 5
WIDTH = 8

Example = tuple[nn.Module, dict[str, Any]]


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(8).reshape(2, 4)
    return {"input_ids": ids, "labels": ids}


SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 1}


def gpt2() -> Example:
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=LAYERS, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config), tokens()


def llama(**options: Any) -> Example:
    """With a cache of keys and values, which has constants of every layer."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **options)), tokens()


def bert() -> Example:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), tokens()


def vit() -> Example:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=8,
        patch_size=4, attention_probs_dropout_prob=0.1
    )  # fmt: skip
    images = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    return transformers.ViTForImageClassification(config), images


def t5() -> Example:
    """The first layers of both halves differ from the others: they hold the biases of positions for all."""
    config = transformers.T5Config(
        vocab_size=32, d_model=WIDTH, d_kv=4, d_ff=16, num_layers=LAYERS + 1, num_decoder_layers=LAYERS + 1,
        num_heads=2, use_cache=False, decoder_start_token_id=0, pad_token_id=0
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), tokens()


def mixtral() -> Example:
    config = transformers.MixtralConfig(**GROUPED, use_cache=False, num_local_experts=2, router_aux_loss_coef=0.0)
    return transformers.MixtralForCausalLM(config), tokens()


class Stack(nn.Module):
    """Linear layers in a list, behind one and before one of other widths; each test gives its own loop."""

    def __init__(self, run: Callable[[int, nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList([nn.Linear(4, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(7))])
        self.layers.append(nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.run(index, layer, x)
        return x.sum()


def stack(run: Callable[[int, nn.Module, torch.Tensor], torch.Tensor]) -> Example:
    return Stack(run), {"x": torch.zeros(3, 4)}


class Block(nn.Module):
    """A residual block that knows its number."""

    def __init__(self, number: int, chance: float = 0.1) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(chance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(x).relu())


class LastScaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.number >= LAYERS - 1 else 1)


class Attention(nn.Module):
    """Attention to all positions, or to a window of them."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.linear(x).unflatten(-1, (3, 2, -1)).movedim((-3, -2), (0, -3))
        mask = None
        if self.window is not None:
            places = torch.arange(x.shape[-2])
            mask = (places[:, None] - places).abs() < self.window
        return x + nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(-2, -3).flatten(-2)


def blocks(*elements: nn.Module) -> Example:
    return nn.Sequential(*elements), {"input": torch.zeros(3, 4, WIDTH)}


def convolutions() -> Example:
    """Batch norm, whose statistics change, three modules to a period."""
    layers = [part for _ in range(LAYERS) for part in (nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())]
    return nn.Sequential(*layers), {"input": torch.zeros(2, 2, 4, 4)}


CONTINUED: dict[str, Callable[[], Example]] = {
    "GPT-2": gpt2,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "BERT": bert,
    "ViT": vit,
    "T5": t5,
    "Mixtral": mixtral,
    "windows by turns": lambda: blocks(*(Attention(None if index % 2 else 2) for index in range(2 * LAYERS))),
    "blocks": lambda: blocks(*map(Block, range(LAYERS))),
    "convolutions": convolutions,
    "first and last differ": lambda: stack(lambda _, layer, x: layer(x)),
    "constants": lambda: stack(lambda _, layer, x: layer(x) * torch.tensor([2.0])),
    "operators in the loop": lambda: stack(lambda _, layer, x: layer(x).relu() + 1),
}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


LOG: list[int] = []


def keeping_numbers(index: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    LOG.append(index)
    return layer(x)


class Returned(nn.Module):
    """Returns the results of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Block, range(LAYERS)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = [x]
        for layer in self.layers:
            results.append(layer(results[-1]))
        return results

    def example(self) -> Example:
        return self, {"x": torch.zeros(3, WIDTH)}


def without_gradients(index: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(index != 6):
        return layer(x)


WHOLE: dict[str, Callable[[], Example]] = {
    "one dropout differs": lambda: blocks(*(Block(index, 0.2 if index == 3 else 0.1) for index in range(LAYERS))),
    "a layer asks for its number": lambda: blocks(*map(LastScaled, range(LAYERS))),
    "the loop asks for the number": lambda: stack(lambda index, layer, x: layer(x) * (2 if index == 6 else 1)),
    "one layer is detached": lambda: stack(lambda index, layer, x: layer(x).detach() if index == 6 else layer(x)),
    "one layer has no gradients": lambda: stack(without_gradients),
    "constants differ": lambda: stack(lambda index, layer, x: layer(x) * torch.tensor([2.0 if index == 6 else 1.0])),
    "the loop keeps its numbers": lambda: stack(keeping_numbers),
    "gradients differ": lambda: stack(lambda index, layer, x: Scale.apply(layer(x), 2.0 if index == 6 else 1.0)),
    "layers are returned": lambda: Returned().example(),
}


def description(graph: JointGraph) -> Iterator[object]:
    """Everything that a joint graph holds, as text: of fake tensors, what is true of real ones."""
    for node in graph.graph.nodes:
        values = node.meta.get("val")
        yield node.op, node.name, str(node.target), str(node.args), str(node.kwargs)
        if node.op != "output":
            tensors = values if isinstance(values, (tuple, list)) else [values]
            yield [
                (tuple(each.shape), each.stride(), each.dtype, each.device) if isinstance(each, torch.Tensor) else each
                for each in tensors
            ]
            yield graph.phase(node), graph.module_path(node), graph.task_graph(node), node.meta.get("stack_trace")
            yield [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    for item in (*graph.inputs, *graph.outputs):
        yield item.kind, item.name, item.node and item.node.name
    yield [item.value if item.value is None else item.value.tolist() for item in graph.inputs]
    yield list(graph.aliases.items()), graph.signature, graph.fingerprint, graph.dynamic, graph.recomputed
    yield graph.call, graph.result, graph.histories, graph.model


def assert_equal(
    module: nn.Module, kwargs: dict[str, Any], *, is_continued: bool, grad: bool = True, **options: Any
) -> None:
    parts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = BoundCall.of(module, (), kwargs, grad)
        graph = capture_repeated(call, CaptureOptions(progress=parts.append, **options), LEAST)
        whole = capture_call(call, CaptureOptions(**options))
    assert ("export of forward" not in parts) == is_continued, parts
    for item, like in zip(description(graph), description(whole), strict=True):
        assert item == like
    assert isinstance(graph.graph_module, fx.GraphModule)
    graph.graph.lint()


@pytest.mark.parametrize("case", CONTINUED)
def test_the_continued_graph_is_that_of_the_whole_module(case: str) -> None:
    torch.manual_seed(0)
    assert_equal(*CONTINUED[case](), is_continued=True)


@pytest.mark.parametrize("case", WHOLE)
def test_layers_that_differ_are_all_captured(case: str) -> None:
    assert_equal(*WHOLE[case](), is_continued=False)


def test_evaluation_dynamic_sizes_precisions_and_frozen_layers() -> None:
    module, kwargs = CONTINUED["blocks"]()
    with torch.no_grad():
        assert_equal(module.eval(), kwargs, is_continued=True, grad=False)
    assert_equal(module.train(), kwargs, is_continued=True, dynamic={"input": {0: "batch"}})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_equal(module, kwargs, is_continued=True, mp_policy=policy, tangents="all")
    module, kwargs = blocks(*map(Block, range(LAYERS + 1)))
    module[0].requires_grad_(False)  # the others repeat
    assert_equal(module, kwargs, is_continued=True)


def test_the_module_stays_as_it_is() -> None:
    module, kwargs = CONTINUED["blocks"]()
    before = list(module), {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    capture_repeated(BoundCall.of(module, (), kwargs), CaptureOptions(), LEAST)
    assert before == (list(module), {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()})


def test_objects_outside_of_the_module_stay_as_they_are() -> None:
    module, kwargs = stack(keeping_numbers)
    LOG.clear()
    capture_repeated(BoundCall.of(module, (), kwargs), CaptureOptions(), LEAST)
    assert not LOG


def test_a_plan_has_the_fingerprint_of_the_whole_graph() -> None:
    module, kwargs = blocks(*map(Block, range(21)))
    plan = autoshard.plan(module, {"x": 2}, (), kwargs)
    assert plan.fingerprint == capture(module, (), kwargs).fingerprint
