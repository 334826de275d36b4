"""Rows sent from rank to rank, as many as the data says: operators of local programs, not of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.patterns._torch import LocalTensorMode
from autoshard.specs.emitter import collectives

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("exchange(Tensor rows, Tensor splits, int ranks, bool back, str group_name) -> Tensor")
_library.define("arrivals(Tensor received, int ranks, int rows) -> (Tensor, Tensor)")

exchange_ops = torch.ops.autoshard


def exchange_rows(rows: Tensor, splits: Tensor, ranks: int, back: bool, group_name: str) -> Tensor:
    """Send every rank of a line the rows of its groups; or send what has arrived back to where it came from.

    Args:
        rows: `[S, ...]`, sorted by the rank that they go to.
        splits: `[2, groups]`: rows of every group that this rank sends, and rows that have arrived, for every rank that
            sent them as many numbers as this rank has groups. They are read on the host: it waits for them.
        ranks: number of ranks on the line.
        back: whether the rows go back.
        group_name: of the line's process group.

    Returns:
        The rows that arrive, sorted by the rank that they come from.
    """
    sent, received = splits.view(2, ranks, -1).sum(2).tolist()
    if back:
        sent, received = received, sent
    pending = collectives.all_to_all_single(rows.contiguous(), received, sent, group_name)
    arrived: Tensor = collectives.wait_tensor(pending)
    return arrived


def _exchange_like(rows: Tensor, splits: Tensor, ranks: int, back: bool, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape)


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


def _arrivals_like(received: Tensor, ranks: int, rows: int) -> tuple[Tensor, Tensor]:
    return received.new_empty(rows), received.new_empty(received.shape[0] // ranks, dtype=torch.int32)


for _name, _program, _shapes in (
    ("exchange", exchange_rows, _exchange_like),
    ("arrivals", _arrivals, _arrivals_like),
):
    _library.impl(_name, _program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{_name}", _shapes, lib=_library)


def _exchange_on_all_ranks(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
    """Where one process holds all ranks: not one call for each, which could not meet, but one for all."""
    return exchange_rows(*args, **kwargs or {})


torch.library.register_torch_dispatch("autoshard::exchange", LocalTensorMode, _exchange_on_all_ranks)
