"""Rules of operators without a registered rule: borrowed from torch's strategies, or replicated.

Torch's registry holds DTensor's own strategies and those that users add with `torch.distributed.tensor.experimental.
register_sharding`. A strategy places operands and results on one axis; here each becomes a factor, or a linear set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from autoshard.errors import warn_caller
from autoshard.patterns._torch import (
    DTensorSpec,
    FakeTensorMode,
    OpOverload,
    OpStrategy,
    TupleStrategy,
    dtensor_meta,
    mesh_strategy_function,
    one_device_strategy,
    outside_modes,
    runs_unchanged,
    schema_of,
    single_axis_strategy_function,
)
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import REDUCTIONS
from autoshard.patterns.rule import OpCall, Rule, TensorMeta, build, leaves, specialize
from autoshard.specs.emitter import collectives

# What the registry offers for a call on one mesh axis.


@dataclass(frozen=True, slots=True)
class TorchStrategy:
    """Placements on one axis.

    Attributes:
        operands: of every tensor operand, in the order of `OpCall.operands`.
        results: of every result; None for a result that is no tensor.
        strided: True if the shards may also be strided.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]
    strided: bool = False


def is_registered(op: OpOverload) -> bool:
    """Return True if torch has strategies for an operator: its own, or some that `register_sharding` added."""
    return single_axis_strategy_function(op) is not None or mesh_strategy_function(op) is not None


def torch_strategies(call: OpCall) -> tuple[TorchStrategy, ...]:
    """The distinct strategies of torch for a call; none where none are registered.

    They are those for a mesh of one device, which divides every dim. Divisibility by an axis is checked elsewhere.

    Raises:
        Exception: whatever the registered function raises on a call that it does not expect.
    """
    with outside_modes():
        strategies = (
            _single_axis_strategies(call)
            if single_axis_strategy_function(call.op)
            else _mesh_strategies(call)
            if mesh_strategy_function(call.op)
            else ()
        )
        # Torch repeats placements where operands may be broadcast.
        return tuple(dict.fromkeys(strategies))


def _single_axis_strategies(call: OpCall) -> Iterator[TorchStrategy]:
    """Strategies of a single-axis function: rows of results, then operands; placeholders are any kind of shard."""
    placer = single_axis_strategy_function(call.op)
    assert placer is not None
    args, kwargs = _arguments(call, lambda meta: dtensor_meta(meta.shape, meta.dtype), tuple)
    for row in placer(call.op, args, kwargs):
        strided = any(not isinstance(each, Placement) and each is not None for each in row)
        places = [each if isinstance(each, Placement) or each is None else Shard(each.dim) for each in row]
        results = len(call.op._schema.returns)
        yield _strategy(call, places[:results], places[results:], strided)


def _mesh_strategies(call: OpCall) -> Iterator[TorchStrategy]:
    """Strategies of a whole-mesh function, called with every placement of every operand."""
    placer = mesh_strategy_function(call.op)
    assert placer is not None

    def any_placement(meta: TensorMeta) -> OpStrategy:
        placements = [Replicate(), *(Shard(dim) for dim in range(len(meta.shape))), Partial()]
        return one_device_strategy(dtensor_meta(meta.shape, meta.dtype), placements)

    answer = placer(schema_of(call.op, *_arguments(call, any_placement, TupleStrategy)))
    for spec in answer.strategies if isinstance(answer, OpStrategy) else ():
        specs = spec.output_specs
        outs = (
            [specs] * len(call.op._schema.returns) if specs is None or isinstance(specs, DTensorSpec) else list(specs)
        )
        ins = outs[:1] * len(call.operands) if spec.input_specs is None else spec.input_specs
        yield _strategy(call, _axis_placements(outs), _axis_placements(ins), False)


def _axis_placements(specs: Sequence[DTensorSpec | None]) -> list[Placement | None]:
    """Return the placements of every operand or result on a mesh of one axis."""
    return [None if spec is None else spec.placements[0] for spec in specs]


def _arguments(
    call: OpCall, operand: Callable[[TensorMeta], Any], operands: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with its tensors, and its lists of tensors, replaced."""

    def replace(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return operand(value)
        if not isinstance(value, tuple):
            return value
        items = [replace(item) for item in value]
        return operands(items) if any(isinstance(item, TensorMeta) for item in value) else items

    return tuple(map(replace, call.args)), {name: replace(value) for name, value in call.kwargs}


def _strategy(
    call: OpCall, results: list[Placement | None], operands: list[Placement | None], strided: bool
) -> TorchStrategy:
    """A strategy with one placement per tensor operand, without those of other arguments.

    Raises:
        ValueError: there are more or fewer operands than the call has.
    """
    # `register_sharding` requires a None for every argument that is not a tensor.
    ins = tuple(placement for placement in operands if placement is not None)
    if len(ins) != len(call.operands):
        raise ValueError(f"it places {len(ins)} operands of a call with {len(call.operands)}.")
    # An operator whose one result is a list of tensors has one placement for all of them.
    outs = tuple(results) if len(results) == len(call.results) else (*results, None)[:1] * len(call.results)

    def from_start(placement: Any, meta: TensorMeta | None) -> Any:
        if meta is None or type(placement) is not Shard or placement.dim >= 0:
            return placement if meta is not None else None
        return Shard(placement.dim + len(meta.shape))

    return TorchStrategy(
        tuple(map(from_start, ins, call.operands)), tuple(map(from_start, outs, call.results)), strided
    )


# Rules from torch's strategies.

NOT_LINEAR = {"aten::linalg__powsum": "torch lets partial sums through, and takes powers of the terms"}
"""Operators whose strategies for partial sums are wrong and not borrowed, and why."""


def may_borrow(op: OpOverload) -> bool:
    """Return True if torch has strategies for an operator, and runs the operator itself on shards.

    False where DTensor changes arguments, and for random operators: DTensor has its own generators for them, and the
    plain operator would draw the same numbers on every shard.
    """
    return is_registered(op) and runs_unchanged(op) and torch.Tag.nondeterministic_seeded not in op.tags


def borrowed_rule(call: OpCall) -> Rule | None:
    """The rule made of torch's strategies for a call; None where none of them splits anything.

    Shards are even. Strategies without a counterpart are dropped: averages, maxima and the like that pass through an
    operator, partial operands beside sharded ones, and strategies under which the operator does not turn shards into
    shards of its results, since arguments would have to change.
    """
    if not may_borrow(call.op) or not all(isinstance(size, int) for meta in call.operands for size in meta.shape):
        return None
    try:
        strategies = torch_strategies(call)
    except Exception as error:  # a registered function raises whatever it likes
        warn_caller(
            f"the sharding strategies that torch has for {call.op} are not used on {call.shapes_text}: the function "
            f"that is registered there raises {type(error).__name__}: {error}",
        )
        return None
    return _rule_from_strategies(call, strategies)


@lru_cache(maxsize=4096)
def _rule_from_strategies(call: OpCall, strategies: tuple[TorchStrategy, ...]) -> Rule | None:
    passed = dict.fromkeys(_linear_operands(each) for each in strategies if call.name not in NOT_LINEAR)
    linear = [operands for operands in passed if operands]
    loops = [loop for each in strategies if (loop := _strategy_loop(each, call)) and _makes_shards(loop, call)]
    if not loops and not linear:
        return None
    # Loops with a common dim go to different variants: an operator may offer x[i] alone, or x[i] with y[i].
    groups: list[list[_StrategyLoop]] = [[]]
    for loop in loops:
        apart = (group for group in groups if not any(loop.places & other.places for other in group))
        group = next(apart, None)
        if group is None:
            groups.append([loop])
        else:
            group.append(loop)
    names = dict(zip(loops, _names(loops, call), strict=True))
    first, *others = ([(names[loop], loop) for loop in group] for group in groups)
    variants = tuple(_rule_from_loops(call, group, ()) for group in others)
    return specialize(replace(_rule_from_loops(call, first, linear), variants=variants), call)


@dataclass(frozen=True, slots=True)
class _StrategyLoop:
    """One strategy that shards operands.

    Attributes:
        operands: the sharded dim of every operand; None where it is replicated.
        results: likewise of every result.
        reductions: the reduction of every partial result; None for others.
        size: of the dims.
        strided: True if the shards may be strided.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reductions: tuple[str | None, ...]
    size: int
    strided: bool

    @property
    def places(self) -> frozenset[tuple[str, int, int]]:
        """All dims that are sharded."""
        sides = (("operand", self.operands), ("result", self.results))
        return frozenset(
            (side, index, dim) for side, dims in sides for index, dim in enumerate(dims) if dim is not None
        )


def _linear_operands(strategy: TorchStrategy) -> frozenset[int]:
    """The operands that are partial sums, if all results then are and all else is replicated; else none."""
    partial = frozenset(index for index, place in enumerate(strategy.operands) if _reduction_of(place) == "sum")
    whole = all(type(place) is Replicate for index, place in enumerate(strategy.operands) if index not in partial)
    results = [place for place in strategy.results if place is not None]
    return partial if whole and results and all(_reduction_of(place) == "sum" for place in results) else frozenset()


def _strategy_loop(strategy: TorchStrategy, call: OpCall) -> _StrategyLoop | None:
    """The strategy as a loop; None where it shards no operand, or has placements that a loop cannot express."""
    if not all(type(place) in (Shard, Replicate) for place in strategy.operands):
        return None
    placed = [place for place in strategy.results if place is not None]
    if not all(type(place) in (Shard, Replicate) or _reduction_of(place) in REDUCTIONS[:-1] for place in placed):
        return None
    sides = ((strategy.operands, call.operands), (strategy.results, call.results))
    operands, results = (tuple(place.dim if type(place) is Shard else None for place in side) for side, _ in sides)
    sizes = {
        meta.shape[place.dim] if place.dim < len(meta.shape) else 1
        for side, metas in sides
        for place, meta in zip(side, metas, strict=True)
        if type(place) is Shard and meta is not None
    }
    # Dims of unequal sizes are not one loop; a shard of a dim of size 1 is on one rank, which has no placement here.
    if all(dim is None for dim in operands) or len(sizes) != 1 or 1 in sizes:
        return None
    return _StrategyLoop(operands, results, tuple(map(_reduction_of, strategy.results)), sizes.pop(), strategy.strided)


def _reduction_of(place: Placement | None) -> str | None:
    """The reduction of a `Partial`; None for other placements, subclasses of `Partial` included."""
    return place.reduce_op if isinstance(place, Partial) and type(place) is Partial else None


def _makes_shards(loop: _StrategyLoop, call: OpCall) -> bool:
    """Return True if the operator with unchanged arguments turns shards into shards of its results."""
    # The smallest divisor of the loop, so that a shard differs from the whole and from a dim of size 1.
    share = next((each for each in range(2, math.isqrt(loop.size) + 1) if loop.size % each == 0), loop.size)

    def local(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        return tuple(size // share if at == dim else size for at, size in enumerate(shape))

    with outside_modes(), FakeTensorMode():
        shards = (
            torch.empty(local(meta.shape, dim), dtype=meta.dtype)
            for meta, dim in zip(call.operands, loop.operands, strict=True)
        )
        args, kwargs = pytree.tree_map_only(TensorMeta, lambda _: next(shards), (call.args, dict(call.kwargs)))
        try:
            outputs = call.op(*args, **kwargs)
        except Exception:  # an operator raises whatever it likes on shapes that do not fit its arguments
            return False
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return len(outputs) == len(call.results) and all(
        meta is None or (tuple(output.shape), output.dtype) == (local(meta.shape, dim), meta.dtype)
        for output, meta, dim in zip(outputs, call.results, loop.results, strict=True)
    )


def _names(loops: Sequence[_StrategyLoop], call: OpCall) -> Iterator[str]:
    """A name for every loop: the first operand that it shards and the dim, such as `x0`."""
    arguments = call.argument_names
    owners = []
    for name, value in (*zip(arguments, call.args, strict=False), *call.kwargs):
        owners += [name] * sum(1 for _ in leaves(value, TensorMeta))
    counts: dict[str, int] = {}
    for loop in loops:
        operand = next(index for index, dim in enumerate(loop.operands) if dim is not None)
        name = f"{owners[operand]}{loop.operands[operand]}"
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name}_{counts[name]}"


def _rule_from_loops(
    call: OpCall, loops: Sequence[tuple[str, _StrategyLoop]], linear: Sequence[frozenset[int]]
) -> Rule:
    """The rule with these loops; all other dims are whole."""
    sizes = {name: loop.size for name, loop in loops}
    whole: dict[str, int] = {}

    def dims(side: str, index: int, meta: TensorMeta) -> list[list[str]]:
        named = []
        for dim, size in enumerate(meta.shape):
            name = next((name for name, loop in loops if (side, index, dim) in loop.places), f"{side}{index}.{dim}")
            if name not in sizes:
                whole[name] = size
            named.append([name])
        return named

    operands = [dims("operand", index, meta) for index, meta in enumerate(call.operands)]
    results = [None if meta is None else dims("result", index, meta) for index, meta in enumerate(call.results)]
    return build(
        sizes | whole,
        operands,
        results,
        whole=tuple(whole),
        contiguous=[name for name, loop in loops if not loop.strided],
        reductions={name: loop.reductions for name, loop in loops},
        linear=linear,
        uneven=(),
    )


# Operators for which neither this library nor torch has a rule.


def whole_rule(call: OpCall) -> Rule:
    """The rule that replicates everything; results of random operators are broadcast from the first rank."""
    draws = torch.Tag.nondeterministic_seeded in call.op.tags
    operands = tuple(((),) * len(meta.shape) for meta in call.operands)
    results = tuple(None if meta is None else ((),) * len(meta.shape) for meta in call.results)
    return Rule((), operands, results, local=_keep_first_rank_results if draws else None)


def batch_rule(call: OpCall) -> str:
    """The text of a rule that splits samples (dim 0) if they are independent; empty where there is none.

    Only the author of the operator knows whether they are. Dims of samples are those as long as dim 0 of the first
    result, or of the first operand where that result has no dims. A result without samples is a sum over them.
    """
    tensors = [*call.results, *call.operands]
    size = next((meta.shape[0] for meta in tensors if meta is not None and meta.shape), 1)
    if size == 1 or any(meta is None for meta in call.results):
        return ""
    names = (f"d{number}!" for number in itertools.count())

    def item(meta: TensorMeta | None) -> str:
        shape = () if meta is None else meta.shape
        return " ".join("b" if dim == 0 and length == size else next(names) for dim, length in enumerate(shape))

    operands, results = (", ".join(map(item, metas)) for metas in (call.operands, call.results))
    return f"{operands} -> {results}" if "b" in operands.replace(",", "").split() else ""


def batch_advice(name: str, rule: str) -> str:
    """Advice for the user of an operator without a rule, given its `batch_rule`."""
    if not rule:
        return f'Register one with autoshard.register_rule("{name}", "..."), see docs/rules.md.'
    return (
        f'If samples, the steps of dim 0, are independent, autoshard.register_rule("{name}", "{rule}") splits the '
        "batch (results without samples are summed over the parts); see docs/rules.md."
    )


def _keep_first_rank_results(call: LocalCall) -> Any:
    """Run the operator on every rank and keep the first rank's results, since generators differ between ranks."""
    results = call.run()
    if not isinstance(results, tuple):
        return _broadcast_from_first(call, results)
    return tuple(None if result is None else _broadcast_from_first(call, result) for result in results)


def _broadcast_from_first(call: LocalCall, value: Any) -> Any:
    """Broadcast from the rank at coordinate 0 of every axis, as a sum in which other ranks hold zeros."""
    emit = call.emit
    dtype = value.dtype
    if dtype is torch.bool:  # booleans cannot be summed
        value = value.to(torch.uint8)
    for axis, size in enumerate(call.mesh.sizes):
        if size > 1:
            first = emit.coordinate(axis).eq(0)
            # `where`, not a product: a NaN on another rank must not be summed.
            kept = emit.where(first, value, emit.zeros_like(value))
            value = emit.collective(collectives.all_reduce.default, kept, "sum", axis=axis)
    return value.to(dtype)
