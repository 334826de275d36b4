"""Whole models that hold a unit: as planned on all ranks of a mesh in this process, against one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import autoshard
from autoshard.capture.joint import capture
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.strategy import WHOLE, describe, fits, offered_factors
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import training
from tests.runtime.meshes import simulated_mesh

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def build_seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A module in float64, with the same numbers each time."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), Float64Mode():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            return make().train()
        finally:
            torch.set_default_dtype(before)


def llama(**changed: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Hugging Face Llama of one layer, 8 heads over 2 of keys; `changed` goes to its configuration."""
    options: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": False,
    }
    config = transformers.LlamaConfig(**options | changed)
    module = build_seeded(lambda: transformers.LlamaForCausalLM(config))
    tokens = torch.randint(0, config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(1))
    return module, {"input_ids": tokens, "labels": tokens.clone()}


class Attention(nn.Module):
    """Causal self-attention of 8 heads over 2 of keys, which the operator repeats by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 64)
        self.key = nn.Linear(64, 16)
        self.value = nn.Linear(64, 16)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def attention_model() -> tuple[nn.Module, dict[str, Any]]:
    """`Attention` on sequences of 16."""
    return build_seeded(Attention), {
        "x": torch.randn(4, 16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    }


def plan_with(build: Build, mesh: Mapping[str, int], operator: str, factor: str, axis: int = -1) -> ShardingPlan:
    """The plan of a model, in which the operators whose name holds `operator` split `factor` on one axis.

    Those that have no such factor to offer stay as planned; at least one must have it.
    """
    plan = plan_of(build, mesh)
    module, inputs = build()
    with Float64Mode():
        rules = GraphRules(capture(module, (), inputs, devices=plan.mesh.size), plan.mesh)
    choices = dict(plan.decisions["choices"])
    texts = {}
    for node in rules.operators:
        names = [offered.name for offered in offered_factors(rules.rules[node])]
        if operator in str(rules.calls[node].op) and factor in names:
            changed = list(choices[node.name])
            changed[axis] = names.index(factor)
            if not fits(rules.rules[node], tuple(changed), plan.mesh):
                changed = [WHOLE] * len(changed)
                changed[axis] = names.index(factor)
            choices[node.name] = changed
            texts[node.name] = describe(rules.rules[node], tuple(changed), plan.mesh)
    assert texts, f"no {operator} has {factor}"
    decisions = tuple(replace(each, strategy=texts.get(each.node, each.strategy)) for each in plan.choices)
    return replace(plan, decisions=plan.decisions | {"choices": choices}, choices=decisions)


def plan_of(build: Build, mesh: Mapping[str, int], **options: Any) -> ShardingPlan:
    """The plan of a model for links so fast that small models are worth sharding."""
    module, inputs = build()
    with Float64Mode():
        return autoshard.plan(module, mesh, (), inputs, cluster=training.fast_links(), **options)


@contextlib.contextmanager
def _processes(**sizes: int) -> Iterator[DeviceMesh]:
    yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def worst_error(
    build: Build, mesh: Mapping[str, int], steps: int = 2, *, processes: bool = False, **options: Any
) -> float:
    """The largest relative difference of training on the mesh, as planned, to training on one device.

    Args:
        build: makes the module and its inputs, the same each time.
        mesh: axis sizes.
        steps: of the optimizer.
        processes: the ranks are processes, of which this is one, and not all in this one.
        options: of `parallelize`.
    """
    module, inputs = build()
    with Float64Mode():
        reference = training.train(module, inputs, steps)
    module, inputs = build()
    with _processes(**mesh) if processes else simulated_mesh(**mesh) as device_mesh:
        with Float64Mode():
            autoshard.parallelize(module, device_mesh, (), inputs, cluster=training.fast_links(), **options)
        with default_float64():
            trace = training.train(module, inputs, steps)
    return training.compare(trace, reference).worst
