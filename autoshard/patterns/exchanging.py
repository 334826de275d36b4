"""Operators of local programs that exchange tensors among ranks, whether a process holds one rank or all of them.

`define` makes operators with collectives inside: a local program as a graph grows with every operator that it emits, so
where a loop exchanges something at every step, the loop is one operator, defined by a program on tensors.

`shift` hands a tensor on round a ring, and `exchange` sends as many rows as the data says. They are operators of their
own because the functional exchange of torch takes the split sizes of one rank, which a program for all ranks can not
hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard import operator_library
from autoshard.patterns._torch import LocalTensorMode, OpOverload, rank_and_size
from autoshard.specs.emitter import collectives

_programs: dict[OpOverload, Callable[..., Any]] = {}

exchange_ops = torch.ops.autoshard


def define_operator(
    schema: str,
    program: Callable[..., Any],
    shapes: Callable[..., Any],
    on_all_ranks: Callable[..., Any] | None = None,
) -> OpOverload:
    """Define an operator of the `autoshard` namespace.

    Args:
        schema: its name, arguments and results, as `torch.library.Library.define` takes them.
        program: its program on tensors, which makes new ones.
        shapes: the results on arguments without numbers.
        on_all_ranks: where one process holds all ranks: `(mode, op, types, args, kwargs)`, as a torch dispatch rule
            takes them; by default the program is run for every rank.
    """
    op: OpOverload = operator_library.define(schema, program, shapes)
    if on_all_ranks is not None:
        operator_library.define_dispatch(op, LocalTensorMode, on_all_ranks)
    return op


# Collectives inside.


CollectiveRunner = Callable[..., Tensor]
"""Runs a functional collective and waits for its result: `(op, value, *args)`."""


def define(schema: str, program: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    """Define an operator of the `autoshard` namespace that exchanges inside.

    Args:
        schema, shapes: as in `define_operator`.
        program: its program on one rank, on the arguments, and the keyword `collective`, by which it exchanges. It
            makes new tensors, and does the same on all ranks.
    """

    def on_all_ranks(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not one call for each rank, which could not meet, but one for all.
        with LocalTensorMode(mode.ranks):
            return program(*args, **kwargs or {}, collective=_run)

    op = define_operator(schema, functools.partial(program, collective=_run), shapes, on_all_ranks)
    _programs[op] = program
    return op


def program_of(op: Any) -> Callable[..., Any] | None:
    """The program of an operator that exchanges inside; None for any other."""
    return _programs.get(op)


def _run(op: OpOverload, value: Tensor, *args: Any) -> Tensor:
    return collectives.wait_tensor(op(value, *args))


# Rings.


def split_sizes(rows: int, steps: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows that a rank of a ring receives from every rank, and those that it sends to every rank."""
    received, sent = [0] * size, [0] * size
    received[(rank - steps) % size] = rows
    sent[(rank + steps) % size] = rows
    return received, sent


def _shift(value: Tensor, steps: int, group: str) -> Tensor:
    """All rows go to one rank and come from one rank, which backends send from point to point."""
    sizes = split_sizes(value.shape[0], steps, *rank_and_size(group))
    return collectives.all_to_all_single(value, *sizes, group)


def _shift_on_all_ranks(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
    """In torch's own collectives, which one process for all ranks knows: all have everything, and pick theirs."""
    value, steps, group = args
    rows, (_, size) = value.shape[0], rank_and_size(group)
    with LocalTensorMode(mode.ranks):
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(value, size, group))
        wanted = gathered.unflatten(0, (size, rows)).roll(steps, 0).flatten(0, 1)  # in the order of who wants it
        copies = collectives.wait_tensor(collectives.all_to_all_single(wanted, [rows] * size, [rows] * size, group))
        return copies[:rows].clone()


shift = define_operator(
    "shift(Tensor input, int steps, str group) -> Tensor",
    _shift,
    lambda value, steps, group: torch.empty_like(value),
    _shift_on_all_ranks,
)
"""`shift(input, steps, group)`: what the rank `steps` places before this one in the group has, round the end.

The result has to be awaited (`collectives.wait_tensor`) as that of any functional collective. `input` is contiguous,
has a dim at least, and one shape on all ranks.
"""


def lower_shifts(graph: fx.Graph) -> None:
    """Replace every `shift` by the exchange that this rank makes."""
    # A compiler may use the memory of a tensor again that nobody seems to read any more; of torch's own collectives it
    # knows that they read it until they are awaited.
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


# Rows by data.


def exchange_rows(rows: Tensor, splits: Tensor, ranks: int, back: bool, group_name: str) -> Tensor:
    """Send every rank of a line the rows of its groups; or send what has arrived back to where it came from.

    Args:
        rows: `[S, ...]`, sorted by the rank that they go to.
        splits: `[2, groups]`: rows of every group that this rank sends, and rows that have arrived, for every rank that
            sent them as many numbers as this rank has groups. They are read on the host: it waits for them.
        ranks: number of ranks on the line.
        back: True if the rows go back.
        group_name: name of the line's process group.

    Returns:
        The rows that arrive, sorted by the rank that they come from.
    """
    # The host waits here: the sizes of the exchange are numbers of its call.
    sent, received = splits.view(2, ranks, -1).sum(2).tolist()
    if back:
        sent, received = received, sent
    pending = collectives.all_to_all_single(rows.contiguous(), received, sent, group_name)
    arrived: Tensor = collectives.wait_tensor(pending)
    return arrived


def _arrivals(received: Tensor, ranks: int, rows: int) -> tuple[Tensor, Tensor]:
    """The order that sorts by group the rows that arrive sorted by rank, and where each group then ends (int32).

    Args:
        received: `[ranks * groups]`: how many rows of every group of this rank come from every rank.
        ranks: number of ranks on the line.
        rows: how many rows arrive where all ranks get equally many, which plans count on.
    """
    counts = received.view(ranks, -1)
    groups = torch.arange(counts.shape[1], device=received.device).repeat(ranks)
    return groups.repeat_interleave(received).argsort(stable=True), counts.sum(0).cumsum(0).to(torch.int32)


define_operator(
    "exchange(Tensor rows, Tensor splits, int ranks, bool back, str group_name) -> Tensor",
    exchange_rows,
    lambda rows, *_: rows.new_empty(rows.shape),
    # Not one call for each rank, which could not meet, but one for all.
    lambda mode, op, types, args=(), kwargs=None: exchange_rows(*args, **kwargs or {}),
)
define_operator(
    "arrivals(Tensor received, int ranks, int rows) -> (Tensor, Tensor)",
    _arrivals,
    # As many rows as plans count on: how many really arrive, only data tells.
    lambda received, ranks, rows: (
        received.new_empty(rows),
        received.new_empty(received.shape[0] // ranks, dtype=torch.int32),
    ),
)
