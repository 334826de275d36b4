"""Operators of local programs that exchange tensors among ranks, whether a process holds one rank or all of them.

`define` makes operators with collectives inside. A loop that exchanges something at every step would emit many graph
nodes; instead it is one operator, defined by a program on tensors.

`shift` passes a tensor along a ring, and `exchange` sends as many rows as the data says. They are operators because
torch's functional all-to-all takes the split sizes of one rank, which a program for all ranks cannot contain.
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
        program: its program on tensors, which returns new ones.
        shapes: returns the results for fake arguments.
        on_all_ranks: the torch dispatch rule `(mode, op, types, args, kwargs)` for a process that holds all ranks; by
            default the program is run for every rank.
    """
    op: OpOverload = operator_library.define(schema, program, shapes)
    if on_all_ranks is not None:
        operator_library.define_dispatch(op, LocalTensorMode, on_all_ranks)
    return op


# Collectives inside.


CollectiveRunner = Callable[..., Tensor]
"""Runs a functional collective and waits for its result: `(op, value, *args)`."""


def define(schema: str, program: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    """Define an operator of the `autoshard` namespace with collectives inside.

    Args:
        schema, shapes: as in `define_operator`.
        program: its program on one rank: takes the arguments and the keyword `collective`, which runs collectives. It
            returns new tensors, and issues the same collectives on all ranks.
    """

    def on_all_ranks(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # One call for all ranks: calls per rank would each wait for the others.
        with LocalTensorMode(mode.ranks):
            return program(*args, **kwargs or {}, collective=_run)

    op = define_operator(schema, functools.partial(program, collective=_run), shapes, on_all_ranks)
    _programs[op] = program
    return op


def program_of(op: Any) -> Callable[..., Any] | None:
    """The program of an operator with collectives inside; None for any other."""
    return _programs.get(op)


def _run(op: OpOverload, value: Tensor, *args: Any) -> Tensor:
    return collectives.wait_tensor(op(value, *args))


# Rings.


def split_sizes(rows: int, steps: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """The numbers of rows that a rank of a ring receives from every rank and sends to every rank."""
    received, sent = [0] * size, [0] * size
    received[(rank - steps) % size] = rows
    sent[(rank + steps) % size] = rows
    return received, sent


def _shift(value: Tensor, steps: int, group: str) -> Tensor:
    """All rows go to one rank and come from one rank, which backends send point to point."""
    sizes = split_sizes(value.shape[0], steps, *rank_and_size(group))
    return collectives.all_to_all_single(value, *sizes, group)


def _shift_on_all_ranks(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
    """By torch's own collectives, which `LocalTensor` supports: gather everything, and pick each rank's part."""
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
"""`shift(input, steps, group)`: the input of the rank `steps` places before this one in the group, cyclically.

The result has to be awaited (`collectives.wait_tensor`), as that of any functional collective. `input` is contiguous,
has at least one dim, and has the same shape on all ranks.
"""


def lower_shifts(graph: fx.Graph) -> None:
    """Replace every `shift` by this rank's all-to-all."""
    # A compiler may reuse the memory of an operand that is read no more. It knows that torch's own collectives read
    # theirs until they are awaited.
    for node in graph.find_nodes(op="call_function", target=shift):
        value, steps, group = node.args
        assert isinstance(value, fx.Node)
        with graph.inserting_before(node):
            rows: Any = graph.call_function(torch.ops.aten.sym_size.int, (value, 0))  # differs between calls
        rows.meta["val"] = value.meta["val"].shape[0]
        sizes = split_sizes(rows, steps, *rank_and_size(group))
        node.target, node.args = collectives.all_to_all_single.default, (value, *sizes, group)


def shift_axes(sizes: Sequence[int]) -> list[int]:
    """Nested rings: the axis to shift along at every step, so that every rank sees the tensors of all others.

    Args:
        sizes: of the axes, outermost first.

    Returns:
        One axis for each of the ranks but one. The innermost axis takes all steps of its ring but the last, then the
        next axis takes one step, and so on.
    """
    inner = [math.prod(sizes[axis:]) for axis in range(len(sizes))]
    return [
        next(axis for axis in reversed(range(len(sizes))) if step % inner[axis]) for step in range(1, math.prod(sizes))
    ]


# Rows by data.


def exchange_rows(rows: Tensor, splits: Tensor, ranks: int, back: bool, group_name: str) -> Tensor:
    """Send every rank of a line the rows of its groups; or send received rows back to their sources.

    Args:
        rows: `[S, ...]`, sorted by destination rank.
        splits: `[2, groups]`: the rows of every group that this rank sends; and the rows that it receives, for every
            source rank one number per group of this rank. They are read on the host, which waits for them.
        ranks: number of ranks on the line.
        back: True if the rows are sent back.
        group_name: name of the line's process group.

    Returns:
        The received rows, sorted by source rank.
    """
    # The host waits here: the call takes the split sizes as numbers.
    sent, received = splits.view(2, ranks, -1).sum(2).tolist()
    if back:
        sent, received = received, sent
    pending = collectives.all_to_all_single(rows.contiguous(), received, sent, group_name)
    arrived: Tensor = collectives.wait_tensor(pending)
    return arrived


def _arrivals(received: Tensor, ranks: int, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts received rows from by rank to by group, and the end of each group (int32).

    Args:
        received: `[ranks * groups]`: the number of rows of every group of this rank that come from every rank.
        ranks: number of ranks on the line.
        rows: the number of received rows if all ranks get equally many, as plans assume.
    """
    counts = received.view(ranks, -1)
    groups = torch.arange(counts.shape[1], device=received.device).repeat(ranks)
    return groups.repeat_interleave(received).argsort(stable=True), counts.sum(0).cumsum(0).to(torch.int32)


define_operator(
    "exchange(Tensor rows, Tensor splits, int ranks, bool back, str group_name) -> Tensor",
    exchange_rows,
    lambda rows, *_: rows.new_empty(rows.shape),
    # One call for all ranks: calls per rank would each wait for the others.
    lambda mode, op, types, args=(), kwargs=None: exchange_rows(*args, **kwargs or {}),
)
define_operator(
    "arrivals(Tensor received, int ranks, int rows) -> (Tensor, Tensor)",
    _arrivals,
    # The number of rows that plans assume; the real number depends on data.
    lambda received, ranks, rows: (
        received.new_empty(rows),
        received.new_empty(received.shape[0] // ranks, dtype=torch.int32),
    ),
)
