"""Rules from names instead of text, for operators whose dims follow from their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.patterns.rule import Dims, Factor, LocalProgram, Rule

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
    exchange: Mapping[str, int] | None = None,
    linear: Sequence[Collection[int]] = (),
    local: LocalProgram | None = None,
    free: bool = False,
) -> Rule:
    """A rule from the names and sizes of its factors; names of size one stand for no factor.

    Args:
        sizes: size of every name; their order is the order of the factors.
        operands: dims of every tensor operand.
        results: dims of every result; None for a result that is no tensor.
        whole: names that no mesh axis may split.
        contiguous: names of which only whole stretches may be taken.
        reductions: for a name, the kind of partial that its shards leave on every result.
        exchange: for a name, the bytes that the local program all-reduces inside when it is sharded.
        linear: sets of operands in which the operator is jointly linear.
        local: the local program; the operator itself by default.
        free: whether the operator does no work.
    """
    names = [name for name, size in sizes.items() if size != 1]
    index = {name: position for position, name in enumerate(names)}

    def dims(tensor: NamedDims) -> Dims:
        return tuple(tuple(index[name] for name in dim if sizes[name] != 1) for dim in tensor)

    return Rule(
        factors=tuple(
            Factor(
                name,
                sizes[name],
                shardable=name not in whole,
                contiguous=name in contiguous,
                reductions=(reductions or {}).get(name, ()),
                exchange=(exchange or {}).get(name, 0),
            )
            for name in names
        ),
        operands=tuple(dims(tensor) for tensor in operands),
        results=tuple(None if tensor is None else dims(tensor) for tensor in results),
        linear=tuple(frozenset(operands) for operands in linear),
        local=local,
        free=free,
    )
