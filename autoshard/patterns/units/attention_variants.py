"""The further implementations of attention, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.patterns.ops._helpers import shape_of
from autoshard.patterns.rule import LocalProgram, OpCall, Rule
from autoshard.patterns.units.grouped_heads import grouped_heads
from autoshard.patterns.units.sequence import sequence_parallel


def attention_variants(
    call: OpCall, operands: Mapping[str, str], results: Sequence[str], inner: LocalProgram, **options: Any
) -> list[Rule]:
    """The variants of a rule of attention that fit the call.

    Args:
        call: the attention on whole tensors.
        operands: dims of the operands by argument name, query heads written `(h r)`, key heads `h`.
        results: dims of the results, likewise.
        inner: the local program of the rule.
        options: those of the rule, as `bind_named` takes them.
    """
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    variants = [grouped_heads(call, operands, results, inner, **options)] if heads > groups else []
    along = sequence_parallel(call, operands, results, sizes={"h": groups, "r": heads // groups}, **options)
    return [*variants, along] if along is not None else variants
