"""Rules: which factors make up the dims of an operator's operands and results.

A factor is an indivisible loop of the operator, named as in an einsum: `mm` is `i k, k j -> i j`. Sharding a
factor over a mesh axis shards every dim that holds it; where a result lacks it, the factor is contracted and
the result is left partial. That is all a planner needs to know of an operator (GSPMD's and Shardy's factors;
Rhino 4.1 for dims that are products, whose inner factors become strided shards).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.errors import RuleError
from autoshard.patterns._torch import OpOverload

Dims = tuple[tuple[int, ...], ...]
"""For every dim of a tensor, the indices of the factors whose product it is, major to minor."""

Exchange = tuple[str, int] | tuple[str, int, int]
"""A collective inside a local program: its kind, such as `"all_gather"`, the bytes of the whole tensor, and, where it
is run more than once, how many times."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of a tensor: what rules look at in place of the tensor.

    Attributes:
        strides: how the whole tensor lies in memory, for operators that read it so whatever its shape; else None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator, tensors replaced by their `TensorMeta`, lists by tuples (so that it is hashable)."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[TensorMeta | None, ...]

    @property
    def operands(self) -> tuple[TensorMeta, ...]:
        """The tensor operands, in the order in which they stand in `args` and `kwargs`, lists included."""
        return tuple(_tensors((self.args, tuple(value for _, value in self.kwargs))))

    def arg(self, name: str) -> Any:
        """The argument that the operator's schema calls `name`, its default when it was not passed."""
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                default = argument.default_value if argument.has_default_value() else None
                # As in `args`, a list is a tuple: `aten.amax` has dim=[] by default.
                return dict(self.kwargs).get(name, tuple(default) if isinstance(default, list) else default)
        raise RuleError(f"{self.op} has no argument {name!r}.")


def _tensors(value: Any) -> Iterator[TensorMeta]:
    if isinstance(value, TensorMeta):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an operator.

    Attributes:
        name: the loop's name in the rule; a refined part of `j` is called `j.0`, `j.1`, ...
        size: number of steps of the loop.
        shardable: whether a mesh axis may split it.
        contiguous: only whole stretches may be taken (no strided shards), because the local program counts
            positions from the start of its stretch.
        reductions: for every result that lacks the factor, the kind of partial that its shards leave there;
            None where the local program reduces inside, so that the result is whole on every rank. Empty
            means "sum" everywhere.
        exchanges: the collectives that the local program runs inside when the factor is sharded and nothing else is:
            the kind as the cost model knows it, and the bytes of the whole tensor that they reduce or put together.
            In a `"ring"`, parts are handed on from rank to rank until each rank has had all; in a `"ring_and_home"`,
            once more, so that each ends where it began. A `"gather_of_each"` is an all-gather to which every rank gives
            so many bytes, however many ranks there are, and an `"exchange_of_each"` such an all-to-all.
        uneven: an axis that does not divide the factor may split it too: what runs on a rank copes with padding behind
            the factor's end, which may hold anything.
        fill: what padding of operands along the factor is replaced by before it runs; None where that may be anything.
        sequential: the operator runs one step of the loop after another, and at each one reads the operands that lack
            the factor anew.
        routed: `"source"` or `"group"` of a loop that places routed rows (see `specs.spec.Routed`): the tokens that
            rows are made of, or the groups that they are sent to. Who takes some groups takes their rows, so that an
            axis that splits the groups splits the rule's `"source"` factor too.
    """

    name: str
    size: int
    shardable: bool = True
    contiguous: bool = False
    reductions: tuple[str | None, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    uneven: bool = False
    fill: float | None = None
    sequential: bool = False
    routed: str = ""

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    def reduction(self, result: int) -> str | None:
        return self.reductions[result] if self.reductions else "sum"


LocalProgram = Callable[[Any], Any]
"""Emits what a rank runs: from a `local.LocalCall`, which is built on rules and so has no name here, to its results."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator call may be split.

    Attributes:
        factors: the loops.
        operands: dims of every tensor operand, in the order of `OpCall.operands`.
        results: dims of every result; None for a result that is no tensor.
        linear: sets of operands in which the operator is jointly linear: if exactly these are partial sums
            and the others replicated, every result is a partial sum.
        local: emits the program that a rank runs on its shards; None runs the operator itself unchanged.
        free: the operator does no work (a view).
        variants: further implementations of the same call, with other factors or another local program, that a
            strategy may choose instead. A factor of a variant that bears the name of one of the rule is the same loop.
        routed: the tensors, operands counted first and then results, that lie as the data decides where a factor that
            is `routed` is split; the others lie as their dims say.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    linear: tuple[frozenset[int], ...] = ()
    local: LocalProgram | None = field(default=None, compare=False)
    free: bool = False
    variants: tuple[Rule, ...] = ()
    routed: frozenset[int] = frozenset()

    def indices(self, name: str) -> tuple[int, ...]:
        """Indices of the factor called `name`, or of all its refined parts."""
        return tuple(index for index, factor in enumerate(self.factors) if factor.base == name or factor.name == name)

    def check(self, call: OpCall) -> None:
        """Raise `RuleError` unless the products of factors are the sizes of the call's tensors, in every variant."""
        sizes_of = {factor.name: factor.size for factor in self.factors}
        for variant in self.variants:
            variant.check(call)
            for factor in variant.factors:
                if sizes_of.setdefault(factor.name, factor.size) != factor.size:
                    raise RuleError(
                        f'{call.op}: "{factor.name}" is {sizes_of[factor.name]} in one variant and {factor.size} in '
                        "another: loops that differ need names that differ."
                    )
        for kind, dims_of, metas in (("operand", self.operands, call.operands), ("result", self.results, call.results)):
            if len(dims_of) != len(metas):
                raise RuleError(f"{call.op}: the rule has {len(dims_of)} {kind}s, the call {len(metas)}.")
            for position, (dims, meta) in enumerate(zip(dims_of, metas, strict=True)):
                if dims is None or meta is None:
                    continue
                sizes = tuple(math.prod(self.factors[factor].size for factor in dim) for dim in dims)
                whole = tuple(size if dim else 1 for size, dim in zip(meta.shape, dims, strict=False))
                if len(sizes) != len(meta.shape) or sizes != whole:
                    raise RuleError(
                        f"{call.op}: {kind} {position} has shape {list(meta.shape)}, but the rule's factors make "
                        f"{list(sizes)} of it."
                    )


def refine(rule: Rule, cuts: Mapping[int, tuple[int, ...]]) -> Rule:
    """The same rule with factors split into products.

    Args:
        cuts: for a factor, the increasing chain of sizes of its outer parts; each divides the next and the
            last divides the factor's size. A factor of size 96 with cuts (3, 12) becomes 3 · 4 · 8. Variants are
            cut in their factors of the same name, if these take strided shards.

    Source: Rhino 4.3.3, candidate generation: strides are those that some view of the graph asks for.
    """
    if not cuts:
        return rule
    factors: list[Factor] = []
    parts: list[tuple[int, ...]] = []
    for index, factor in enumerate(rule.factors):
        bounds = (1, *cuts.get(index, ()), factor.size)
        sizes = [outer // inner for inner, outer in itertools.pairwise(bounds)]
        names = [factor.name] if len(sizes) == 1 else [f"{factor.name}.{part}" for part in range(len(sizes))]
        parts.append(tuple(range(len(factors), len(factors) + len(sizes))))
        factors += [replace(factor, name=name, size=size) for name, size in zip(names, sizes, strict=True)]

    def refine_dims(dims: Dims) -> Dims:
        return tuple(tuple(part for factor in dim for part in parts[factor]) for dim in dims)

    return replace(
        rule,
        factors=tuple(factors),
        operands=tuple(refine_dims(dims) for dims in rule.operands),
        results=tuple(None if dims is None else refine_dims(dims) for dims in rule.results),
        variants=tuple(refine(variant, _cuts_by_name(rule, cuts, variant)) for variant in rule.variants),
    )


def _cuts_by_name(rule: Rule, cuts: Mapping[int, tuple[int, ...]], variant: Rule) -> dict[int, tuple[int, ...]]:
    """The cuts of a rule's factors as cuts of a variant's factors of the same name."""
    named = {rule.factors[index].name: chain for index, chain in cuts.items()}
    return {
        index: named[factor.name]
        for index, factor in enumerate(variant.factors)
        if factor.name in named and factor.shardable and not factor.contiguous
    }


def specialize(rule: Rule, call: OpCall) -> Rule:
    """The rule without what no call on such element types can do.

    Raises:
        RuleError: the rule does not fit the call's shapes.
    """
    rule.check(call)
    return _without_bool_sums(_with_additive_sets(rule, call), call)


def _with_additive_sets(rule: Rule, call: OpCall) -> Rule:
    """The rule with those linear sets whose operands can be partial sums: not of truth values, not of indices."""
    inexact = [meta.dtype.is_floating_point or meta.dtype.is_complex for meta in call.operands]
    linear = tuple(operands for operands in rule.linear if all(inexact[operand] for operand in operands))
    variants = tuple(_with_additive_sets(variant, call) for variant in rule.variants)
    if (linear, variants) == (rule.linear, rule.variants):
        return rule
    return replace(rule, linear=linear, variants=variants)


def _without_bool_sums(rule: Rule, call: OpCall) -> Rule:
    """The rule without strategies that leave truth values to be added up, which no collective does.

    `aten.index_add` adds numbers along a contracted index; of truth values it is a rule for nothing.
    """
    truths = [index for index, meta in enumerate(call.results) if meta is not None and meta.dtype is torch.bool]
    if not truths:
        return rule

    def leaves_bool_sum(index: int, factor: Factor) -> bool:
        dims = [rule.results[truth] for truth in truths if factor.reduction(truth) == "sum"]
        return any(each is not None and all(index not in dim for dim in each) for each in dims)

    factors = tuple(
        replace(factor, shardable=factor.shardable and not leaves_bool_sum(index, factor))
        for index, factor in enumerate(rule.factors)
    )
    variants = tuple(_without_bool_sums(variant, call) for variant in rule.variants)
    return replace(rule, factors=factors, variants=variants)
