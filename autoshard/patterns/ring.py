"""Rings: every rank of a mesh axis hands a tensor on to the next one, and all ranks run one program.

`shift` is an operator of its own because the functional exchange of torch takes the split sizes of one rank, which a
program for all ranks can not hold. It is lowered to that exchange where it runs: all rows go to one rank and come from
one rank, which backends send from point to point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.patterns._torch import LocalTensorMode, rank_and_size
from autoshard.specs.emitter import collectives

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("shift(Tensor input, int steps, str group) -> Tensor")

shift = torch.ops.autoshard.shift.default
"""`shift(input, steps, group)`: what the rank `steps` places before this one in the group has, round the end.

The result has to be awaited (`collectives.wait_tensor`) as that of any functional collective. `input` is contiguous,
has a dim at least, and one shape on all ranks.
"""


def split_sizes(rows: int, steps: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows that a rank of a ring receives from every rank, and those that it sends to every rank."""
    received, sent = [0] * size, [0] * size
    received[(rank - steps) % size] = rows
    sent[(rank + steps) % size] = rows
    return received, sent


def lower_shifts(graph: fx.Graph) -> None:
    """Replace every `shift` by the exchange that this rank makes.

    A compiler may use the memory of a tensor again that nobody seems to read any more; of torch's own collectives it
    knows that they read it until they are awaited.
    """
    for node in graph.find_nodes(op="call_function", target=shift):
        value, steps, group = node.args
        assert isinstance(value, fx.Node)
        with graph.inserting_before(node):
            rows: Any = graph.call_function(torch.ops.aten.sym_size.int, (value, 0))  # another one in other calls
        rows.meta["val"] = value.meta["val"].shape[0]
        sizes = split_sizes(rows, steps, *rank_and_size(group))
        node.target, node.args = collectives.all_to_all_single.default, (value, *sizes, group)


def shift_axes(sizes: Sequence[int]) -> list[int]:
    """Rings within rings: the axis to shift along at every step, so that each rank meets what each other one held.

    Args:
        sizes: of the axes, outermost first.

    Returns:
        As many axes as there are ranks, less one. The innermost axis goes round but for one step, then the next one
        takes one step, and so on.
    """
    inner = [math.prod(sizes[axis:]) for axis in range(len(sizes))]
    return [
        next(axis for axis in reversed(range(len(sizes))) if step % inner[axis]) for step in range(1, math.prod(sizes))
    ]


def _shift(value: Tensor, steps: int, group: str) -> Tensor:
    sizes = split_sizes(value.shape[0], steps, *rank_and_size(group))
    return collectives.all_to_all_single(value, *sizes, group)


def _shift_on_all_ranks(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
    """One process holds all ranks, and torch knows its own collectives there: all have everything, and pick theirs."""
    value, steps, group = args
    rows, (_, size) = value.shape[0], rank_and_size(group)
    with LocalTensorMode(mode.ranks):
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(value, size, group))
        wanted = gathered.unflatten(0, (size, rows)).roll(steps, 0).flatten(0, 1)  # in the order of who wants it
        copies = collectives.wait_tensor(collectives.all_to_all_single(wanted, [rows] * size, [rows] * size, group))
        return copies[:rows].clone()


_library.impl("shift", _shift, "CompositeExplicitAutograd")
torch.library.register_fake("autoshard::shift", lambda value, steps, group: torch.empty_like(value), lib=_library)
torch.library.register_torch_dispatch("autoshard::shift", LocalTensorMode, _shift_on_all_ranks, lib=_library)
