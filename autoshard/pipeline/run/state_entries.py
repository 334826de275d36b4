"""The parameters and buffers of several stages as those of one module, under the names that they have in the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from autoshard.errors import PipelineError

StateEntry = tuple[dict[str, Any], dict[str, Any], str]
"""A table of a stage, the table of the whole that has the same parameter or buffer, and its key in both."""


def register_stage_state(whole: nn.Module, stages: Sequence[nn.Module], constants: Collection[str]) -> None:
    """Register what stages hold in `whole`, under the same paths.

    Args:
        whole: has none of it yet.
        stages: modules whose parameters and buffers have the names of the model.
        constants: names of buffers of stages that are no buffers of the model.

    Raises:
        PipelineError: a submodule, parameter or buffer of the model has the name of something that `whole` has itself.
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
    """Where the parameters and buffers of a stage are in the whole, which has them all.

    Raises:
        PipelineError: the whole has not.
    """
    found: list[StateEntry] = []
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
        found.append((getattr(_holder(stage, name), kind), table, key))
    return found


def relink_entries(found: Sequence[StateEntry]) -> None:
    """Let a stage hold what the whole holds: loading and materializing may have put other objects there."""
    for stage, whole, key in found:
        stage[key] = whole[key]


def _holder(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _owner(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule of the whole that is to hold something, made where it is not there yet, and the key in it."""
    *path, key = name.split(".")
    first = (*path, key)[0]
    taken = (*whole._modules, *whole._parameters, *whole._buffers)
    if hasattr(whole, first) and first not in taken:
        raise PipelineError(
            f"the model has something called {first!r}, and so has {type(whole).__name__}, which stands for it on a "
            f"pipeline: give the model's another name."
        )
    owner = whole
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner, key
