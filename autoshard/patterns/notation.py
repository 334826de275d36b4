"""The notation of rules: text is parsed once to an immutable description, and bound to the shapes of each call.

"i k, k j -> i j"         operands and results separated by commas, one token per dim; k is contracted
"... d! -> ... d!"        d! must not be sharded; ... stands for any number of dims, broadcast as torch does
"i (h d), h^ -> i h"      (h d) is a dim that is a product, major to minor; h^ may only be cut in whole stretches
"i 1, -> i"               1 is a dim of size one; an empty item is a tensor without dims
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from autoshard.errors import RuleError
from autoshard.patterns.rule import LocalProgram, OpCall, Padding, Rule, build

Linear = str | Sequence[Collection[int]]
"""Linear sets: collections of operand positions, or text such as `"0, 1+2"`: {0}, and {1, 2} jointly."""

Reduction = str | None
REDUCTIONS = ("sum", "avg", "max", "min", "product", None)

_Option = TypeVar("_Option")

ELLIPSIS = "..."
_TOKEN = re.compile(
    r"\s*(?:(?P<dots>\.\.\.)(?P<dots_whole>!?)|(?P<one>1)(?![\w!^])|(?P<name>[A-Za-z_]\w*)(?P<marks>[!^]*)|[()])"
)
_RESERVED = re.compile(r"dim\d+")  # the names of the dims that `...` stands for


@dataclass(frozen=True, slots=True)
class Dim:
    """One token: the names whose product the dim is, `("...",)` for an ellipsis, or `()` for a dim of size 1."""

    names: tuple[str, ...]

    @property
    def is_ellipsis(self) -> bool:
        return self.names == (ELLIPSIS,)


Item = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed rule.

    Attributes:
        text: the text that was parsed.
        operands: one item per tensor operand.
        results: one item per result.
        whole: names marked `!`.
        contiguous: names marked `^`.
    """

    text: str
    operands: tuple[Item, ...]
    results: tuple[Item, ...]
    whole: frozenset[str]
    contiguous: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the order in which they first occur, `...` among them."""
        return tuple(dict.fromkeys(name for item in self.operands + self.results for dim in item for name in dim.names))

    def error(self, problem: str) -> RuleError:
        """Return the error of a rule whose options do not fit it."""
        return RuleError(f'rule "{self.text}": {problem}')


@cache
def parse(text: str) -> Notation:
    """Parse the text of a rule.

    Raises:
        RuleError: the text is not a rule; the message quotes the token and its position.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f'rule "{text}" has no "->": write the operands, "->", and the results.')
    if "->" in right:
        raise RuleError(f'rule "{text}" has a second "->" at position {text.rindex("->")}.')
    whole: set[str] = set()
    contiguous: set[str] = set()
    operands = tuple(_items(text, 0, left, whole, contiguous))
    results = tuple(_items(text, len(left) + 2, right, whole, contiguous))
    return Notation(text, operands, results, frozenset(whole), frozenset(contiguous))


def _items(text: str, start: int, side: str, whole: set[str], contiguous: set[str]) -> Iterator[Item]:
    for item in side.split(","):
        yield _item(text, start, start + len(item), whole, contiguous)
        start += len(item) + 1


def _item(text: str, start: int, end: int, whole: set[str], contiguous: set[str]) -> Item:
    """Parse the tensor at `text[start:end]`, and collect the marks of its names."""
    dims: list[Dim] = []
    product: list[str] | None = None  # the names of the product that is open
    opened = start
    while text[start:end].strip():
        # The match includes spaces before a token, so its position is counted from the end.
        match = _TOKEN.match(text, start, end)
        if match is None:
            token = text[start:end].split()[0]
            raise RuleError(
                f'rule "{text}": unexpected "{token}" at position {text.index(token, start)}. A dim is a name (with ! '
                "where it must not be sharded, ^ where only whole stretches may be), ..., 1, or a product in brackets."
            )
        start, token = match.end(), match.group().strip()
        position = start - len(token)
        if token == "(":
            if product is not None:
                raise RuleError(f'rule "{text}": "(" at position {position} stands inside another product.')
            product, opened = [], position
        elif token == ")":
            if not product:
                problem = "closes nothing" if product is None else "closes an empty product"
                raise RuleError(f'rule "{text}": ")" at position {position} {problem}.')
            dims.append(Dim(tuple(product)))
            product = None
        elif product is not None and (match["dots"] or match["one"]):
            raise RuleError(f'rule "{text}": "{token}" at position {position} can not be part of a product.')
        elif match["one"]:
            dims.append(Dim(()))
        else:
            name = ELLIPSIS if match["dots"] else match["name"]
            _check_name(text, name, position, dims, product or [])
            if "!" in (match["dots_whole"] or match["marks"] or ""):
                whole.add(name)
            if "^" in (match["marks"] or ""):
                contiguous.add(name)
            if product is None:
                dims.append(Dim((name,)))
            else:
                product.append(name)
    if product is not None:
        raise RuleError(f'rule "{text}": "(" at position {opened} is never closed.')
    return tuple(dims)


def _check_name(text: str, name: str, position: int, dims: Sequence[Dim], product: Sequence[str]) -> None:
    if name in product or any(name in dim.names for dim in dims):
        raise RuleError(f'rule "{text}": "{name}" at position {position} stands twice in one tensor.')
    if _RESERVED.fullmatch(name):
        raise RuleError(
            f'rule "{text}": "{name}" at position {position} is what the dims of ... are called; rename it.'
        )


def linear_sets(linear: Linear, text: str, operands: int) -> tuple[frozenset[int], ...]:
    """Return the linear sets as sets of operand positions.

    Raises:
        RuleError: the linear sets do not parse, or name an operand that the rule `text` does not have.
    """
    if isinstance(linear, str):
        parts = [part.strip() for part in linear.split(",") if part.strip()]
        if not all(re.fullmatch(r"\d+(\s*\+\s*\d+)*", part) for part in parts):
            raise RuleError(
                f'rule "{text}": linear="{linear}" does not parse: write the positions of operands, joint ones joined '
                'by "+", such as "0, 1+2".'
            )
        sets = tuple(frozenset(int(operand) for operand in part.split("+")) for part in parts)
    else:
        sets = tuple(frozenset(operands) for operands in linear)
    for operand in frozenset().union(*sets):
        if not isinstance(operand, int) or not 0 <= operand < operands:
            raise RuleError(f'rule "{text}": linear names operand {operand!r}, but there are {operands} operands.')
    return sets


def check_options(
    notation: Notation, linear: Linear, reduce: Mapping[str, Reduction | Sequence[Reduction]] | None
) -> None:
    """Raise `RuleError` unless the options of a rule fit its text."""
    linear_sets(linear, notation.text, len(notation.operands))
    for name, kinds in (reduce or {}).items():
        if name not in notation.names:
            raise notation.error(f'reduce names "{name}", which does not occur in the rule.')
        for kind in kinds_of(notation, name, kinds):
            if kind not in REDUCTIONS:
                raise notation.error(f'reduce["{name}"] is {kind!r}: use one of {REDUCTIONS}.')


def check_padding(
    notation: Notation,
    *,
    uneven: Collection[str] | bool | None = None,
    fill: Mapping[str, float | None] | None = None,
    linear: Linear = (),
    reduce: Mapping[str, Reduction | Sequence[Reduction]] | None = None,
    local: LocalProgram | None = None,
    **_: Any,
) -> None:
    """Raise `RuleError` unless the options of a rule for padding fit its text and its other options."""
    fill = fill or {}
    if isinstance(uneven, str):
        raise notation.error(f"uneven={uneven!r} is a text: give a list of names, or True for all.")
    listed = () if uneven is None or isinstance(uneven, bool) else uneven
    for option, names in (("uneven", listed), ("fill", fill)):
        for name in names:
            if name not in notation.names:
                raise notation.error(f'{option} names "{name}", which does not occur in the rule.')
            if name in notation.whole:
                raise notation.error(f'{option} names "{name}", which ! says is never sharded.')
    for name, number in fill.items():
        if number is not None and not isinstance(number, (int, float)):
            change = "give a number that does not change the result, or None where padding may hold anything."
            raise notation.error(f'fill["{name}"] is {number!r}: {change}')
    operands, results = (
        [tuple(dim.names for dim in item) for item in side] for side in (notation.operands, notation.results)
    )
    kinds = {name: kinds_of(notation, name, kind) for name, kind in (reduce or {}).items()}
    padding = Padding(operands, results, kinds, linear_sets(linear, notation.text, len(operands)), local is not None)
    for name in listed:
        if name not in fill and not padding.has_safe_fill(name):
            raise notation.error(
                f'uneven names "{name}", which a result lacks, and nothing tells how to keep padding out of it. Say '
                f'with fill={{"{name}": ...}} which number in its place does not change the '
                "result (None: any), or with linear in which operands the operator is linear."
            )


def kinds_of(notation: Notation, name: str, kinds: Reduction | Sequence[Reduction]) -> tuple[Reduction, ...]:
    """Return the kinds of partial results, one per result, of a sharded name, from its option in `reduce`."""
    if kinds is None or isinstance(kinds, str):
        return (kinds,) * len(notation.results)
    if len(kinds) != len(notation.results):
        raise notation.error(f'reduce["{name}"] has {len(kinds)} kinds for {len(notation.results)} results.')
    return tuple(kinds)


def bind(
    notation: Notation | str,
    call: OpCall,
    *,
    linear: Linear = (),
    reduce: Mapping[str, Reduction | Sequence[Reduction]] | None = None,
    whole: Collection[str] = (),
    contiguous: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
    uneven: Collection[str] | bool | None = None,
    fill: Mapping[str, float | None] | None = None,
    **options: Any,
) -> Rule:
    """Return the rule for the shapes of one call.

    Args:
        notation: the parsed rule, or its text.
        call: the call on whole tensors.
        linear: sets of operands in which the operator is jointly linear.
        reduce: kind of partial result of a contracted name, for all results or one kind for each; "sum" where absent,
            None where the local program reduces inside.
        whole, contiguous: further names, besides those marked in the text.
        sizes: sizes of names that no shape determines.
        uneven, fill: as in `build`, with `...` for all dims that it stands for.
        options: further ones of `build`.

    Raises:
        RuleError: the rule does not fit the call.
    """
    parsed = parse(notation) if isinstance(notation, str) else notation
    check_options(parsed, linear, reduce)
    binding = _Binding(parsed, call, sizes or {})
    names = binding.names()
    dots = [name for name in names if _RESERVED.fullmatch(name)]  # the dims that `...` stands for

    def expand_marks(marks: Collection[str]) -> set[str]:
        return {*marks, *(dots if ELLIPSIS in marks else ())}

    def expand_options(options: Mapping[str, _Option]) -> dict[str, _Option]:
        return {**{name: options[ELLIPSIS] for name in dots if ELLIPSIS in options}, **options}

    return build(
        {name: binding.sizes[name] for name in names},
        operands=[binding.dims(tensor, broadcast=True) for tensor in binding.operands],
        results=[None if tensor is None else binding.dims(tensor, broadcast=False) for tensor in binding.results],
        linear=linear_sets(linear, parsed.text, len(call.operands)),
        reductions=expand_options({name: kinds_of(parsed, name, kinds) for name, kinds in (reduce or {}).items()}),
        whole=expand_marks({*parsed.whole, *whole}),
        contiguous=expand_marks({*parsed.contiguous, *contiguous}),
        uneven=uneven if uneven is None or isinstance(uneven, bool) else expand_marks(uneven).intersection(names),
        fill=expand_options(fill or {}),
        **options,
    )


NamedShape = list[tuple[tuple[str, ...], int]]
"""A tensor in a rule: the names and the size of every dim."""


def _expand_ellipsis(item: Item, shape: tuple[int, ...], extra: int, most: int) -> NamedShape:
    """Return the item with its ellipsis, of `extra` dims, expanded; `most` is the length of the longest ellipsis."""
    names: list[tuple[str, ...]] = []
    for dim in item:
        # Aligned to the right, as torch broadcasts: dim0 is the first dim of the longest ellipsis.
        dots = (f"dim{index}" for index in range(most - extra, most))
        names += [(name,) for name in dots] if dim.is_ellipsis else [dim.names]
    return list(zip(names, shape, strict=True))


class _Binding:
    """The tensors of a rule and the sizes of its names for one call."""

    def __init__(self, notation: Notation, call: OpCall, sizes: Mapping[str, int]) -> None:
        self.notation = notation
        self.call = call
        operands = self._match_items("operand", notation.operands, [meta.shape for meta in call.operands])
        results = self._match_items(
            "result", notation.results, [None if meta is None else meta.shape for meta in call.results]
        )
        most = max((extra for *_, extra in filter(None, operands + results)), default=0)
        self.operands = [_expand_ellipsis(*matched, most) for matched in operands if matched is not None]
        self.results = [None if matched is None else _expand_ellipsis(*matched, most) for matched in results]
        self.sizes = dict(sizes)
        self._single_sizes()
        self._product_sizes()

    def _error(self, problem: str) -> RuleError:
        return RuleError(f'rule "{self.notation.text}" does not fit {self.call.op}: {problem}')

    def _match_items(
        self, kind: str, items: tuple[Item, ...], shapes: Sequence[tuple[int, ...] | None]
    ) -> list[tuple[Item, tuple[int, ...], int] | None]:
        """Return item, shape and number of dims in the ellipsis of every tensor; None for what is not a tensor."""
        # Empty text parses as one item without dims: drop it where the call has no tensors on this side.
        if not shapes and items == ((),):
            items = ()
        if len(items) != len(shapes):
            raise self._error(f"it has {len(items)} {kind}s, the call {len(shapes)}.")
        return [
            None if shape is None else (item, shape, self._ellipsis_ndim(f"{kind} {position}", item, shape))
            for position, (item, shape) in enumerate(zip(items, shapes, strict=True))
        ]

    def _ellipsis_ndim(self, place: str, item: Item, shape: tuple[int, ...]) -> int:
        """Return the number of dims that the ellipsis of an item stands for; check the dims written as 1."""
        dots = [position for position, dim in enumerate(item) if dim.is_ellipsis]
        extra = len(shape) - len(item) + len(dots)
        if extra < 0 or (extra and not dots):
            raise self._error(f"{place} has {len(item) - len(dots)} named dims there, but shape {list(shape)} here.")
        for position, dim in enumerate(item):
            behind = bool(dots) and position > dots[0]  # one token, the ellipsis, stands for `extra` dims
            if not dim.names and shape[position + (extra - 1 if behind else 0)] != 1:
                raise self._error(f"{place} has a 1 where shape {list(shape)} has another size.")
        return extra

    def _tensors(self) -> Iterator[NamedShape]:
        yield from self.operands
        yield from (result for result in self.results if result is not None)

    def _single_sizes(self) -> None:
        """Set the sizes of names that are a whole dim; size 1 is broadcast to the size in other tensors."""
        for tensor in self._tensors():
            for names, size in tensor:
                if len(names) == 1:
                    known = self.sizes.get(names[0], 1)
                    if 1 not in (known, size) and known != size:
                        raise self._error(f'"{names[0]}" is {known} in one place and {size} in another.')
                    self.sizes[names[0]] = size if known == 1 else known

    def _product_sizes(self) -> None:
        """Set the sizes of names in products, as long as a product has only one unknown."""
        products = {(names, size) for tensor in self._tensors() for names, size in tensor if len(names) > 1}
        progress = True
        while progress:
            progress = False
            for names, size in products:
                unknown = [name for name in names if name not in self.sizes]
                known = math.prod(self.sizes[name] for name in names if name in self.sizes)
                if len(unknown) == 1 and known > 0 and size % known == 0:
                    self.sizes[unknown[0]] = size // known
                    progress = True
        for names, size in products:
            unknown = [name for name in names if name not in self.sizes]
            if unknown:
                raise self._error(f'the size of "{unknown[0]}" in ({" ".join(names)}) of size {size} can not be told.')
            if math.prod(self.sizes[name] for name in names) != size:
                parts = " · ".join(f"{name} {self.sizes[name]}" for name in names)
                raise self._error(f"({parts}) is not {size}.")

    def dims(self, tensor: NamedShape, *, broadcast: bool) -> list[tuple[str, ...]]:
        """Return the names of every dim; a broadcast dim of size 1, which only operands have, has none."""
        for names, size in tensor:
            if not broadcast and len(names) == 1 and size == 1 and self.sizes[names[0]] != 1:
                raise self._error(f'"{names[0]}" is {self.sizes[names[0]]}, but 1 in a result.')
        return [() if size == 1 else names for names, size in tensor]

    def names(self) -> list[str]:
        """Return all names in the order in which they first occur."""
        return list(dict.fromkeys(name for tensor in self._tensors() for names, _ in tensor for name in names))
