"""Faults of the library, one for each area of the self-check: contexts in which a process has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture import describe
from autoshard.operators.attention import attention_operator
from autoshard.pipeline.run.stage_runtime import PipelineRuntime
from autoshard.program import split
from autoshard.runtime.step import Ranks
from autoshard.specs.emitter import collectives

_reachable, _choose, _seed, _train = (
    attention_operator.drop_unreachable_keys,
    attention_operator.choose_kernel,
    Ranks.seed,
    PipelineRuntime.train,
)


class SkipReductions(TorchDispatchMode):
    """While active, reductions leave out what the other ranks have: a local program forgets them, or a gradient."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is collectives.all_reduce.default:
            return args[0].clone()
        if func is collectives.reduce_scatter_tensor.default:
            return args[0].chunk(dist.get_world_size())[dist.get_rank()].clone()
        return func(*args, **(kwargs or {}))


def another_graph() -> Any:
    """The last rank captures another graph."""

    def fingerprint(*args: Any) -> str:
        return str(dist.get_rank()) * 64

    return mock.patch.object(describe, "fingerprint", fingerprint)


def no_causal_limit() -> Any:
    """Queries attend to keys behind them."""
    return mock.patch.object(
        attention_operator, "drop_unreachable_keys", lambda call, start: _reachable(replace(call, causal=False), start)
    )


def another_group() -> Any:
    """Query heads attend to the key heads of another group."""
    return mock.patch.object(
        attention_operator, "choose_kernel", lambda call: _choose(replace(call, key=call.key.roll(1, 2)))
    )


def no_mask() -> Any:
    """The mask is forgotten."""
    return mock.patch.object(attention_operator, "choose_kernel", lambda call: _choose(replace(call, mask=None)))


def unequal_seeds() -> Any:
    """Every rank draws from a seed of its own."""
    return mock.patch.object(Ranks, "seed", lambda self, draws: _seed(self, draws) + dist.get_rank())


def lost_microbatch() -> Any:
    """The first microbatch is run in the place of the last."""

    def train(self: Any, microbatches: Any) -> Any:
        return _train(self, [*microbatches[:-1], microbatches[0]])

    return mock.patch.object(PipelineRuntime, "train", train)


def no_checkpoint() -> Any:
    """Nothing is loaded."""
    return mock.patch.object(state_dict_loader, "load", return_value=None)


def wrong_compiler() -> Any:
    """Compiled halves give results that are too large."""

    def compile_graph(graph: torch.fx.GraphModule, **options: Any) -> Callable[..., Any]:
        return lambda *args: [1.5 * each if each.is_floating_point() else each for each in graph(*args)]

    return mock.patch.object(split, "compile_graph", compile_graph)


FAULTS: dict[str, Callable[[], Any]] = {
    "one graph on all ranks": another_graph,
    "plan made on meta": another_graph,
    "attention, causal": no_causal_limit,
    "attention, grouped": another_group,
    "attention, masked": no_mask,
    "attention, odd heads": SkipReductions,
    "norms": SkipReductions,
    "convolutions, batch norm": SkipReductions,
    "LSTM": SkipReductions,
    "mixture of experts": SkipReductions,
    "dropout of replicas": unequal_seeds,
    "pipeline": lost_microbatch,
    "checkpoint": no_checkpoint,
    "compiled": wrong_compiler,
}
"""By the check that has to find it."""
