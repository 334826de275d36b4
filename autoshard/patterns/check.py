"""The soundness of rules: a rule is checked against the operator itself.

For every strategy that a rule offers: shard the operands by its specs, run every rank's local program, put the results
together by its specs, and compare with the operator on the whole tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import RuleError
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.local import LocalCall, emit_local
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import OpCall, Rule, refine
from autoshard.patterns.strategy import Choices, axis_choices, describe, fits, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard, unshard

Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A strategy that does not compute what the operator does."""

    op: str
    mesh: str
    strategy: str
    problem: str

    def __str__(self) -> str:
        return f"{self.op} with {self.strategy} on mesh {self.mesh}: {self.problem}"


def check(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = (2, 3, 4),
) -> list[Finding]:
    """Check the rule of one operator call, on real tensors.

    Args:
        op: the operator.
        args: its arguments; floating tensors are best in float64.
        kwargs: its keyword arguments.
        sizes: sizes of a mesh of one axis to check all strategies on; a mesh of (2, 2) is checked besides.

    Returns:
        What was found wrong; nothing if the rule is sound here.

    Raises:
        RuleError: the library has no rule for the call, or the rule does not fit it.
    """
    kwargs = kwargs or {}
    whole = op(*args, **kwargs)
    call = call_of(op, args, kwargs, whole)
    rule = rule_for(call)
    if rule is None:
        raise RuleError(f"{op} has no rule for {call.operands}: register one with register_rule before checking it.")
    operands = list(_tensors([*args, *kwargs.values()]))
    results = list(whole) if isinstance(whole, (tuple, list)) else [whole]
    meshes = [MeshShape.of({"x": size}) for size in sizes] + [MeshShape.of({"x": 2, "y": 2})]
    return [
        Finding(str(op), str(mesh), describe(refined, choices, mesh), problem)
        for mesh in meshes
        for refined, choices in strategies(rule, mesh)
        for problem in _problems(call, refined, choices, mesh, operands, results)
    ]


def strategies(rule: Rule, mesh: MeshShape) -> Iterator[tuple[Rule, Choices]]:
    """All strategies on a mesh; on one axis, also those of inner parts of factors, which are strided shards."""
    for choices in itertools.product(*(axis_choices(rule, size) for size in mesh.sizes)):
        if fits(rule, choices, mesh):
            yield rule, choices
    if mesh.ndim == 1:
        size = mesh.sizes[0]
        for index, factor in enumerate(rule.factors):
            if factor.shardable and not factor.contiguous and factor.size > size and factor.size % size == 0:
                # the outer part is the smallest that leaves a part that `size` divides
                outer = next((part for part in range(2, factor.size) if factor.size % (part * size) == 0), None)
                if outer is not None:
                    yield refine(rule, {index: (outer,)}), (index + 1,)


def run_all_ranks(
    call: OpCall, rule: Rule, choices: Choices, mesh: MeshShape, operands: Sequence[torch.Tensor]
) -> list[dict[Coordinate, torch.Tensor] | None]:
    """Run a strategy on all ranks: the shards of every result by coordinate; None for a result that is no tensor.

    Args:
        operands: the whole tensors.
    """
    emit = Lockstep(mesh)
    values = []
    for position, operand in enumerate(operands):
        shards = shard_unevenly(operand, operand_spec(rule, choices, mesh, position), mesh)
        values.append(PerRank(tuple(shards[coordinate] for coordinate in mesh.coordinates())))
    outputs = emit_local(LocalCall(call, rule, choices, mesh, emit, values))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [
        dict(zip(mesh.coordinates(), output.values, strict=True)) if meta is not None else None
        for output, meta in zip(outputs, call.results, strict=True)
    ]


def shard_unevenly(tensor: torch.Tensor, spec: Spec, mesh: MeshShape) -> dict[Coordinate, torch.Tensor]:
    """Shards of a tensor; over partial axes, terms of different sizes and signs that add up to it."""
    terms: dict[Coordinate, torch.Tensor] = {(): tensor}
    for axis in range(mesh.ndim):
        size = mesh.sizes[axis]
        partial = axis in spec.partial_axes
        terms = {
            (*place, index): term
            for place, value in terms.items()
            for index, term in enumerate(_uneven_terms(value, size) if partial else [value] * size)
        }
    # The terms are cut as if they were the same everywhere, so only shard placements are left to be applied.
    whole = Spec.of(*(Spec.replicated(1)[0] if axis in spec.partial_axes else spec[axis] for axis in range(mesh.ndim)))
    return {coordinate: shard(term, whole, mesh, coordinate) for coordinate, term in terms.items()}


def _uneven_terms(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Terms that add up to the tensor: 60 % of what is left each time, with an offset that the last one undoes."""
    finite = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    scale = finite.abs().to(torch.float64).mean().item() if tensor.numel() else 1.0
    generator = torch.Generator().manual_seed(count)
    rest, terms = finite, []
    for index in range(count - 1):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * (index + 1) * scale
        terms.append((0.6 * rest + noise).to(tensor.dtype))
        rest = rest - terms[-1]
    # What is infinite or no number is in one term alone, as it can not be split.
    return [*terms, torch.where(torch.isfinite(tensor), rest, tensor)]


def _problems(
    call: OpCall,
    rule: Rule,
    choices: Choices,
    mesh: MeshShape,
    operands: Sequence[torch.Tensor],
    results: Sequence[Any],
) -> Iterator[str]:
    try:
        outputs = run_all_ranks(call, rule, choices, mesh, operands)
    except Exception as error:  # whatever the operator raises on shards is what is wrong with the strategy
        yield f"the local program fails with {type(error).__name__}: {error}"
        return
    tolerance = max((_tolerance(tensor.dtype) for tensor in operands), default=0.0)
    for position, (shards, result) in enumerate(zip(outputs, results, strict=True)):
        if shards is not None:
            problem = compare(shards, result_spec(rule, choices, mesh, position), mesh, result, tolerance)
            if problem is not None:
                yield f"result {position}: {problem}"


def compare(
    shards: Mapping[Coordinate, torch.Tensor], spec: Spec, mesh: MeshShape, whole: torch.Tensor, tolerance: float = 0.0
) -> str | None:
    """What is wrong with shards of `whole` that should lie as `spec` says, replicas included; None if nothing is.

    Args:
        tolerance: relative difference that rounding of the operands explains; rounding of the result comes on top.
    """
    dtypes = {value.dtype for value in shards.values()}
    if dtypes != {whole.dtype}:
        return f"its dtype is {dtypes}, not {whole.dtype}"
    expected = local_shape(whole.shape, spec, mesh)
    shapes = {tuple(value.shape) for value in shards.values()}
    if shapes != {expected}:
        return f"as {spec} a shard has shape {list(expected)}, but the local program gave {sorted(shapes)}"
    tolerance = max(tolerance, _tolerance(whole.dtype))
    absolute = tolerance * max(1.0, _largest(whole))
    replicated = [axis for axis, placement in enumerate(spec) if placement.is_replicate()]
    for copy in itertools.product(*(range(mesh.sizes[axis]) for axis in replicated)):
        chosen = dict(zip(replicated, copy, strict=True))
        one = {place: shards[tuple(chosen.get(axis, index) for axis, index in enumerate(place))] for place in shards}
        try:
            total = unshard(one, spec, mesh, tuple(whole.shape))
            torch.testing.assert_close(total, whole, rtol=tolerance, atol=absolute, equal_nan=True)
        except (AssertionError, RuntimeError, ValueError) as error:
            lines = " ".join(str(error).split())
            return f"as {spec} on the copy at {chosen}: {lines}" if chosen else f"as {spec}: {lines}"
    return None


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return 0.0
    return torch.nan_to_num(tensor.abs(), nan=0.0, posinf=0.0).max().item()


def _tolerance(dtype: torch.dtype) -> float:
    """Relative and absolute difference that rounding explains."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    return 1e-9 if eps < 1e-12 else 1e-4 if eps < 1e-6 else 5e-2


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
