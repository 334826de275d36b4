"""`shard`: placements of an activation, written into `forward` and kept in the graph by an identity operator."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.capture._torch import StridedShard
from autoshard.errors import HintError

CAPTURE: ContextVar[Iterator[int] | None] = ContextVar("autoshard_capture", default=None)
"""Numbers for the task graphs of the capture that runs; None outside of a capture."""


def shard(x: torch.Tensor, *placements: Placement) -> torch.Tensor:
    """Pin the placements of one activation: the identity, except while autoshard captures the module.

    Args:
        x: the activation, of any shape.
        placements: one per mesh axis; `dim` counts from the end where it is negative.

    Returns:
        `x` itself; during capture, a tensor equal to it whose placements the planner keeps.

    Raises:
        HintError: (during capture) an argument is not a placement, or its dim is out of range.
    """
    # Outside of a capture the code also runs where autoshard plans nothing: there the call must cost nothing.
    if CAPTURE.get() is None:
        return x
    return torch.ops.autoshard.pin(x, pin_text(placements, x.ndim))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Context in which `shard` writes its operator into the graph, and task graphs mark their operators."""
    token = CAPTURE.set(itertools.count())
    try:
        yield
    finally:
        CAPTURE.reset(token)


def pin_text(placements: tuple[Placement, ...], ndim: int) -> str:
    """Return the text of the placements of a tensor of `ndim` dims, such as `"R;S(0);S(1,f=3);P(sum)"`."""
    # An operator's schema has no type for placements. Text is an argument that every pass over a graph keeps.
    if not placements:
        raise HintError(
            "shard(x) needs one placement per mesh axis, such as shard(x, Shard(0), Replicate()); got none."
        )
    return ";".join(_placement_text(placement, ndim) for placement in placements)


def _placement_text(placement: Placement, ndim: int) -> str:
    if isinstance(placement, (Shard, StridedShard)):
        if not -ndim <= placement.dim < ndim:
            raise HintError(f"shard(x, ...): {placement} is out of range for a tensor of {ndim} dims.")
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        return f"S({placement.dim % ndim})" if factor == 1 else f"S({placement.dim % ndim},f={factor})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if isinstance(placement, Replicate):
        return "R"
    raise HintError(f"shard(x, ...): {placement!r} is no placement; pass Shard(dim), Replicate() or Partial().")


_PLACEMENT = re.compile(r"R|S\((?P<dim>\d+)(?:,f=(?P<factor>\d+))?\)|P\((?P<op>\w+)\)")


def parse_pin(text: str) -> tuple[Placement, ...]:
    """Return the placements that `pin_text` wrote.

    Raises:
        HintError: the text was not written by `pin_text`.
    """
    return tuple(_parse_placement(part) for part in text.split(";"))


def _parse_placement(text: str) -> Placement:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise HintError(f"{text!r} is not a placement: expected R, S(dim), S(dim,f=factor) or P(operation).")
    if match["dim"] is None:
        return Partial(match["op"]) if match["op"] else Replicate()
    if match["factor"] is None:
        return Shard(int(match["dim"]))
    return StridedShard(int(match["dim"]), split_factor=int(match["factor"]))


@torch.library.custom_op("autoshard::pin", mutates_args=())
def pin(x: torch.Tensor, placements: str) -> torch.Tensor:
    """Return `x`; the planner must give it these placements."""
    # A custom operator must not return its operand itself.
    return x.clone()


@pin.register_fake
def _(x: torch.Tensor, placements: str) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, str], output: torch.Tensor
) -> None:
    ctx.placements = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    # The gradient of a pinned activation is pinned as the activation is.
    return torch.ops.autoshard.pin(gradient, ctx.placements), None  # type: ignore[attr-defined]


pin.register_autograd(_backward, setup_context=_setup_context)
