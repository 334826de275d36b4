"""Rules from names instead of text, for operators whose dims follow from their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.patterns.rule import Dims, Exchange, Factor, LocalProgram, Rule

NamedDims = Sequence[Sequence[str]]
"""For every dim of a tensor, the names of the factors whose product it is, major to minor."""


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
    """A rule from the names and sizes of its factors; names of size one stand for no factor.

    Args:
        sizes: size of every name; their order is the order of the factors.
        operands: dims of every tensor operand.
        results: dims of every result; None for a result that is no tensor.
        whole: names that no mesh axis may split.
        contiguous: names of which only whole stretches may be taken.
        reductions: for a name, the kind of partial that its shards leave on every result.
        exchange: for a name, the collectives that the local program runs inside when it is sharded, as pairs of
            kind and bytes of the whole tensor; a number stands for so many bytes all-reduced.
        linear: sets of operands in which the operator is jointly linear.
        local: the local program; the operator itself by default.
        free: whether the operator does no work.
        variants: further implementations of the same call.
        uneven: names that an axis may split that does not divide them, where what follows from the rule says how to
            keep padding out of the results: no result lacks the name, or zeros add nothing to a sum that is linear in
            operands that all have it. True for all names; by default all without a local program, none with one.
        fill: further such names, with what to replace the padding of operands by: 0 where a sum is taken, minus
            infinity for a maximum, None where padding may hold anything. (Padding of indices is always replaced by 0.)
        routed: tensors, operands counted first and then results, that the data places where one of the names `"source"`
            and `"group"` is split (see `Factor.routed`).
    """
    names = [name for name, size in sizes.items() if size != 1]
    index = {name: position for position, name in enumerate(names)}

    def dims(tensor: NamedDims) -> Dims:
        return tuple(tuple(index[name] for name in dim if sizes[name] != 1) for dim in tensor)

    padding = Padding(operands, results, reductions or {}, linear, local is not None)
    asked = (names if local is None else ()) if uneven is None else names if uneven is True else uneven or ()
    fills = {name: padding.fill(name) for name in asked if padding.has_safe_fill(name)} | dict(fill or {})
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
        operands=tuple(dims(tensor) for tensor in operands),
        results=tuple(None if tensor is None else dims(tensor) for tensor in results),
        linear=tuple(frozenset(operands) for operands in linear),
        local=local,
        free=free,
        variants=tuple(variants),
        routed=frozenset(routed),
    )


def _exchanges(exchange: int | Sequence[Exchange]) -> tuple[Exchange, ...]:
    if isinstance(exchange, int):
        return (("all_reduce", exchange),) if exchange else ()
    return tuple(exchange)


class Padding:
    """What follows from a rule about padding behind the end of a factor."""

    def __init__(
        self,
        operands: Sequence[NamedDims],
        results: Sequence[NamedDims | None],
        reductions: Mapping[str, tuple[str | None, ...]],
        linear: Sequence[Collection[int]],
        own_program: bool,
    ) -> None:
        self.operands = operands
        self.results = results
        self.reductions = reductions
        self.linear = linear
        self.own_program = own_program

    def has_safe_fill(self, name: str) -> bool:
        """Whether zeros or nothing at all in the place of padding keep it out of the results."""
        kinds = self._kinds(name)
        if not kinds:
            return True
        if kinds == {None}:
            return not self.own_program  # a result that is whole, whatever a rank holds
        return kinds == {"sum"} and any(
            group and all(_has(self.operands[one], name) for one in group) for group in self.linear
        )

    def fill(self, name: str) -> float | None:
        """Zero where a sum is taken over the factor, so that padding adds nothing; None where it is not mixed."""
        return 0.0 if self._kinds(name) == {"sum"} else None

    def _kinds(self, name: str) -> set[str | None]:
        """How results that lack the factor are put together from ranks; nothing where no operand has it either."""
        if not any(_has(dims, name) for dims in self.operands):
            return set()
        kinds = self.reductions.get(name) or ("sum",) * len(self.results)
        return {
            kind for kind, dims in zip(kinds, self.results, strict=True) if dims is not None and not _has(dims, name)
        }


def _has(dims: NamedDims, name: str) -> bool:
    return any(name in dim for dim in dims)
