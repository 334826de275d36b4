"""Rules: which factors make up the dims of an operator's operands and results.

A factor is an indivisible loop of the operator, named as in an einsum: `mm` is `i k, k j -> i j`. Sharding a
factor over a mesh axis shards every dim that contains it. Where a result lacks the factor, it is contracted and the
result is partial. A planner needs to know no more about an operator.

Source: the factors of GSPMD and Shardy; Rhino 4.1 for dims that are products, whose inner factors become strided
shards.

`build` makes rules of names, for operators whose dims follow from their arguments; `notation` makes them of text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from autoshard.errors import RuleError
from autoshard.patterns._torch import OpOverload

_Leaf = TypeVar("_Leaf")

Dims = tuple[tuple[int, ...], ...]
"""For every dim of a tensor, the indices of the factors whose product it is, major to minor."""

Exchange = tuple[str, int] | tuple[str, int, int]
"""A collective inside a local program: its kind, such as `"all_gather"`, the bytes of the whole tensor, and the number
of times it runs if more than one."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The shape and dtype of a tensor, which rules look at in place of the tensor.

    Attributes:
        strides: strides of the whole tensor, for operators whose results depend on them; else None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the strides, which are known, are those of a row-major tensor."""
        assert self.strides is not None
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


# Torch factors the transpose of a contiguous matrix, and the matrix itself otherwise. Autograd's formulas in a captured
# graph check the matrix for which of the two it was.
FACTORS_BY_LAYOUT = frozenset({"aten::_linalg_det", "aten::_linalg_slogdet", "aten::_linalg_solve_ex"})


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator, tensors replaced by their `TensorMeta`, lists by tuples (so that it is hashable)."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[TensorMeta | None, ...]

    @property
    def name(self) -> str:
        """The operator's name without its overload, such as `aten::mm`."""
        return self.op._schema.name

    @property
    def is_backward(self) -> bool:
        """True if the operator's name contains "backward"."""
        return "backward" in self.name

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of all arguments in the operator's schema, passed or not."""
        return tuple(argument.name for argument in self.op._schema.arguments)

    @property
    def operands(self) -> tuple[TensorMeta, ...]:
        """The tensor operands in the order of `args` and `kwargs`, lists included."""
        return tuple(leaves((self.args, tuple(value for _, value in self.kwargs)), TensorMeta))

    @property
    def result(self) -> TensorMeta:
        """The first result, which must be a tensor."""
        meta = self.results[0]
        assert meta is not None, self.op
        return meta

    @property
    def shapes_text(self) -> str:
        """The shapes of the operands, for messages."""
        return ", ".join(str(list(meta.shape)) for meta in self.operands) or "no tensors"

    def arg(self, name: str) -> Any:
        """Return the argument that the operator's schema calls `name`; its default if it was not passed."""
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                default = argument.default_value if argument.has_default_value() else None
                # As in `args`, a list is a tuple: `aten.amax` has dim=[] by default.
                return dict(self.kwargs).get(name, tuple(default) if isinstance(default, list) else default)
        raise RuleError(f"{self.op} has no argument {name!r}.")


def is_inexact(dtype: torch.dtype) -> bool:
    """Return True for floating and complex dtypes; no others have partial sums."""
    return dtype.is_floating_point or dtype.is_complex


def leaves(value: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """Yield the instances of a type in nested tuples and lists, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item, kind)


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an operator.

    Attributes:
        name: the loop's name in the rule; a refined part of `j` is called `j.0`, `j.1`, ...
        size: number of steps of the loop.
        shardable: True if a mesh axis may split it.
        contiguous: True if shards must be contiguous stretches (no strided shards), because the local program counts
            positions from the start of its stretch.
        reductions: for every result that lacks the factor, its kind of partial result if the factor is sharded; None
            where the local program reduces inside, so that the result is whole on every rank. Empty means "sum"
            everywhere.
        exchanges: the collectives inside the local program when only this factor is sharded: the kind in the cost
            model, and the bytes of the whole tensor that they reduce or gather. In a `"ring"`, parts are passed from
            rank to rank until each rank has had all; in a `"ring_and_home"` once more, back to their first rank. For a
            `"gather_of_each"` (an all-gather) and an `"exchange_of_each"` (an all-to-all), the bytes are those that
            every rank sends, for any number of ranks.
        uneven: True if an axis that does not divide the factor may split it too: the local program handles padding
            after the factor's end, which may hold anything.
        fill: the number that replaces padding of operands along the factor; None where padding may hold anything.
        sequential: True if the operator runs the steps of the loop in sequence, and reads the operands that lack the
            factor again at each step.
        routed: `"source"` or `"group"` for a loop that places routed rows (see `specs.spec.Routed`): the tokens that
            rows come from, or the groups that they are sent to. A rank holds the rows of its groups, so an axis that
            splits the groups also splits the rule's `"source"` factor.
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


# The argument is a `LocalCall`, whose module imports this one.
LocalProgram = Callable[[Any], Any]
"""Emits the program of a rank for a `local.LocalCall`, and returns the local results."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The ways to split one operator call.

    Attributes:
        factors: the loops.
        operands: dims of every tensor operand, in the order of `OpCall.operands`.
        results: dims of every result; None for a result that is no tensor.
        linear: sets of operands in which the operator is jointly linear: if exactly these are partial sums
            and the others replicated, every result is a partial sum.
        local: emits the program that a rank runs on its shards; None runs the operator itself unchanged.
        free: True if the operator does no work (a view).
        variants: alternative implementations of the same call, with other factors or another local program. Factors of
            one name are the same loop.
        routed: indices of the tensors (operands, then results) that are `Routed` where a `routed` factor is split; the
            placement of the others follows from their dims.
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
        """Return the indices of the factor called `name`, or of all its refined parts."""
        return tuple(index for index, factor in enumerate(self.factors) if factor.base == name or factor.name == name)

    def check(self, call: OpCall) -> None:
        """Raise `RuleError` unless products of factors equal the sizes of the call's tensors, in every variant."""
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
                # A dim without factors is whole on every rank, and may have any size.
                whole = tuple(size if dim else 1 for size, dim in zip(meta.shape, dims, strict=False))
                if len(sizes) != len(meta.shape) or sizes != whole:
                    raise RuleError(
                        f"{call.op}: {kind} {position} has shape {list(meta.shape)}, but the rule's factors make "
                        f"{list(sizes)} of it."
                    )


def refine(rule: Rule, cuts: Mapping[int, tuple[int, ...]]) -> Rule:
    """Return the same rule with factors split into products.

    Args:
        cuts: factor -> increasing sizes of its outer parts; each divides the next, and the last divides the factor's
            size. A factor of size 96 with cuts (3, 12) becomes 3 · 4 · 8. Factors of the same name in variants are cut
            alike.

    Source: Rhino 4.3.3, candidate generation: strides are those of the graph's views.
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

    def variant_cuts(variant: Rule) -> dict[int, tuple[int, ...]]:
        named = {rule.factors[index].name: chain for index, chain in cuts.items()}
        # The inner part of a cut is a strided shard, which a contiguous factor does not allow.
        return {
            index: named[factor.name]
            for index, factor in enumerate(variant.factors)
            if factor.name in named and factor.shardable and not factor.contiguous
        }

    def refine_dims(dims: Dims) -> Dims:
        return tuple(tuple(part for factor in dim for part in parts[factor]) for dim in dims)

    return replace(
        rule,
        factors=tuple(factors),
        operands=tuple(refine_dims(dims) for dims in rule.operands),
        results=tuple(None if dims is None else refine_dims(dims) for dims in rule.results),
        variants=tuple(refine(variant, variant_cuts(variant)) for variant in rule.variants),
    )


def specialize(rule: Rule, call: OpCall) -> Rule:
    """Return the rule without strategies that are impossible for the dtypes of a call.

    Raises:
        RuleError: the rule does not fit the call's shapes.
    """
    rule.check(call)
    return _without_impossible_sums(rule, call)


def _without_impossible_sums(rule: Rule, call: OpCall) -> Rule:
    # Booleans and integers have no partial sums.
    inexact = [is_inexact(meta.dtype) for meta in call.operands]
    linear = tuple(operands for operands in rule.linear if all(inexact[operand] for operand in operands))
    # Collectives do not sum booleans: `aten.index_add` along a contracted index cannot be split for them.
    truths = [index for index, meta in enumerate(call.results) if meta is not None and meta.dtype is torch.bool]

    def leaves_bool_sum(index: int, factor: Factor) -> bool:
        dims = [rule.results[truth] for truth in truths if factor.reduction(truth) == "sum"]
        return any(each is not None and all(index not in dim for dim in each) for each in dims)

    factors = tuple(
        replace(factor, shardable=False) if factor.shardable and leaves_bool_sum(index, factor) else factor
        for index, factor in enumerate(rule.factors)
    )
    variants = tuple(_without_impossible_sums(variant, call) for variant in rule.variants)
    if (factors, linear, variants) == (rule.factors, rule.linear, rule.variants):
        return rule
    return replace(rule, factors=factors, linear=linear, variants=variants)


NamedDims = Sequence[str | Sequence[str]]
"""For every dim of a tensor, the name of its factor, or the names of its factors, major to minor."""

_Products = tuple[tuple[str, ...], ...]
"""`NamedDims` with a tuple of names for every dim."""


def build(
    sizes: Mapping[str, int],
    operands: Sequence[NamedDims],
    results: Sequence[NamedDims | None],
    *,
    whole: Collection[str] = (),
    contiguous: Collection[str] = (),
    reductions: Mapping[str, tuple[str | None, ...]] | None = None,
    exchange: Mapping[str, int | Sequence[Exchange]] | None = None,
    linear: Sequence[Collection[int]] = (),
    local: LocalProgram | None = None,
    free: bool = False,
    uneven: Collection[str] | bool | None = None,
    fill: Mapping[str, float | None] | None = None,
) -> Rule:
    """Return a rule from the names and sizes of its factors; names of size 1 have no factor.

    For `variants` or `routed` tensors, use `dataclasses.replace` on the result.

    Args:
        sizes: size of every name; their order is the order of the factors.
        operands: dims of every tensor operand.
        results: dims of every result; None for a result that is no tensor.
        whole: names that no mesh axis may split.
        contiguous: names that may only be split into contiguous stretches.
        reductions: name -> kind of partial result, for every result, if it is sharded.
        exchange: name -> collectives inside the local program if it is sharded, as in `Factor.exchanges`; a number is
            an all-reduce of that many bytes.
        linear: sets of operands in which the operator is jointly linear.
        local: the local program; the operator itself by default.
        free: True if the operator does no work.
        uneven: names that an axis may split without dividing them, if the rule implies how to keep padding out of
            results: every result has the name, or the result is a sum that is linear in operands that all have it, to
            which zeros add nothing. True for all names; by default all without a local program, none with one.
        fill: further such names, with the number that replaces the padding of operands: 0 for a sum, minus infinity for
            a maximum, None where padding may hold anything. (Padding of indices is always replaced by 0.)
    """
    names = [name for name, size in sizes.items() if size != 1]
    index = {name: position for position, name in enumerate(names)}

    def dims(tensor: _Products) -> Dims:
        return tuple(tuple(index[name] for name in dim if sizes[name] != 1) for dim in tensor)

    factors_of = [_products(tensor) for tensor in operands]
    factors_of_results = [None if tensor is None else _products(tensor) for tensor in results]
    padding = Padding(factors_of, factors_of_results, reductions or {}, linear, local is not None)
    if uneven is None:
        # For the operator itself, the rule tells how to handle padding; a local program has to opt in.
        uneven = local is None
    candidates = (names if uneven else ()) if isinstance(uneven, bool) else uneven
    fills = {name: padding.fill(name) for name in candidates if padding.has_safe_fill(name)} | dict(fill or {})
    return Rule(
        factors=tuple(
            Factor(
                name,
                sizes[name],
                shardable=name not in whole,
                contiguous=name in contiguous,
                reductions=(reductions or {}).get(name, ()),
                exchanges=_exchanges((exchange or {}).get(name, 0)),
                uneven=name in fills,
                fill=fills.get(name),
            )
            for name in names
        ),
        operands=tuple(dims(tensor) for tensor in factors_of),
        results=tuple(None if tensor is None else dims(tensor) for tensor in factors_of_results),
        linear=tuple(frozenset(operands) for operands in linear),
        local=local,
        free=free,
    )


def _products(tensor: NamedDims) -> _Products:
    return tuple((dim,) if isinstance(dim, str) else tuple(dim) for dim in tensor)


def _exchanges(exchange: int | Sequence[Exchange]) -> tuple[Exchange, ...]:
    if isinstance(exchange, int):
        return (("all_reduce", exchange),) if exchange else ()
    return tuple(exchange)


@dataclass(frozen=True, slots=True)
class Padding:
    """How a rule handles padding after the end of a factor; attributes as the arguments of `build`."""

    operands: Sequence[_Products]
    results: Sequence[_Products | None]
    reductions: Mapping[str, tuple[str | None, ...]]
    linear: Sequence[Collection[int]]
    has_program: bool

    def has_safe_fill(self, name: str) -> bool:
        """Return True if padding does not reach the results, as it is or replaced by zeros."""
        kinds = self._kinds(name)
        if not kinds:
            return True
        if kinds == {None}:
            # The result is whole whatever a rank holds; a program that reduces inside must handle padding itself.
            return not self.has_program
        # A step that is zero in all operands of a linear set adds zero to the sum.
        return kinds == {"sum"} and any(
            group and all(_has(self.operands[operand], name) for operand in group) for group in self.linear
        )

    def fill(self, name: str) -> float | None:
        """Return 0 where the factor is summed over, so that padding adds nothing; None where padding does not mix."""
        return 0.0 if self._kinds(name) == {"sum"} else None

    def _kinds(self, name: str) -> set[str | None]:
        """Return the reductions of the results that lack the factor; none where no operand has it."""
        if not any(_has(dims, name) for dims in self.operands):
            return set()
        kinds = self.reductions.get(name) or ("sum",) * len(self.results)
        return {
            kind for kind, dims in zip(kinds, self.results, strict=True) if dims is not None and not _has(dims, name)
        }


def _has(dims: _Products, name: str) -> bool:
    return any(name in dim for dim in dims)
