"""Rules made of names instead of text, for operators whose dims follow from their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autoshard.patterns.rule import Dims, Exchange, Factor, LocalProgram, Rule

NamedDims = Sequence[str | Sequence[str]]
"""For every dim of a tensor, the name of its factor, or the names of several whose product it is, major to minor."""

_Products = tuple[tuple[str, ...], ...]
"""The same with names in tuples throughout."""


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
    variants: Sequence[Rule] = (),
    uneven: Collection[str] | bool | None = None,
    fill: Mapping[str, float | None] | None = None,
    routed: Collection[int] = (),
) -> Rule:
    """Return a rule from the names and sizes of its factors; a name of size one stands for no factor.

    Args:
        sizes: size of every name; their order is the order of the factors.
        operands: dims of every tensor operand.
        results: dims of every result; None for a result that is no tensor.
        whole: names that no mesh axis may split.
        contiguous: names that may only be split in whole stretches.
        reductions: by name, the kind of partial result that its shards leave on every result.
        exchange: by name, the collectives inside the local program when it is sharded, as in `Factor.exchanges`; a
            number stands for an all-reduce of so many bytes.
        linear: sets of operands in which the operator is jointly linear.
        local: the local program; the operator itself by default.
        free: True if the operator does no work.
        variants: further implementations of the same call.
        uneven: names that an axis may split without dividing them, where the rule itself tells how to keep padding out
            of the results: no result lacks the name, or zeros add nothing to a sum that is linear in operands that all
            have it. True for all names; by default all without a local program, none with one.
        fill: further such names, with the number that replaces the padding of operands: 0 where a sum is taken, minus
            infinity for a maximum, None where padding may hold anything. (Padding of indices is always replaced by 0.)
        routed: tensors, operands counted first and then results, whose placement the data decides where one of the
            names `"source"` and `"group"` is split (see `Factor.routed`).
    """
    names = [name for name, size in sizes.items() if size != 1]
    index = {name: position for position, name in enumerate(names)}

    def dims(tensor: _Products) -> Dims:
        return tuple(tuple(index[name] for name in dim if sizes[name] != 1) for dim in tensor)

    factors_of = [_products(tensor) for tensor in operands]
    factors_of_results = [None if tensor is None else _products(tensor) for tensor in results]
    padding = Padding(factors_of, factors_of_results, reductions or {}, linear, local is not None)
    if uneven is None:
        # The operator itself copes with padding as far as the rule tells; a local program has to promise it.
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
                routed=name if routed and name in ("source", "group") else "",
            )
            for name in names
        ),
        operands=tuple(dims(tensor) for tensor in factors_of),
        results=tuple(None if tensor is None else dims(tensor) for tensor in factors_of_results),
        linear=tuple(frozenset(operands) for operands in linear),
        local=local,
        free=free,
        variants=tuple(variants),
        routed=frozenset(routed),
    )


def _products(tensor: NamedDims) -> _Products:
    return tuple((dim,) if isinstance(dim, str) else tuple(dim) for dim in tensor)


def _exchanges(exchange: int | Sequence[Exchange]) -> tuple[Exchange, ...]:
    if isinstance(exchange, int):
        return (("all_reduce", exchange),) if exchange else ()
    return tuple(exchange)


@dataclass(frozen=True, slots=True)
class Padding:
    """The consequences of a rule for padding behind the end of a factor; attributes as the arguments of `build`."""

    operands: Sequence[_Products]
    results: Sequence[_Products | None]
    reductions: Mapping[str, tuple[str | None, ...]]
    linear: Sequence[Collection[int]]
    has_program: bool

    def has_safe_fill(self, name: str) -> bool:
        """Return True if zeros, or anything at all, in the place of padding stay out of the results."""
        kinds = self._kinds(name)
        if not kinds:
            return True
        if kinds == {None}:
            # The result is whole whatever a rank holds; a program that reduces inside has to see to padding itself.
            return not self.has_program
        # A step that is zero in all operands of a linear set adds zero to the sum.
        return kinds == {"sum"} and any(
            group and all(_has(self.operands[operand], name) for operand in group) for group in self.linear
        )

    def fill(self, name: str) -> float | None:
        """Return zero where a sum is taken over the factor, so that padding adds nothing; None where nothing mixes."""
        return 0.0 if self._kinds(name) == {"sum"} else None

    def _kinds(self, name: str) -> set[str | None]:
        """Return the reductions of the results that lack the factor; nothing where no operand has it either."""
        if not any(_has(dims, name) for dims in self.operands):
            return set()
        kinds = self.reductions.get(name) or ("sum",) * len(self.results)
        return {
            kind for kind, dims in zip(kinds, self.results, strict=True) if dims is not None and not _has(dims, name)
        }


def _has(dims: _Products, name: str) -> bool:
    return any(name in dim for dim in dims)
