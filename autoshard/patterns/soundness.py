"""The soundness of rules: a rule is checked against the operator itself.

For every strategy that a rule offers: shard the operands by its specs, run every rank's local program, unshard the
results by its specs, and compare with the operator on the whole tensors. Random results cannot be compared number by
number: see `Draws`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import RuleError
from autoshard.patterns._torch import CustomOpDef, OpOverload, OpOverloadPacket, overload_for
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.padding import emit_local
from autoshard.patterns.registry import OPERATOR_NAME, call_of, has_rule, rule_for
from autoshard.patterns.rule import Factor, OpCall, Rule, is_inexact, leaves, refine
from autoshard.patterns.strategy import (
    Choices,
    axis_choices,
    describe,
    fits,
    offered_factors,
    operand_spec,
    result_spec,
    uneven_axis,
)
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard, unshard

Coordinate = tuple[int, ...]
Operator = OpOverload | OpOverloadPacket | CustomOpDef | str
Shards = Mapping[Coordinate, torch.Tensor]
"""One tensor per coordinate of the mesh."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A strategy whose result differs from the operator's."""

    op: str
    mesh: str
    strategy: str
    problem: str

    def __str__(self) -> str:
        return f"{self.op} with {self.strategy} on mesh {self.mesh}: {self.problem}"


def check(
    op: Operator,
    sample: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sizes: Sequence[int] = (2, 3, 4),
) -> list[Finding]:
    """Check the rule of one operator call, on real tensors.

    Every strategy that the rule offers is run on all ranks and compared with the operator on the whole tensors. For a
    random operator, replicas must agree bit for bit, shards must draw different numbers, all must depend on the seed
    alone, and the numbers must have the operator's distribution.

    Args:
        op: the operator: an overload, a packet, what `torch.library.custom_op` returned, or a name: `"mylib::op"`.
        sample: its arguments; or a pair of arguments and keyword arguments; or torch's `SampleInput`. Floating tensors
            are best in float64. Dims of 12 are split evenly on axes of 2, 3 and 4, others are padded.
        kwargs: its keyword arguments.
        sizes: sizes of a mesh of one axis on which to check all strategies; a mesh of (2, 2) is checked, too.

    Returns:
        The faults; empty if the rule is sound for this call.

    Raises:
        RuleError: there is no such operator, it has no rule for the call, or the rule does not fit it.
    """
    overload, args, keywords = sample_call(op, sample, kwargs)
    draws = reference_draws(overload, args, keywords)
    whole = draws.whole[0]
    call = call_of(overload, args, keywords, whole)
    rule = rule_for(call)
    if rule is None:
        raise RuleError(_no_rule_message(call))
    operands = list(leaves([*args, *keywords.values()], torch.Tensor))
    meshes = [MeshShape.of({"x": size}) for size in sizes] + [MeshShape.of({"x": 2, "y": 2})]
    return [
        Finding(str(overload), str(mesh), describe(refined, choices, mesh), problem)
        for mesh in meshes
        for held in [_OperandShards(operands, mesh)]
        for refined, choices in strategies(rule, mesh)
        for problem in _problems(call, refined, choices, mesh, held, draws)
    ]


def _no_rule_message(call: OpCall) -> str:
    if has_rule(call.op):
        on = f"the rule of {call.op} declines this call, on {call.shapes_text}"
        return f"{on}: it is replicated, and there is nothing to check."
    return f"{call.op} has no rule, so that it is replicated: register one with register_rule before checking it."


def strategies(rule: Rule, mesh: MeshShape) -> Iterator[tuple[Rule, Choices]]:
    """All strategies on a mesh; on one axis, also those of inner parts of factors, which are strided shards.

    Strategies of routed rows are left out: a single operator does not determine which rows a rank holds.
    """
    factors = offered_factors(rule)
    for choices in itertools.product(*(axis_choices(rule, size) for size in mesh.sizes)):
        if fits(rule, choices, mesh) and not any(factors[choice].routed for choice in choices if choice >= 0):
            yield rule, choices
    if mesh.ndim == 1:
        for each, index, factor in _factors_with_variant(rule):
            if factor.shardable and not factor.contiguous and not factor.routed:
                yield from _inner_parts(each, index, factor.size, mesh)


def _inner_parts(rule: Rule, index: int, size: int, mesh: MeshShape) -> Iterator[tuple[Rule, Choices]]:
    """Strategies of a factor cut in two: a strided shard, and padded blocks of each part, as far as possible."""
    cuts = [outer for outer in range(2, size) if size % outer == 0]
    parts = [(refine(rule, {index: (outer,)}), (index + part,)) for part in (1, 0) for outer in cuts]
    parts = [(cut, choices) for cut, choices in parts if fits(cut, choices, mesh)]
    strided = [pair for pair in parts if pair[1] == (index + 1,) and not _is_padded(*pair, mesh)]
    padded = [[pair for pair in parts if pair[1] == (index + part,) and _is_padded(*pair, mesh)] for part in (1, 0)]
    for group in (strided, *padded):
        yield from group[:1]


def _is_padded(rule: Rule, choices: Choices, mesh: MeshShape) -> bool:
    return any(uneven_axis(rule, choices, mesh, choice) is not None for choice in choices)


def _factors_with_variant(rule: Rule) -> Iterator[tuple[Rule, int, Factor]]:
    """Every factor, with the first variant that has it and its index there."""
    known: set[str] = set()
    for each in (rule, *rule.variants):
        yield from ((each, index, factor) for index, factor in enumerate(each.factors) if factor.name not in known)
        known |= {factor.name for factor in each.factors}


def run_all_ranks(
    call: OpCall, rule: Rule, choices: Choices, mesh: MeshShape, operands: Sequence[torch.Tensor]
) -> list[Shards | None]:
    """Run a strategy on all ranks; return the shards of every result by coordinate, None if it is no tensor."""
    return _run(call, rule, choices, mesh, _OperandShards(operands, mesh).cut(rule, choices), seed=0)


class _OperandShards:
    """Shards the operands of a call for all ranks of a mesh; strategies share the shards of an operand and spec."""

    def __init__(self, operands: Sequence[torch.Tensor], mesh: MeshShape) -> None:
        self.operands = operands
        self.mesh = mesh
        self._known: dict[tuple[int, Spec], PerRank] = {}

    def cut(self, rule: Rule, choices: Choices) -> list[PerRank]:
        """Return the shards of every operand, by rank."""
        specs = (operand_spec(rule, choices, self.mesh, position) for position in range(len(self.operands)))
        return [self._shards(*place) for place in enumerate(specs)]

    def _shards(self, position: int, spec: Spec) -> PerRank:
        if (position, spec) not in self._known:
            shards = shard_unevenly(self.operands[position], spec, self.mesh)
            self._known[position, spec] = PerRank(tuple(shards[place] for place in self.mesh.coordinates()))
        return self._known[position, spec]


def _run(
    call: OpCall, rule: Rule, choices: Choices, mesh: MeshShape, held: list[PerRank], seed: int
) -> list[Shards | None]:
    outputs = emit_local(LocalCall(call, rule, choices, mesh, Lockstep(mesh, seed), held))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [
        dict(zip(mesh.coordinates(), output.values, strict=True)) if meta is not None else None
        for output, meta in zip(outputs, call.results, strict=True)
    ]


def shard_unevenly(tensor: torch.Tensor, spec: Spec, mesh: MeshShape) -> dict[Coordinate, torch.Tensor]:
    """Shards of a tensor; over partial axes, terms of different sizes and signs whose sum is the tensor."""
    terms: dict[Coordinate, torch.Tensor] = {(): tensor}
    for axis in range(mesh.ndim):
        size = mesh.sizes[axis]
        partial = axis in spec.partial_axes
        terms = {
            (*place, index): term
            for place, value in terms.items()
            for index, term in enumerate(_uneven_terms(value, size) if partial else [value] * size)
        }
    # Only shard placements are left to be applied to the terms.
    whole = Spec.of(
        *(Spec.all_replicated(1)[0] if axis in spec.partial_axes else spec[axis] for axis in range(mesh.ndim))
    )
    # Padding may be anything: use nan, or an integer that is out of range as an index.
    padding = math.nan if is_inexact(tensor.dtype) else 1 if tensor.dtype == torch.bool else 101
    return {
        coordinate: shard(term, whole, mesh, coordinate, padded=True, padding=padding)
        for coordinate, term in terms.items()
    }


def _uneven_terms(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Terms whose sum is the tensor: 60 % of the remainder each time, plus an offset that the last term undoes."""
    finite = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    scale = finite.abs().to(torch.float64).mean().item() if tensor.numel() else 1.0
    # Not the default generator: the operator's numbers must not depend on how its operands were sharded.
    generator = torch.Generator().manual_seed(count)
    rest, terms = finite, []
    for index in range(count - 1):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * (index + 1) * scale
        terms.append((0.6 * rest + noise).to(tensor.dtype))
        rest = rest - terms[-1]
    # Infinities and nan cannot be split: put them into one term.
    return [*terms, torch.where(torch.isfinite(tensor), rest, tensor)]


def _problems(
    call: OpCall,
    rule: Rule,
    choices: Choices,
    mesh: MeshShape,
    operands: _OperandShards,
    draws: Draws,
) -> Iterator[str]:
    specs = [result_spec(rule, choices, mesh, position) for position in range(len(call.results))]
    try:
        held = operands.cut(rule, choices)
        runs = [_run(call, rule, choices, mesh, held, seed) for seed in draws.seeds]
        if draws.random:
            yield from draws.problems(runs, specs, mesh)
            return
    except Exception as error:  # any error on shards is a fault of the strategy
        yield f"the local program fails with {type(error).__name__}: {error}"
        return
    tolerance = max((_tolerance(tensor.dtype) for tensor in operands.operands), default=0.0)
    for position, (shards, result) in enumerate(zip(runs[0], draws.whole[0], strict=True)):
        if shards is not None:
            problem = compare(shards, specs[position], mesh, result, tolerance)
            if problem is not None:
                yield f"result {position}: {problem}"


def compare(
    shards: Mapping[Coordinate, torch.Tensor], spec: Spec, mesh: MeshShape, whole: torch.Tensor, tolerance: float = 0.0
) -> str | None:
    """Return what is wrong with shards of `whole` under `spec`, replicas included; None if they are right.

    Args:
        tolerance: relative difference due to rounding of the operands; rounding of the result is added.
    """
    if problem := layout_problem(shards, spec, mesh, whole):
        return f"as {spec} {problem}"
    tolerance = max(tolerance, _tolerance(whole.dtype))
    absolute = tolerance
    if whole.numel() and whole.dtype != torch.bool:
        # Relative to the largest finite magnitude: small elements may be differences of large ones.
        absolute *= max(1.0, torch.nan_to_num(whole.abs(), nan=0.0, posinf=0.0).max().item())
    replicated = [axis for axis, placement in enumerate(spec) if placement.is_replicate()]
    first: Mapping[Coordinate, torch.Tensor] | None = None
    for copy in itertools.product(*(range(mesh.sizes[axis]) for axis in replicated)):
        chosen = dict(zip(replicated, copy, strict=True))
        held = {place: shards[tuple(chosen.get(axis, index) for axis, index in enumerate(place))] for place in shards}
        if first is not None and all(torch.equal(held[place], first[place]) for place in shards):
            # Equal to the first copy, which was right.
            continue
        first = first or held
        try:
            total = unshard(held, spec, mesh, tuple(whole.shape))
            # Most are equal, which is fast to check.
            if not torch.equal(total, whole):
                torch.testing.assert_close(total, whole, rtol=tolerance, atol=absolute, equal_nan=True)
        except (AssertionError, RuntimeError, ValueError) as error:
            lines = " ".join(str(error).split())
            return f"as {spec} on the copy at {chosen}: {lines}" if chosen else f"as {spec}: {lines}"
    return None


def _tolerance(dtype: torch.dtype) -> float:
    """Relative and absolute difference due to rounding."""
    if not is_inexact(dtype):
        return 0.0
    eps = torch.finfo(dtype).eps
    # Terms of partial sums are larger than the sum, so half precision loses several of its bits.
    return 1e-9 if eps < 1e-12 else 1e-4 if eps < 1e-6 else max(5e-2, 16 * eps)


# Random operators.

# Draws per position, to tell two distributions apart.
_SEED_COUNT = 32
_FALSE_ALARM_RATE = 1e-7
"""The rate at which a right strategy would be called wrong if seeds were not fixed."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The results of an operator on whole tensors, one per seed.

    The numbers of a strategy must be a function of the step's seed alone, equal on replicas, different on shards, and
    distributed as the operator's on one device: as a whole (two-sample Kolmogorov-Smirnov) and at every position
    (means). Seeds are fixed, so that findings are reproducible.

    Attributes:
        whole: its results as a tuple, for every seed; those under the first seed alone if nothing is random.
        random: True if the seed matters.
    """

    whole: tuple[tuple[Any, ...], ...]
    random: bool

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds to run a strategy with; if numbers are random, the first seed is repeated at the end."""
        return (*range(len(self.whole)), 0) if self.random else (0,)

    def problems(
        self, runs: Sequence[Sequence[Shards | None]], specs: Sequence[Spec], mesh: MeshShape
    ) -> Iterator[str]:
        """Yield the problems of a strategy's results.

        Args:
            runs: for each of `seeds`, the shards of every result; None for a result that is no tensor.
            specs: the specs that the results should have.
        """
        for position, spec in enumerate(specs):
            shards = [one for run in runs if (one := run[position]) is not None]
            if shards:
                problem = _problem(shards, [result[position] for result in self.whole], spec, mesh)
                if problem is not None:
                    yield f"result {position}: as {spec} {problem}"


def reference_draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draws:
    """Run an operator on whole tensors, once per seed if it is random. The generator's state is restored."""
    with torch.random.fork_rng(devices=[]):
        first = _run_seeded(op, args, kwargs, 0)
        seeded = torch.Tag.nondeterministic_seeded in op.tags
        whole = (first, *(_run_seeded(op, args, kwargs, seed) for seed in range(1, _SEED_COUNT if seeded else 1)))
        # A few draws with few outcomes, such as three coins, may be equal under some of the seeds.
        pairs = (pair for other in whole[1:] for pair in zip(first, other, strict=True))
        random = not all(torch.equal(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor))
        return Draws(whole if random else (first,), random)


def _run_seeded(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
    # Seed only this generator, since it is the only one that is restored, not those of GPUs.
    torch.default_generator.manual_seed(seed)
    result = op(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _problem(shards: Sequence[Shards], whole: Sequence[torch.Tensor], spec: Spec, mesh: MeshShape) -> str | None:
    """Return the problem of one result, from its shards per seed (the first seed twice) and the operator's results."""
    problem = layout_problem(shards[0], spec, mesh, whole[0])
    problem = problem or next(filter(None, (_replica_problem(held, spec, mesh) for held in shards)), None)
    if problem is not None:
        return problem
    *drawn, again = [_numbers(unshard(held, spec, mesh, whole[0].shape)) for held in shards]
    if not torch.equal(drawn[0], again):
        return "what is drawn does not follow from the step's seed: the same seed gave different numbers"
    together, expected = torch.stack(drawn), torch.stack([_numbers(value) for value in whole])
    return _distribution_problem(together, expected) or _shard_problem(together, expected, spec, mesh)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """The values as float64, with the parts of complex numbers along a last dim."""
    return (torch.view_as_real(values) if values.is_complex() else values).to(torch.float64)


def layout_problem(shards: Shards, spec: Spec, mesh: MeshShape, whole: torch.Tensor) -> str | None:
    """Return what is wrong with the dtypes or shapes of shards under `spec`; None if they are right."""
    dtypes, shapes = {value.dtype for value in shards.values()}, {tuple(value.shape) for value in shards.values()}
    if dtypes != {whole.dtype}:
        return f"its dtype is {dtypes}, not {whole.dtype}"
    expected = local_shape(whole.shape, spec, mesh)
    if shapes != {expected}:
        return f"a shard has shape {list(expected)}, but the local program gave {sorted(shapes)}"
    return None


def _replica_problem(shards: Shards, spec: Spec, mesh: MeshShape) -> str | None:
    replicated = [axis for axis, placement in enumerate(spec) if placement.is_replicate()]
    for coordinate, value in shards.items():
        first = tuple(0 if axis in replicated else place for axis, place in enumerate(coordinate))
        # Padding of an uneven shard does not count and may be nan, but is equal on replicas.
        if not torch.allclose(value, shards[first], rtol=0, atol=0, equal_nan=True):
            return f"replicas draw different numbers: the rank at {coordinate} and that at {first}"
    return None


def _distribution_problem(drawn: torch.Tensor, whole: torch.Tensor) -> str | None:
    """Return a problem if two samples, with draws along the first dim, have different distributions."""
    count = whole.numel()
    distance = _distribution_distance(drawn.flatten(), whole.flatten())
    limit = math.sqrt(-math.log(_FALSE_ALARM_RATE / 2) / 2) * math.sqrt(2 / count)
    if distance > limit:
        return f"the numbers are distributed otherwise: Kolmogorov-Smirnov distance {distance:.3g}, above {limit:.3g}"
    # A lower bound on the deviation of a mean: 32 draws of a rare event may all be equal.
    spread = (drawn.var(0) + whole.var(0)) / len(whole) + 1e-4 * whole.var(0).mean()
    score = ((drawn.mean(0) - whole.mean(0)).abs() / spread.sqrt().clamp_min(1e-12)).max().item()
    if score > 7:
        return f"the mean at some position is {score:.3g} standard deviations from the operator's own"
    return None


def _distribution_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The Kolmogorov-Smirnov distance of two samples: the largest difference between their distribution functions."""
    points = torch.cat([first, second]).unique()
    shares = [
        torch.searchsorted(sample.sort().values, points, right=True) / sample.numel() for sample in (first, second)
    ]
    return (shares[0] - shares[1]).abs().max().item()


def _shard_problem(drawn: torch.Tensor, whole: torch.Tensor, spec: Spec, mesh: MeshShape) -> str | None:
    """Return a problem if two shards draw the same numbers, so that they are correlated over the seeds."""
    for axis in spec.shard_axes:
        first, *others = (
            tuple(place * (number == axis) for number in range(mesh.ndim)) for place in range(mesh.sizes[axis])
        )
        for other in others:
            together = _correlation(drawn, spec, mesh, first, other)
            if together > 0.5 > abs(_correlation(whole, spec, mesh, first, other)) + 0.25:
                return f"the shards at {first} and {other} draw the same numbers: their correlation is {together:.3g}"
    return None


def _correlation(values: torch.Tensor, spec: Spec, mesh: MeshShape, first: Coordinate, second: Coordinate) -> float:
    """Correlation of the parts of two ranks over the draws, summed over positions."""
    cut = [torch.stack([shard(draw, spec, mesh, coordinate) for draw in values]) for coordinate in (first, second)]
    common = [slice(min(sizes)) for sizes in zip(*(part.shape for part in cut), strict=True)]
    parts = [part[tuple(common)] - part[tuple(common)].mean(0) for part in cut]
    norm = (parts[0].square().sum() * parts[1].square().sum()).sqrt().clamp_min(1e-12)
    return ((parts[0] * parts[1]).sum() / norm).item()


# The arguments of `check`: an operator by any of its names, and a sample call in any common form.


def sample_call(
    op: Operator, sample: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return the operator, arguments and keyword arguments of one call, tensors detached.

    Args:
        op: an overload, a packet of overloads (the overload that takes the arguments is used), the result of
            `torch.library.custom_op`, or a name such as `"mylib::op"` or `"aten.sum.dim_IntList"`.
        sample: the arguments; or a pair of arguments and keyword arguments; or torch's `SampleInput`; or one tensor.
        kwargs: further keyword arguments.

    Raises:
        RuleError: there is no such operator, no overload takes the arguments, or it changes its operands.
    """
    args, keywords = _arguments(sample)
    args, keywords = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, {**keywords, **(kwargs or {})}))
    overload = _overload(op, args, keywords)
    if overload._schema.is_mutable:
        raise RuleError(
            f"{overload} changes its operands. Captured graphs are functional: write and check the rule of the "
            "operator that returns the new value instead."
        )
    return overload, args, keywords


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if hasattr(sample, "input") and hasattr(sample, "args"):  # SampleInput, without importing torch's test suite
        return (sample.input, *sample.args), dict(sample.kwargs)
    if not isinstance(sample, Sequence) or isinstance(sample, str):
        raise RuleError(
            f"a sample of type {type(sample).__name__} says nothing of a call: pass the arguments as a tuple, a pair "
            "(args, kwargs), or torch's SampleInput."
        )
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
        return tuple(sample[0]), dict(sample[1])
    return tuple(sample), {}


def _overload(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    if isinstance(op, CustomOpDef):
        return op._opoverload
    packet = _operator_by_name(op) if isinstance(op, str) else op
    if isinstance(packet, OpOverload):
        return packet
    names = packet.overloads()
    if len(names) == 1:
        return getattr(packet, names[0])
    try:
        return overload_for(packet, args, kwargs)
    except RuntimeError as error:
        raise RuleError(
            f"none of the overloads {', '.join(names)} of {packet} takes these arguments. Name the one that is meant, "
            f'such as "{packet}.{names[0]}", or mend the arguments: {str(error).splitlines()[0]}'
        ) from error


def _operator_by_name(name: str) -> OpOverload | OpOverloadPacket:
    match = OPERATOR_NAME.fullmatch(name)
    if match is None:
        raise RuleError(
            f'"{name}" is not the name of an operator: write "namespace::name" or "namespace.name.overload".'
        )
    try:
        packet = getattr(getattr(torch.ops, match["namespace"]), match["name"])
        return packet if match["overload"] is None else getattr(packet, match["overload"])
    except (AttributeError, RuntimeError) as error:
        raise RuleError(
            f'torch knows no operator "{name}": import the module that defines it first, or mend the name.'
        ) from error
