"""torchtitan's configurations of llama3, deepseek_v3 and qwen3, with plans instead of its own parallelism.

The functions are attributes of this module, as in a torchtitan `config_registry`; `--module
autoshard.integrations.torchtitan` makes torchtitan read it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Unpack

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from autoshard.errors import PlanError
from autoshard.integrations.torchtitan.parallelize import parallelize
from autoshard.names import suggestion
from autoshard.options import OptionKeywords
from autoshard.plans.sharding_plan import ShardingPlan

MODELS = ("llama3", "deepseek_v3", "qwen3")


def model_spec(spec: ModelSpec, *, plan: ShardingPlan | None = None, **options: Unpack[OptionKeywords]) -> ModelSpec:
    """Return a copy of a torchtitan model that autoshard plans, instead of torchtitan parallelising it.

    Args:
        spec: the model, such as `torchtitan.models.llama3.model_registry("8B")`. It is not changed.
        plan, **options: as for `parallelize`.

    Returns:
        The model with `parallelize` as its `parallelize_fn`, and no pipelines.
    """
    function = functools.partial(parallelize, plan=plan, **options)
    return dataclasses.replace(spec, parallelize_fn=function, pipelining_fn=None)


def with_autoshard(
    config: Trainer.Config, *, plan: ShardingPlan | None = None, **options: Unpack[OptionKeywords]
) -> Trainer.Config:
    """Return a copy of a torchtitan configuration whose model is planned.

    It has the loss of a `ChunkedLossWrapper` without the chunks, which would call the model's head outside the model,
    and no CUDA graphs.

    Args:
        config: the configuration, such as `torchtitan.models.llama3.config_registry.llama3_8b()`. It is not changed.
        plan, **options: as for `parallelize`.

    Raises:
        PlanError: the configuration has no model.
    """
    if config.model_spec is None:
        raise PlanError("the configuration has no model_spec: build it by a function of torchtitan's config registry.")
    return dataclasses.replace(
        config,
        model_spec=model_spec(config.model_spec, plan=plan, **options),
        loss=config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss,
        training=dataclasses.replace(config.training, disable_cuda_graphs=True),
    )


@functools.cache
def _config_functions() -> dict[str, Callable[[], Trainer.Config]]:
    """Return torchtitan's configuration functions by name, each with plans."""
    found: dict[str, Callable[[], Trainer.Config]] = {}
    for model in MODELS:
        module = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            # Others are helpers or imports.
            if function.__module__ == module.__name__ and not inspect.signature(function).parameters:
                found[name] = functools.partial(_plan_config, function)
    return found


def _plan_config(function: Callable[[], Trainer.Config]) -> Trainer.Config:
    return with_autoshard(function())


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    functions = _config_functions()
    if name not in functions:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {suggestion(name, sorted(functions))}")
    return functions[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_config_functions()})
