"""Calls of a forward graph that one stage must have together: they share results, or memory changed in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

_RUNNING_STATISTICS = ("batch_norm", "instance_norm")
"""Operators that in training change their operands 3 and 4 in place, though their schemas do not say so."""

Owners = Mapping[fx.Node, fx.Node]
"""For every node, the one in whose memory its tensor lies."""


def last_changes(calls: Sequence[fx.Node], owners: Owners) -> dict[fx.Node, int]:
    """The nodes whose memory some call changes in place, and the position of the last call that does."""
    return {owners[operand]: place for place, call in enumerate(calls) for operand in _written(call)}


def inseparable(calls: Sequence[fx.Node], owners: Owners) -> Iterator[tuple[int, int]]:
    """Pairs of positions that one stage must have, the earlier first.

    A result that is no tensor goes with its readers. What has no result goes with the call that it watches, and what
    nothing reads and that reads no call, such as a count of batches, with the call behind it. All that makes or reads
    memory up to its last change in place goes together, and all that touches a changed buffer: the next step reads it.
    """
    position = {call: place for place, call in enumerate(calls)}
    for call, place in position.items():
        value = call.meta.get("val")
        if not isinstance(value, torch.Tensor):
            yield from ((place, position[user]) for user in call.users if user in position)
        makers = [position[source] for source in call.all_input_nodes if source in position]
        if value is None and not call.users and makers:
            yield max(makers), place
        if not makers and not call.users and len(calls) > 1:
            yield min(place, len(calls) - 2), min(place, len(calls) - 2) + 1
    last = last_changes(calls, owners)
    touching: dict[fx.Node, list[int]] = {owner: [] for owner in last}
    for call, place in position.items():
        for owner in {owners[one] for one in (call, *call.all_input_nodes)} & touching.keys():
            if owner.op == "placeholder" or place <= last[owner]:
                touching[owner].append(place)
    for places in touching.values():
        yield from pairwise(places)


def _written(call: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call changes in place."""
    name = getattr(getattr(call.target, "overloadpacket", None), "__name__", "")
    if name in _RUNNING_STATISTICS and call.args[5] is True:
        yield from (operand for operand in call.args[3:5] if isinstance(operand, fx.Node))
    schema = getattr(call.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = call.args[place] if place < len(call.args) else call.kwargs.get(argument.name)
            yield from (one for one in _listed(value) if isinstance(one, fx.Node))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
