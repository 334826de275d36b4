"""torchtitan's own trainer on two processes, planned, against the same trainer on one process without autoshard."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

pytest.importorskip("torchtitan")
pytest.importorskip("triton")  # which torchtitan imports, and torch's builds for CPUs do not bring

# torchtitan takes a machine without accelerators for one with CUDA, and asks the device for its memory.
_CPU = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("device_count", "is_available", "set_device", "synchronize")},
    current_device=lambda: 0,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
with (
    mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
    mock.patch("torch._utils._get_device_module", lambda kind: _CPU),
):
    import torchtitan.trainer
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.trainer import Trainer

import autoshard.integrations.torchtitan as integration
from autoshard.cluster.cluster import Cluster, Link
from autoshard.errors import PlanError
from tests import workers
from tests.workers import Workers

LENGTH, BATCH, STEPS = 16, 4, 3


def fast_links() -> Cluster:
    """CPUs with links so fast that the planner shards even tiny models, as in `tests.training`."""
    cluster, link = Cluster.preset("cpu"), Link(bandwidth=1e12, latency=1e-9)
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-9)
    return dataclasses.replace(cluster, inside=link, between=link, device=device)


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Documents(BaseDataLoader):
    """Tokens by chance, packed as documents of several lengths, with labels that do not count."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 0

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.vocabulary = config.vocabulary
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.total = dp_world_size * local_batch_size
        self.step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            text = torch.randint(0, self.vocabulary, (self.total, LENGTH + 1), generator=generator)
            lengths = torch.randint(3, LENGTH, (self.total, 1), generator=generator)
            places = torch.arange(LENGTH).expand(self.total, LENGTH)
            positions = torch.where(places < lengths, places, places - lengths)
            labels = text[:, 1:].masked_fill(places == lengths - 1, IGNORE_INDEX)
            yield {"input": text[self.rows, :-1], "positions": positions[self.rows]}, labels[self.rows]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Recorder(MetricsProcessor):
    """Keeps the losses and gradient norms that the trainer reports."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self.losses: list[tuple[float, float, float]] = []

    def log(self, step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
        self.losses.append((loss, largest, norm))


class DenseAttention(FlexAttention):
    """FlexAttention by a mask of all scores, since torch has no backward of its own on CPUs."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, scale: Any = None, **options: Any
    ) -> Any:
        q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
        mask = torch.nn.attention.flex_attention.create_mask(
            attention_masks.mask_mod, q.shape[0], 1, LENGTH, LENGTH, device="cpu"
        )
        gqa = options.get("enable_gqa", False)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)


class WideExperts(GroupedExperts):
    """Experts in float32: torchtitan's are in bfloat16 whatever the model is in."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Any, num_tokens_per_expert_E: Any) -> torch.Tensor:
        x, ends = x_RD, torch.cumsum(num_tokens_per_expert_E, 0, dtype=torch.int32)
        up, gate = (torch._grouped_mm(x, w.transpose(-2, -1), offs=ends) for w in (self.w1_EFD, self.w3_EFD))
        return torch._grouped_mm(torch.nn.functional.silu(up) * gate, self.w2_EDF.transpose(-2, -1), offs=ends)


def configuration(name: str, folder: str, *, reference: bool = False, **parallelism: Any) -> Trainer.Config:
    """One of torchtitan's configurations for tests, with two layers."""
    module, function = name.split(".")
    registry = __import__(f"torchtitan.models.{module}.config_registry", fromlist=[function])
    config = getattr(registry, function)()
    model = config.model_spec.model
    del model.layers[2:]
    for _, experts, owner, attribute in list(model.traverse(GroupedExperts.Config)):
        values = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
        setattr(owner, attribute, WideExperts.Config(**values | {"hidden_dim": 32}))
    if reference:
        for _, attention, owner, attribute in list(model.traverse(FlexAttention.Config)):
            setattr(owner, attribute, DenseAttention.Config())
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = Documents.Config(vocabulary=model.vocab_size)
    config.metrics = Recorder.Config(log_freq=1)
    config.validator.enable = False
    config.optimizer.implementation = "foreach"
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.activation_checkpoint = None
    config.dump_folder = folder
    config.training = dataclasses.replace(
        config.training,
        seq_len=LENGTH,
        local_batch_size=BATCH // (1 if reference else parallelism.get("data_parallel_shard_degree", 1)),
        global_batch_size=2 * BATCH,
        steps=STEPS,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.parallelism = dataclasses.replace(config.parallelism, **parallelism)
    config.debug.seed = 3
    config.debug.enable_structured_logging = False
    return integration.with_autoshard(config, cluster=fast_links()) if not reference else config


def train(config: Trainer.Config) -> tuple[list[tuple[float, float, float]], Trainer]:
    trainer = config.build()
    # torchtitan 0.3 sets the time limits of groups by a function that releases of torch up to 2.13 have not.
    with mock.patch.object(torch.distributed, "set_timeout", _set_pg_timeout, create=True):
        trainer.train()
    return trainer.metrics_processor.losses, trainer
