"""The planning options of `parallelize`, `plan` and `frontier`, checked before anything is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture.dynamic import Dynamic
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.nearest import default_cluster
from autoshard.errors import InputError, PlanError
from autoshard.memory.optimizer import optimizer_memory
from autoshard.planner.planner import EFFORTS, METHODS, RECOMPUTE, Settings
from autoshard.program.overlap import Overlap, check_overlap
from autoshard.units import parse_bytes

Hints = Mapping[str, Any]
Placements = Mapping[str, Any] | Literal["planned"] | None
Shares = Mapping[str, Sequence[int]]
"""For one mesh axis by name, what its ranks take of the batch, in proportion to one another."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `autoshard.plan` describes, checked."""

    hints: Hints | None
    cluster: Cluster
    inputs: Literal["global", "local"]
    input_placements: Mapping[str, Any]
    output_placements: Placements
    dynamic: Dynamic | None
    mp_policy: MixedPrecisionPolicy | None
    verbose: bool
    settings: Settings
    shares: Shares | Literal["auto"] | None = None
    overlap: Overlap = "own"


def check_options(
    device_type: str | None,
    *,
    hints: Hints | None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None,
    optimizer_bytes_per_element: float | None,
    cluster: str | Cluster | None,
    inputs: str,
    input_placements: Mapping[str, Any] | None,
    output_placements: Placements,
    method: str,
    time_limit: float,
    dynamic: Dynamic | None,
    mp_policy: MixedPrecisionPolicy | None,
    effort: str,
    work_limit: int | None,
    verbose: bool,
    memory_limit: int | str | None = None,
    recompute: str = "none",
    shares: Shares | str | None = None,
    overlap: str = "own",
    compile: bool = False,
) -> Options:
    """The options as they are used, for devices of a type, None where there are none yet.

    Raises:
        PlanError, BudgetError, InputError, ClusterError: an option is none; the message says which it may be.
    """
    _check_choice("method", method, METHODS)
    _check_choice("recompute", recompute, RECOMPUTE)
    _check_choice("effort", effort, EFFORTS)
    check_overlap(overlap)
    if inputs not in ("global", "local"):
        raise PlanError(
            f'inputs={inputs!r}: choose "global" (every rank passes whole tensors) or "local" (its shards).'
        )
    if isinstance(output_placements, str) and output_placements != "planned":
        raise PlanError(f'output_placements={output_placements!r}: pass "planned" or a mapping of output names.')
    if not time_limit > 0:
        raise PlanError(f"time_limit={time_limit!r}: it must be above zero seconds.")
    if work_limit is not None and not work_limit > 0:
        raise PlanError(f"work_limit={work_limit!r}: it must be above zero, or None for no limit.")
    chosen = default_cluster(device_type) if cluster is None else Cluster.of(cluster)
    if compile:
        chosen = chosen.with_compiler
    foreach = chosen.name != "cpu" if device_type is None else device_type != "cpu"
    return Options(
        hints=hints,
        cluster=chosen,
        inputs=inputs,  # type: ignore[arg-type]
        input_placements=dict(input_placements or {}),
        output_placements=output_placements,
        dynamic=dynamic,
        mp_policy=check_policy(mp_policy),
        verbose=verbose,
        shares=_check_shares(shares, output_placements),
        overlap=overlap,  # type: ignore[arg-type]
        settings=Settings(
            memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
            optimizer=optimizer_memory(optimizer, optimizer_bytes_per_element, foreach),
            method=method,
            time_limit=time_limit,
            recompute=recompute,
            effort=effort,
            work_limit=work_limit,
        ),
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")


def _check_shares(shares: Shares | str | None, output_placements: Placements) -> Shares | Literal["auto"] | None:
    if shares is None or shares == "auto":
        return shares  # type: ignore[return-value]
    if not isinstance(shares, Mapping) or len(shares) != 1:
        raise PlanError(
            f'shares={shares!r}: name one mesh axis and what each of its ranks takes: {{"dp": (4, 2)}}; or say "auto", '
            "or None for equal shares."
        )
    ((axis, given),) = shares.items()
    whole = isinstance(given, Sequence) and all(isinstance(share, int) and share > 0 for share in given)
    if not whole:
        raise PlanError(f"shares of axis {axis!r} are {given!r}: every rank takes a whole number above zero.")
    if output_placements is not None:
        raise PlanError("with shares, outputs come back whole: no DTensor lies in shares. Leave output_placements out.")
    return {axis: tuple(given)}


def check_policy(policy: object) -> MixedPrecisionPolicy | None:
    """A policy of precisions, if there is one; `InputError` unless it is FSDP2's, of floating dtypes."""
    if policy is None:
        return None
    if not isinstance(policy, MixedPrecisionPolicy):
        raise InputError(
            f"mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy, such as MixedPrecisionPolicy("
            f"param_dtype=torch.bfloat16, reduce_dtype=torch.float32), got {type(policy).__name__}."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(f"mp_policy.{name} is {dtype!r}: it must be a floating dtype, such as torch.bfloat16.")
    return policy
