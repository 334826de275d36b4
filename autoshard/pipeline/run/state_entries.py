"""The parameters and buffers of several stages as those of one module, under the names that they have in the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from autoshard.errors import PipelineError
from autoshard.pipeline.graph.stage_modules import owner_of

StateEntry = tuple[dict[str, Any], dict[str, Any], str]
"""The `_parameters` or `_buffers` of a module of a stage and of the whole, and the key of a tensor in both."""


def register_stage_state(whole: nn.Module, stages: Sequence[nn.Module], constants: Collection[str]) -> None:
    """Register the parameters and buffers of stages in `whole`, under the same paths.

    Args:
        whole: a module without any of them.
        stages: modules whose parameters and buffers have the names of the model.
        constants: names of buffers of stages that are no buffers of the model.

    Raises:
        PipelineError: a submodule, parameter or buffer of the model has the name of an attribute of `whole`.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            owner, key = _owner(whole, name)
            owner.register_parameter(key, parameter)
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            if name not in constants:
                owner, key = _owner(whole, name)
                owner.register_buffer(key, buffer, key not in _holder(stage, name)._non_persistent_buffers_set)


def state_entries(stage: nn.Module, whole: nn.Module, constants: Collection[str]) -> list[StateEntry]:
    """Return the entries of the parameters and buffers of a stage in the whole.

    Raises:
        PipelineError: the whole lacks one of them.
    """
    entries: list[StateEntry] = []
    names = [("_parameters", name) for name, _ in stage.named_parameters(remove_duplicate=False)]
    names += [("_buffers", name) for name, _ in stage.named_buffers(remove_duplicate=False) if name not in constants]
    for kind, name in names:
        key = name.rpartition(".")[2]
        try:
            table = getattr(_holder(whole, name), kind)
        except AttributeError:
            table = {}
        if key not in table:
            raise PipelineError(
                f"this call reads {name} on a stage whose rank does not hold it: the pipeline was made for "
                f"another one. Make it with an example of such a call."
            )
        entries.append((getattr(_holder(stage, name), kind), table, key))
    return entries


def relink_entries(entries: Sequence[StateEntry]) -> None:
    """Put the objects of the whole into the stages: loading and materializing may have replaced them."""
    for stage, whole, key in entries:
        stage[key] = whole[key]


def _holder(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _owner(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule of the whole for a name, creating it if necessary, and the key in it."""
    first = name.partition(".")[0]
    if hasattr(whole, first) and first not in (*whole._modules, *whole._parameters, *whole._buffers):
        raise PipelineError(
            f"the model has something called {first!r}, and so has {type(whole).__name__}, which stands for it on a "
            f"pipeline: give the model's another name."
        )
    return owner_of(whole, name)
