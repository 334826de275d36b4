"""Dropout of attention weights in planned models: one draw for all that reads it, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.operators.attention.attention_operator import operators
from autoshard.specs.axes import MeshShape
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh
from tests.training import captured_as, fast_links, held_by_ranks, loss_of, outputs_of

RATE = 0.25
STEP = 1e-5


def build(name: str) -> models.Model:
    with Float64Mode():
        return models.ZOO[name](dtype=torch.float64, layers=1, dropout=RATE)


@cache
def graph_of(name: str) -> JointGraph:
    module, inputs = build(name)
    with Float64Mode():
        return capture(module, (), inputs)


def loss(module: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss of a step of which the seed is always the same."""
    torch.manual_seed(3)
    return loss_of(outputs_of(module(**inputs)))


def the_number(tensor: torch.Tensor) -> float:
    """A number that all ranks agree on."""
    first, *others = held_by_ranks(tensor.detach())
    assert all(torch.equal(first, other) for other in others)
    return float(first)


def gradients_disagree(module: nn.Module, inputs: Mapping[str, Any]) -> float:
    """How far gradients are from differences of the loss, which drops the same weights at all points."""
    parameters = list(module.parameters())
    loss(module, inputs).backward()
    directions = [parameter.grad.detach().clone() for parameter in parameters if parameter.grad is not None]
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    expected = sum(the_number(_whole((each * each).sum())) for each in directions)
    around = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, direction in zip(moved, directions, strict=True):
                parameter.add_(direction, alpha=sign * STEP)
        around.append(the_number(loss(module, inputs)))
        with torch.no_grad():
            for parameter, direction in zip(moved, directions, strict=True):
                parameter.sub_(direction, alpha=sign * STEP)
    found = (around[0] - around[1]) / (2 * STEP)
    return abs(found - expected) / abs(expected)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2", "hf_bert"])
def test_attention_with_dropout_is_captured_as_one_operator(name: str) -> None:
    graph = graph_of(name)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(operators.attention.default) == 1
    assert targets.count(operators.attention_seed.default) == 1
    (backward,) = graph.graph.find_nodes(op="call_function", target=operators.attention_backward.default)
    assert backward.args[12] == RATE


@pytest.mark.parametrize(("name", "recompute"), [("gpt", "none"), ("hf_gpt2", "full")])
def test_planned_gradients_are_those_of_what_was_dropped(name: str, recompute: Literal["none", "full"]) -> None:
    module, inputs = build(name)
    with simulated_mesh(dp=2, tp=2) as mesh:
        with Float64Mode(), captured_as(graph_of(name)):
            search = autoshard.Search(effort="fast")
            autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=search, recompute=recompute)
        with default_float64():
            assert gradients_disagree(module, inputs) < 1e-7


@pytest.mark.parametrize("seed", range(2))
def test_gradients_under_random_plans(seed: int) -> None:
    module, inputs = build("gpt")
    graph = graph_of("gpt")
    plan = random_plan(graph, MeshShape.of({"a": 2, "b": 2}), seed, recompute=seed % 2)
    with simulated_mesh(a=2, b=2) as mesh:
        with Float64Mode(), captured_as(graph):
            autoshard.parallelize(module, mesh, (), inputs, plan=plan)
        with default_float64():
            assert gradients_disagree(module, inputs) < 1e-7
