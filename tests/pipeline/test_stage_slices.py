"""Stages of whole models against the models: outputs, gradients and statistics, for many cuts."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.step_marks import tensor_name
from autoshard.errors import PlanError
from autoshard.operators.composites import attend
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, capture_microbatch
from autoshard.pipeline.graph.stage_slices import StageModule, cut
from tests import models
from tests.pipeline.chain import Chain, balance_stages, settle_stages

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
MODELS = ("gpt", "hf_gpt2", "hf_llama", "hf_t5", "unet", "hf_mixtral", "resnet18")


@functools.cache
def _exported(name: str) -> tuple[MicrobatchStep, dict[str, Any]]:
    options: dict[str, Any] = {"tied": True} if name == "gpt" else {}
    module, inputs = models.ZOO[name](dtype=torch.float64, batch=2, **options)
    return capture_microbatch(module, (), inputs), inputs


def check(graph: MicrobatchStep, inputs: dict[str, Any], stage_of: dict[str, int], stages: int, **options: Any) -> None:
    """The stages do what the module does: outputs, gradients of all parameters, and statistics."""
    alone = copy.deepcopy(graph.module)
    alone.zero_grad()
    torch.manual_seed(1)
    theirs = alone(**inputs)
    _loss(theirs).backward()
    chain = Chain(graph, cut(graph, stage_of, stages, **options), (), inputs)
    graph.module.zero_grad()
    torch.manual_seed(1)
    ours = chain.forward()
    chain.backward()
    for returned, stage in zip(chain.returned, chain.stages, strict=True):
        for value, like in zip(returned, stage.returned, strict=True):
            assert (value.shape, value.dtype) == (like.shape, like.dtype)
            assert value.is_contiguous() or stage is chain.stages[-1]
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    for (name, one), other in zip(graph.module.named_parameters(), alone.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)
    for one, other in zip(graph.module.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def _loss(output: Any) -> torch.Tensor:
    (loss,) = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.ndim == 0)
    return loss


def _told(graph: JointGraph) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """Operators of each half, with the strides of their results; gradients are added up in another order."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    strides = [node.meta["val"].stride() if isinstance(node.meta["val"], torch.Tensor) else () for node in nodes]
    return Counter((str(node.target), graph.phase(node), stride) for node, stride in zip(nodes, strides, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_one_stage_is_the_step_of_the_model(name: str) -> None:
    step, inputs = _exported(name)
    (stage,) = cut(step, dict.fromkeys((each.name for each in step.operators), 0), 1)
    assert _told(stage.step) == _told(capture(step.module, (), inputs))


@pytest.mark.parametrize("name", MODELS)
def test_balanced_stages_do_what_the_model_does(name: str) -> None:
    graph, inputs = _exported(name)
    for stages in (2, 3):
        check(graph, inputs, balance_stages(graph, stages), stages)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5, deadline=None, phases=(Phase.generate,))
@given(seed=st.integers(0, 10**6), stages=st.sampled_from((2, 3)))
def test_any_stages_do_what_the_model_does(name: str, seed: int, stages: int) -> None:
    graph, inputs = _exported(name)
    draw, count = random.Random(seed), len(graph.operators)
    near = [stages * (place / count + draw.uniform(-0.4, 0.4)) for place in range(count)]
    stage_of = {
        each.name: min(max(int(where), 0), stages - 1) for each, where in zip(graph.operators, near, strict=True)
    }
    try:
        check(graph, inputs, settle_stages(graph, stage_of), stages)
    except PlanError as error:
        assume("nothing goes from stage" not in str(error))  # drawn so that it is no pipeline
        raise


def test_dropout_is_drawn_where_it_was() -> None:
    module, inputs = models.gpt(dtype=torch.float64, batch=2, layers=1, dropout=0.3)
    graph = capture_microbatch(module, (), inputs)
    assert graph.random
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):  # which draws as a graph does
        check(graph, inputs, balance_stages(graph, 2), 2)


class _Regions(nn.Module):
    """Regions without gradients and under autocast, changes in place, a constant, and a value used far away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.linspace(1, 2, 4), persistent=False)
        self.table = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        with torch.no_grad():
            mask = (x > 0).to(x.dtype) * self.scale
        y = self.first(x)
        early = y * 2
        y.relu_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(y.float()).to(x.dtype)
        y = self.norm(y) * mask + self.table
        halves = torch.stack(y.split(2, -1))
        z = self.third(torch.cat([*halves], -1)) * mask
        return (z * weights["a"]).sum(), {"early": early, "x": x, "kept": 3}


@functools.cache
def _regions() -> tuple[MicrobatchStep, dict[str, Any]]:
    torch.manual_seed(0)
    module = _Regions()
    inputs = {"x": torch.randn(3, 4), "weights": {"a": torch.rand(3, 1)}}
    return capture_microbatch(module, (), inputs), inputs


@settings(max_examples=15, deadline=None, phases=(Phase.generate,))
@given(seed=st.integers(0, 10**6), stages=st.integers(2, 5))
def test_regions_and_changes_in_place_are_cut(seed: int, stages: int) -> None:
    graph, inputs = _regions()
    draw, count = random.Random(seed), len(graph.operators)
    stage_of = {
        node.name: min(max(int(stages * place / count + draw.uniform(-1, 1)), 0), stages - 1)
        for place, node in enumerate(graph.operators)
    }
    stage_of = settle_stages(graph, {graph.operators[-1].name: stages - 1} | stage_of)
    try:
        check(graph, inputs, stage_of, stages)
    except PlanError as error:
        assert "nothing goes from stage" in str(error)  # noqa: PT017 - a stage before the first operator


def test_names_and_objects_are_those_of_the_module() -> None:
    graph, _ = _regions()
    stages = cut(graph, balance_stages(graph, 3), 3)
    held = {name: value for stage in stages for name, value in stage.module.named_parameters()}
    theirs = dict(graph.module.named_parameters())
    assert held.keys() == theirs.keys()
    assert all(held[name] is theirs[name] for name in held)
    buffers = {name: value for stage in stages for name, value in stage.module.named_buffers()}
    assert buffers["scale"] is graph.module.scale
    assert {name for stage in stages for name in stage.module.state_dict()} == graph.module.state_dict().keys()


def test_tied_parameters_are_told() -> None:
    graph, _ = _exported("hf_gpt2")
    first, second, third = cut(graph, balance_stages(graph, 3), 3)
    assert first.shared == third.shared == {"transformer.wte.weight": (0, 2)}
    assert second.shared == {}
    names = dict.fromkeys(("transformer.wte.weight", "lm_head.weight"), graph.module.lm_head.weight)
    for stage in (first, third):
        held = dict(stage.module.named_parameters(remove_duplicate=False))
        assert all(held[name] is parameter for name, parameter in names.items())
        assert "lm_head.weight" not in dict(stage.module.named_parameters())
        assert stage.step.aliases["transformer.wte.weight"] == tuple(names)
    stages = (first, second, third)
    assert {name for stage in stages for name in stage.module.state_dict()} == graph.module.state_dict().keys()


def test_inputs_go_where_they_are_read() -> None:
    graph, _ = _exported("gpt")
    first, second = cut(graph, balance_stages(graph, 2), 2)
    assert list(first.inputs) == ["input_ids"]
    assert list(second.inputs) == ["labels"]
    assert first.received == second.passed == ()
    assert [value.name for value in first.passed] == [value.name for value in second.received]
    assert all(value.like.is_meta and value.like.requires_grad for value in first.passed)


def _computed(stage: StageModule) -> set[str]:
    """Names of the tensors of the model that a stage makes."""
    nodes = (node for node in stage.step.graph.nodes if stage.step.phase(node) == "forward")
    return {tensor_name(node) for node in nodes if node.op == "call_function"}


def test_a_stage_may_hand_on_only() -> None:
    graph, inputs = _exported("gpt")
    stage_of = {name: 2 * stage for name, stage in balance_stages(graph, 2).items()}
    check(graph, inputs, stage_of, 4)
    stages = cut(graph, stage_of, 4)
    for stage in (stages[1], stages[3]):
        assert not _computed(stage)
        assert not list(stage.module.parameters())
    assert [value.name for value in stages[1].passed] == [value.name for value in stages[1].received]


def test_models_without_numbers_are_cut() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    graph = capture_microbatch(module, (torch.empty(3, 4, device="meta"),), {})
    for stage in cut(graph, balance_stages(graph, 2), 2):
        assert all(parameter.is_meta for parameter in stage.module.parameters())
        assert all(like.is_meta for like in stage.returned)


def test_what_has_no_gradient_is_computed_again() -> None:
    graph, inputs = _exported("hf_llama")
    stage_of = balance_stages(graph, 3)
    plain = cut(graph, stage_of, 3)
    masks = [value.name for value in plain[1].received if not value.like.requires_grad]
    recompute = dict.fromkeys(masks, (1, 2))
    check(graph, inputs, stage_of, 3, recompute=recompute)
    again = cut(graph, stage_of, 3, recompute)
    assert not {value.name for stage in again[1:] for value in stage.received} & set(masks)
    assert len(again[1].received) < len(plain[1].received)
    assert _computed(again[1]) > _computed(plain[1])


def test_what_is_computed_again_is_handed_on() -> None:
    graph, inputs = _exported("hf_llama")
    stage_of = balance_stages(graph, 3)
    plain = cut(graph, stage_of, 3)
    mask = next(value.name for value in plain[2].received if not value.like.requires_grad)
    check(graph, inputs, stage_of, 3, recompute={mask: [1]})
    _, second, third = cut(graph, stage_of, 3, {mask: [1]})
    assert mask in _computed(second)
    assert mask not in {value.name for value in second.received}
    assert mask in {value.name for value in third.received}


def _refused(stage_of: dict[str, int], stages: int, said: str, name: str = "gpt", **options: Any) -> None:
    with pytest.raises(PlanError, match=said):
        cut(_exported(name)[0], stage_of, stages, **options)


def test_cuts_that_are_none_are_refused() -> None:
    graph, _ = _exported("gpt")
    first, *_, last = (node.name for node in graph.operators)
    good = balance_stages(graph, 2)
    _refused({name: good[name] for name in good if name != first}, 2, f"1 of .* have no stage, such as {first}")
    _refused({**good, "other": 0}, 2, "stage_of names other")
    _refused({**good, last: 2}, 2, f"{last} is on stage 2: with stages=2 there are 0 to 1")
    _refused(good, 1000, "stages=1000: Gpt has .* operators")
    _refused(good, 0, "stages=0")
    back = dict.fromkeys(good, 0) | {"linear": 1}
    _refused(back, 2, "view is on stage 0 and takes the result of linear on stage 1")
    _refused(dict.fromkeys(good, 1), 2, r"nothing goes from stage 0 \(0 operators\) to stage 1")


def test_changes_in_place_are_parted() -> None:
    graph, inputs = _exported("resnet18")
    position = [each.name for each in graph.operators].index("relu_")
    check(graph, inputs, {each.name: int(place >= position) for place, each in enumerate(graph.operators)}, 2)


def test_what_must_not_be_computed_again_is_refused() -> None:
    graph, _ = _exported("gpt")
    stage_of = balance_stages(graph, 2)
    _refused(stage_of, 2, "recompute names other", recompute={"other": [1]})
    stage_of = dict.fromkeys(stage_of, 1) | {"embedding": 0, "arange": 0, "embedding_1": 0}
    said = "stage 1 computes embedding_1 anew, but it depends on parameter positions.weight"
    _refused(stage_of, 2, said, recompute={"embedding_1": [1]})


class _Balanced(nn.Module):
    """An auxiliary loss made early, as that which balances experts is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        extra = y.square().mean()
        return self.second(y.tanh()).sum() + 0.1 * extra


def test_scalars_are_handed_on() -> None:
    with models.common.fixed_seed(torch.float64, 0):
        graph, inputs = capture_microbatch(_Balanced(), (), {"x": torch.randn(3, 4)}), {"x": torch.randn(3, 4)}
    stage_of = {node.name: int(node.name not in ("linear", "square", "mean")) for node in graph.operators}
    check(graph, inputs, stage_of, 2)
    first, _ = cut(graph, stage_of, 2)
    assert [tuple(value.like.shape) for value in first.passed] == [(3, 4), ()]
    assert len(first.step.tangent_outputs) == 2


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        filled = torch.zeros_like(x).fill_(2.0)
        return (self.linear(x) + noise * 2 + filled.exp()).sum()


def test_random_numbers_are_not_repeated() -> None:
    graph = capture_microbatch(_Noisy(), (torch.randn(3, 4),), {})
    stage_of = {each.name: int(each.name.startswith(("add", "sum"))) for each in graph.operators}
    with pytest.raises(PlanError, match="is made from rand_like, which may draw random"):
        cut(graph, stage_of, 2, {"mul": [1]})
    # A change in place of what `forward` makes is none in the step.
    assert len(cut(graph, stage_of, 2, {"exp": [1]})[1].received) < len(cut(graph, stage_of, 2)[1].received)


class _Averaged(nn.Module):
    """Sets buffers of submodules, one of them to what another one was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("before", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.before
        self.before, self.mean = self.mean, 0.5 * self.mean + y.detach().mean(0)
        return y - self.mean


class _AveragedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Averaged(), _Averaged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def test_stages_set_the_buffers_that_the_model_sets() -> None:
    module, x = _AveragedTwice(), torch.randn(3, 4, dtype=torch.float64)
    graph = capture_microbatch(module, (), {"x": x})
    paths = {each.name: graph.joint.module_path(each.nodes[0]) for each in graph.operators}
    stages = settle_stages(graph, {name: int("first" not in path) for name, path in paths.items()})
    for _ in range(2):
        check(graph, {"x": x}, stages, 2)
    changed = [
        {output.name for output in stage.step.outputs if output.kind == "mutation"} for stage in cut(graph, stages, 2)
    ]
    assert changed == [{"first.mean", "first.before"}, {"second.mean", "second.before"}]


class _Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.first(batch["x"].clone()).tanh()
        batch["x"].mul_(2.0)
        return self.second(hidden).square().mean()


def test_a_changed_input_has_the_name_of_the_argument() -> None:
    step = capture_microbatch(_Writing(), (), {"batch": {"x": torch.randn(3, 4)}})
    (group,) = step.together
    assert group == ("clone", "mul_")
    stage_of = {each.name: int(each.name not in (*group, "linear", "tanh")) for each in step.operators}
    first, second = cut(step, stage_of, 2)
    (keyword,) = (keyword for keyword, _ in first.inputs.values())
    assert [output.name for output in first.step.outputs if output.kind == "mutation"] == [keyword]
    assert not second.inputs


class _Odd(nn.Module):
    """Two layers, with something odd between them and in what is returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        match self.kind:
            case "view of what was changed":
                hidden.relu_()
                view = hidden.view(-1)
                return self.second(hidden).square().sum() + view.sum(), view, hidden.t()
            case "element set in a loop":
                hidden = hidden.clone()
                for place in range(2):
                    hidden[:, place] = hidden[:, place] * 2
                return self.second(hidden).square().sum(), hidden[:, 1]
            case "returned twice":
                return self.second(hidden).square().sum(), hidden, hidden, self.first.weight
            case "expanded and turned":
                turned = hidden.mean(1, keepdim=True).expand(4, 4).t()
                return self.second(turned.t().tanh()).sum(), turned
            case "turned and read twice":
                turned = hidden.t()
                return (self.second(turned.t().tanh()).tanh() @ turned).square().sum()
        raise AssertionError(self.kind)


@pytest.mark.parametrize(
    "kind",
    [
        "view of what was changed",
        "element set in a loop",
        "returned twice",
        "expanded and turned",
        "turned and read twice",
    ],
)
def test_odd_steps_are_cut_anywhere(kind: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 4, dtype=torch.float64)}
    step = capture_microbatch(_Odd(kind), (), inputs)
    count = len(step.operators)
    for stages in (2, 3):
        for first in range(1, count):
            places = [0 if place < first else min(place - first + 1, stages - 1) for place in range(count)]
            stage_of = {each.name: stage for each, stage in zip(step.operators, places, strict=True)}
            stage_of = settle_stages(step, stage_of)
            if len({*stage_of.values()}) == stages:
                check(step, inputs, stage_of, stages)
