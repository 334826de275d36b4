"""The variants of attention, forward and backward: along the sequence, and by query heads alone.

Grouped-query attention over more devices than there are key heads: every rank takes the key heads that it needs.

The query heads are one factor `g`; keys and values are whole on its axes, and the local program picks from them the
heads of its own queries. The gradients of keys and values are then partial sums, nearly all of whose terms are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import bind_named, operand_names, shape_of
from autoshard.patterns.ops._positions import positions, stretch_start
from autoshard.patterns.rule import LocalProgram, OpCall, Rule
from autoshard.patterns.units.sequence import sequence_parallel

_GROUPED = "(h r)"  # how the rules of attention write the dim of query heads


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


def grouped_heads(
    call: OpCall, operands: Mapping[str, str], results: Sequence[str], inner: LocalProgram, **options: Any
) -> Rule:
    """The variant of a grouped-query attention rule, forward or backward, that shards query heads as one factor.

    Args:
        call: the attention on whole tensors, with fewer key heads than query heads.
        operands: dims of the operands by argument name, query heads written `(h r)`, key heads `h`.
        results: dims of the results, likewise.
        inner: the local program of the rule, for operands of which keys and values have been picked.
        options: those of the rule, as `bind_named` takes them.
    """
    merged = {name: text.replace(_GROUPED, "g") for name, text in operands.items()}
    reduce = options.pop("reduce")
    return bind_named(
        call,
        merged,
        [text.replace(_GROUPED, "g") for text in results],
        **options
        | {
            "whole": (*options.get("whole", ()), "h"),
            "contiguous": (*options.get("contiguous", ()), "g"),
            "uneven": ("b", "s"),
        },
        reduce={name: kinds for name, kinds in (reduce | {"g": reduce["h"]}).items() if name not in ("h", "r")},
        local=lambda program: _local(program, inner),
    )


def _local(call: LocalCall, inner: LocalProgram) -> Any:
    emit, names = call.emit, operand_names(call.call)
    key, query = names.index("key"), names.index("query")
    groups, heads = call.operand_shape(key)[1], call.operand_shape(query)[1]
    needed = _needed_heads(call, heads, call.call.operands[query].shape[1] // groups, groups)
    picked = [
        emit.index_select(value, 1, needed) if name in ("key", "value") else value
        for name, value in zip(names, call.operands, strict=True)
    ]
    results = inner(LocalCall(call.call, call.rule, call.choices, call.mesh, emit, picked))
    if "grad_out" not in names and "grad_out_" not in names:
        return results
    gradients = list(results)
    for index in (1, 2):
        zeros = emit.new_zeros(gradients[index], list(call.result_shape(index)))
        gradients[index] = emit.index_add(zeros, 1, needed, gradients[index])
    return tuple(gradients)


def _needed_heads(call: LocalCall, heads: int, ratio: int, groups: int) -> Any:
    """The key heads of this rank's query heads, `ratio` of which share one: one if all do, else one for each.

    Query heads that are padding, behind the last one, get some key head that there is.
    """
    emit = call.emit
    if ratio % heads == 0:
        held = emit.reshape(stretch_start(call, "g", heads), [1])
    else:
        held = positions(call, "g", heads, call.operands[0].device)
    return emit.clamp_max(emit.div(held, ratio, rounding_mode="floor"), groups - 1)
