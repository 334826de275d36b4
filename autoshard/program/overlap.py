"""Arrangement of the collectives of a local program: by this library, or by torch's passes at the cluster's prices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import fx

from autoshard.errors import PlanError
from autoshard.program._torch import has_overlap_pass, schedule_overlap
from autoshard.program.fused_products import fuse
from autoshard.program.kernels import COLLECTIVE_KINDS
from autoshard.program.program_replay import KernelPrices, collective_call
from autoshard.reshard.bucket import bucket_reductions
from autoshard.reshard.collective_schedule import REDUCED_BYTES, schedule
from autoshard.reshard.gathers import GATHERED_BYTES
from autoshard.specs.emitter import collectives

Overlap = Literal["own", "torch"]
OVERLAPS = ("own", "torch")


class Arrangement(Protocol):
    """Joins and orders the collectives of half a program in place, in one order on all ranks."""

    def __call__(self, half: fx.GraphModule, forward: bool) -> None: ...


def arrange_own(half: fx.GraphModule, forward: bool) -> None:
    """Arrange collectives by the passes that the predicted program has, too."""
    # Reductions of the forward half are not joined: a loss that is kept would keep the buffer of all its neighbours.
    if not forward:
        bucket_reductions(half.graph)
    schedule(half.graph)


def check_overlap(overlap: str) -> None:
    """Raise a `PlanError` if the option is unknown, or this release of torch has no such pass."""
    if overlap not in OVERLAPS:
        raise PlanError(f"overlap={overlap!r} is unknown: choose one of {', '.join(OVERLAPS)}.")
    if overlap == "torch" and not has_overlap_pass():
        raise PlanError(
            f'overlap="torch" needs schedule_overlap_bucketing of torch._inductor, with its hook for prices, and torch '
            f'{torch.__version__} has none: install torch 2.13, or leave overlap="own".'
        )


@dataclass(frozen=True, slots=True, eq=False)
class TorchArrangement:
    """Torch's `schedule_overlap_bucketing`, and before it `_micro_pipeline_tp` where a group has symmetric memory.

    Attributes:
        prices: of kernels and collectives.
        groups: for every mesh axis, the name of the process group in the program.
        dynamic: True if sizes are dynamic.
    """

    prices: KernelPrices
    groups: Sequence[str]
    dynamic: bool

    def __call__(self, half: fx.GraphModule, forward: bool) -> None:
        # Torch's joins and fusions write the sizes of the example into the program.
        if not self.dynamic:
            fuse(half.graph)
        schedule_overlap(half, self.seconds, join=not self.dynamic, bytes_more=GATHERED_BYTES + REDUCED_BYTES)

    def seconds(self, node: fx.Node, size: int | None) -> float | None:
        """Return the seconds of a call; of a collective as if it had `size` bytes, where torch asks for that."""
        if node.op != "call_function" or "val" not in node.meta:
            return None
        if node.target in COLLECTIVE_KINDS:
            sent = collective_call(node, self.groups)
            return self.prices.cost.collective(sent.kind, sent.bytes if size is None else size, sent.axis)
        free = node.target in (collectives.wait_tensor.default, operator.getitem)
        return 0.0 if free else self.prices.seconds(node)
