"""Flags of other tools: their names exist there, and torch runs the code."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.capture.joint import JointGraph, capture
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner.layouts.standard_layouts import StandardLayouts
from autoshard.specs.axes import MeshShape
from autoshard.tools.compare.flags import Job, fsdp2_code, megatron_flags, torchtitan_flags
from tests import models
from tests.releases import skip_unless_torchtitan_runs


@functools.cache
def step(name: str) -> tuple[JointGraph, dict[str, type[nn.Module]]]:
    module, inputs = models.ZOO["gshard"](batch=16) if name == "gshard" else models.hf_llama(batch=16)
    return capture(module, (), inputs), {path: type(part) for path, part in module.named_modules()}


def job(name: str, *, recomputed: Any = "none", **mesh: int) -> Job:
    graph, modules = step("gshard" if "EP" in name else "hf_llama")
    shape = MeshShape.of(mesh)
    layout = StandardLayouts(GraphRules(graph, shape), shape).make(name)
    layers = tuple(path for path in modules if path.startswith("model.layers.") and path.count(".") == 2)
    return Job(layout, shape, 16, recomputed, modules, layers)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def arguments(text: str) -> list[str]:
    """The arguments that a shell makes of a command."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def titan(name: str, *, recomputed: Any = "none", **mesh: int) -> Any:
    """The configuration that torchtitan reads from the flags of a layout."""
    manager = pytest.importorskip("torchtitan.config.manager").ConfigManager()
    flags = arguments(torchtitan_flags(job(name, recomputed=recomputed, **mesh)))
    skip_unless_torchtitan_runs()
    return manager.parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *flags])


def test_flags_of_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.13 has this function, which torchtitan imports, under a private name alone.
    monkeypatch.setattr(dist, "set_timeout", None, raising=False)
    config = titan("HSDP x TP+SP", recomputed="full", rep=2, dp=4, tp=2)
    found = config.parallelism
    assert (found.data_parallel_replicate_degree, found.data_parallel_shard_degree) == (2, 4)
    assert (found.tensor_parallel_degree, found.enable_sequence_parallel) == (2, True)
    assert found.fsdp_reshard_after_forward == "always"
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    plain = titan("DDP x TP", dp=2, tp=2)
    assert not plain.parallelism.enable_sequence_parallel
    assert plain.activation_checkpoint is None
    assert titan("FSDP2 whole", dp=2, tp=2).parallelism.fsdp_reshard_after_forward == "never"
    # Experts lie on ranks of data parallelism.
    experts = titan("FSDP2 x EP", dp=2, ep=2).parallelism
    assert (experts.data_parallel_shard_degree, experts.expert_parallel_degree) == (4, 2)


def test_flags_of_megatron() -> None:
    text = megatron_flags(job("HSDP x TP+SP", recomputed="full", rep=2, dp=4, tp=2))
    flags = dict(line.removesuffix(" \\").partition(" ")[::2] for line in text.splitlines())
    assert flags["--tensor-model-parallel-size"] == "2"
    assert flags["--sequence-parallel"] == ""
    assert (flags["--micro-batch-size"], flags["--global-batch-size"]) == ("2", "16")
    assert flags["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert flags["--num-distributed-optimizer-instances"] == "2"
    assert flags["--recompute-granularity"].startswith("full")
    assert "--recompute-granularity selective" in megatron_flags(job("DDP", recomputed="selective", dp=4))
    plain = megatron_flags(job("DDP", dp=4))
    assert "fsdp" not in plain
    assert "--sequence-parallel" not in plain
    assert megatron_flags(job("FSDP2 whole", dp=4)).startswith("# Shards are not gathered once")


@pytest.mark.parametrize("name", ["FSDP2 x TP+SP", "DDP x TP", "HSDP"])
def test_torch_runs_the_code(name: str, four_ranks: None) -> None:
    described = job(name, recomputed="full" if name == "HSDP" else "none", dp=2, tp=2)
    scope: dict[str, Any] = {"model": models.hf_llama()[0]}
    exec(fsdp2_code(described).replace('"cuda"', '"cpu"'), scope)
    parameters = dict(scope["model"].named_parameters())
    (up,) = (
        parameter for path, parameter in parameters.items() if path.endswith("mlp.up_proj.weight") and ".1." in path
    )
    assert any("checkpoint" in path for path in parameters) == (name == "HSDP")
    # `DistributedDataParallel` works with local tensors.
    local, whole = up.to_local() if isinstance(up, DTensor) else up, described.layout.tensor_parallel.shards
    assert local.numel() * {"DDP x TP": 2, "HSDP": 2, "FSDP2 x TP+SP": 4}[name] == 2 * models.HIDDEN**2
    assert bool(whole) == ("TP" in name)
