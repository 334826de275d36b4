"""What a rule in text says of padding, checked when it is registered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.errors import RuleError
from autoshard.patterns.build import Padding
from autoshard.patterns.notation import Linear, Notation, Reduction, kinds_of, linear_sets
from autoshard.patterns.rule import LocalProgram


def check_padding(
    notation: Notation,
    uneven: Collection[str] | bool | None,
    fill: Mapping[str, float | None] | None,
    *,
    linear: Linear = (),
    reduce: Mapping[str, Reduction | Sequence[Reduction]] | None = None,
    local: LocalProgram | None = None,
) -> None:
    """Raise `RuleError` unless what a rule says of padding fits its text and its other options."""
    if isinstance(uneven, str):
        raise RuleError(f'rule "{notation.text}": uneven={uneven!r} is a text: give a list of names, or True for all.')
    listed = () if uneven is None or isinstance(uneven, bool) else uneven
    for option, names in (("uneven", listed), ("fill", fill or {})):
        for name in names:
            if name not in notation.names:
                raise RuleError(f'rule "{notation.text}": {option} names "{name}", which does not occur in the rule.')
            if name in notation.whole:
                raise RuleError(f'rule "{notation.text}": {option} names "{name}", which ! says is never sharded.')
    for name, number in (fill or {}).items():
        if number is not None and not isinstance(number, (int, float)):
            raise RuleError(
                f'rule "{notation.text}": fill["{name}"] is {number!r}: give a number that does not change the result, '
                "or None where padding may hold anything."
            )
    operands, results = (
        [[dim.names for dim in item] for item in side] for side in (notation.operands, notation.results)
    )
    kinds = {name: kinds_of(notation, name, kind) for name, kind in (reduce or {}).items()}
    sets = linear_sets(linear, notation.text, len(operands))
    padding = Padding(operands, results, kinds, sets, local is not None)
    for name in listed:
        if name not in (fill or {}) and not padding.has_safe_fill(name):
            raise RuleError(
                f'rule "{notation.text}": uneven names "{name}", which a result lacks, and nothing tells how to keep '
                f'padding out of it. Say with fill={{"{name}": ...}} which number in its place does not change the '
                "result (None: any), or with linear in which operands the operator is linear."
            )
