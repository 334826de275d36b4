"""Parameter groups of a pipeline's optimizer in `torch.distributed.checkpoint`: with the names of all ranks.

A checkpoint has one list of groups, which contain the names of their parameters. A pipeline rank only knows its own:
the file would have the names of one rank, and the others would find no group for theirs when they load.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autoshard.errors import InputError
from autoshard.pipeline import _torch
from autoshard.runtime.checkpoint import checkpointable


class _SharedGroup(dict[str, Any]):
    """A group that adds the names of other ranks when torch replaces numbers by names.

    Args:
        group: a group of `Optimizer.state_dict`.
        elsewhere: names of the parameters that only other ranks have in this group.
    """

    def __init__(self, group: dict[str, Any], elsewhere: list[str]) -> None:
        super().__init__(group)
        self._elsewhere = elsewhere

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            # Only once: later assignments by users are not changed.
            value, self._elsewhere = [*value, *self._elsewhere], []
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        # Files and copies contain a plain dictionary.
        return dict, (dict(self),)


def prepare_checkpoints(pipeline: nn.Module, group: dist.ProcessGroup, optimizer: Optimizer) -> None:
    """Make checkpoints of a pipeline's optimizer correct: strided shards, and groups with the names of all ranks.

    Args:
        pipeline: the stages of this rank.
        group: the process group along the pipeline axis.
        optimizer: an optimizer of the parameters of `pipeline`.
    """
    checkpointable(optimizer)
    watched = weakref.ref(pipeline)

    def after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        module = watched()
        if module is not None and _torch.names_optimizer_groups():
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            own = [[names[id(one)] for one in held["params"] if id(one) in names] for held in optimizer.param_groups]
            state_dict["param_groups"] = _with_other_ranks(state_dict["param_groups"], own, group)

    optimizer.register_state_dict_post_hook(after_state_dict)


def _with_other_ranks(
    groups: list[dict[str, Any]], own: list[list[str]], group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return the groups of this rank with the names of all ranks; `own` are this rank's."""
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, [(_options(held), names) for held, names in zip(groups, own, strict=True)], group)
    if any(len(rank) != len(groups) for rank in ranks):
        raise InputError(
            "the optimizers of a pipeline's ranks have different numbers of parameter groups: "
            f"{', '.join(str(len(rank)) for rank in ranks)} by stage. A checkpoint has one list of groups. {_REMEDY}"
        )
    shared: list[dict[str, Any]] = []
    for index, held in enumerate(groups):
        options, names = zip(*(rank[index] for rank in ranks), strict=True)
        if differing := next((one for one in options if one != options[0]), None):
            keys = sorted(key for key in {*options[0], *differing} if options[0].get(key) != differing.get(key))
            raise InputError(
                f"parameter group {index} differs between the ranks of a pipeline in {', '.join(keys)}, as "
                f"{options[0].get(keys[0])} and {differing.get(keys[0])}. A checkpoint has one list of groups. "
                + _REMEDY
            )
        everywhere = dict.fromkeys(name for part in names for name in part)
        shared.append(_SharedGroup(held, [name for name in everywhere if name not in own[index]]))
    return shared


_REMEDY = (
    "Make groups alike on all ranks, empty ones included, or save and load with "
    "options=StateDictOptions(flatten_optimizer_state_dict=True), which keeps the options of each parameter."
)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options, without its parameters, in comparable form."""
    return {key: str(value) for key, value in group.items() if key != "params"}
