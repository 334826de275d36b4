"""Scaled dot-product attention, forward and backward: the operator of captured graphs, and the kernels of ATen by name.

Batch and heads are independent. With fewer key heads than query heads (grouped-query attention), a query head is the
product of the key head `h` and `r`, which keys lack. The queries' sequence may be sharded with whole keys and values,
whose gradients are then partial. Two variants of the rule shard the sequence of queries and keys, with keys passed in a
ring, and query heads as one factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cluster.cost import attention_backward_flops, attention_flops, price_by_flops
from autoshard.patterns.exchanging import shift, shift_axes
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import (
    aten,
    bind_named,
    operand_names,
    positions,
    result_dtype,
    shape_of,
    stretch_start,
)
from autoshard.patterns.ops.random import draw_arguments, draws, shard_index
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, LocalProgram, OpCall, Rule

# Context parallelism: queries, keys and values are sharded along the sequence, one factor `n`; keys pass in a ring.
#
# A rank keeps its stretch of queries. Stretches of keys and values are passed from rank to rank until each rank has had
# all of them; each stretch is attended to separately, and results are merged by their logsumexp. So a rank holds the
# keys of two stretches at a time; the rule itself (queries sharded, keys gathered before the operator, their gradients
# scattered after it) holds all of them. The bytes sent forward are the same; backward, keys pass once more together
# with their gradients, to the rank that they belong to. The next stretch is sent while a rank attends to the current.
#
# With a causal mask a rank attends to its own stretch causally and to earlier ones in full; results for later ones are
# discarded, since all ranks run one program.
#
# Several axes of one sequence are nested rings: a stretch passes around the innermost axis, takes a step along the next
# one, and passes around again.
#
# Source: Ring Attention with Blockwise Transformers (Liu, Zaharia, Abbeel 2023), section 3.

_SEQUENCE = {"s": "n", "t!": "n"}  # sequence dims of queries and keys in the rules of attention


def sequence_parallel(call: OpCall, operands: Mapping[str, str], results: Sequence[str], **options: Any) -> Rule | None:
    """The variant of a rule of attention, forward or backward, whose factor `n` is the sequence of queries and keys.

    Args:
        call: the attention on whole tensors.
        operands: dims of the operands by argument name, with the sequence of queries as `s` and of keys as `t!`.
        results: dims of the results, likewise.
        options: those of the rule, as for `bind_named`, with the `sizes` of its names.

    Returns:
        The variant; None if queries and keys differ in length, with a mask, a window or dropout, and for kernels that
        are not known to return one natural logarithm per query (the operator of captured graphs, flash attention and
        cuDNN do).
    """
    query, key = shape_of(call, "query"), shape_of(call, "key")
    # A mask would have to pass in stretches of both of its dims.
    plain = all(name not in operands or call.arg(name) is None for name in ("attn_mask", "attn_bias"))
    captured = _is_captured_operator(call)
    known = captured or any(kernel in call.name for kernel in ("flash", "cudnn"))
    if not known or query[2] != key[2] or not plain:
        return None
    if captured and (call.arg("window") or call.arg("dropout_p")):
        return None
    backward = "grad_out" in operand_names(call)
    reduce = {name: kinds for name, kinds in options.pop("reduce").items() if name != "s"}
    options |= {"whole": (), "contiguous": ("n",), "uneven": False}
    return bind_named(
        call,
        {name: _rename_dims(text) for name, text in operands.items()},
        [_rename_dims(text) for text in results],
        reduce=reduce | {"n": reduce["b"]},
        exchange={"n": _exchanges(call)},
        local=_ring_backward if backward else _ring_forward,
        **options,
    )


_RING_OPERANDS = ("key", "value")


def _rename_dims(text: str) -> str:
    return " ".join(_SEQUENCE.get(word, word) for word in text.split())


def _exchanges(call: OpCall) -> list[Exchange]:
    """Keys and values as one tensor; in backward, also their gradients, in the accumulation dtype."""
    names = operand_names(call)
    passed = [meta for name, meta in zip(names, call.operands, strict=True) if name in _RING_OPERANDS]
    exchanges: list[Exchange] = [("ring", sum(meta.bytes for meta in passed))]
    if "grad_out" in names:
        itemsize = call.operands[names.index("logsumexp")].dtype.itemsize
        exchanges.append(("ring_and_home", sum(math.prod(meta.shape) for meta in passed) * itemsize))
    return exchanges


@dataclass(frozen=True, slots=True)
class _RingStep:
    """One step of the ring.

    Attributes:
        operands: the local operands, with the keys and values that this rank holds at this step.
        axis: the mesh axis of their last move; None for a rank's own.
        moved: for every axis of the sequence, their distance in steps from the rank that they belong to.
    """

    operands: Sequence[Any]
    axis: int | None
    moved: Mapping[int, int]


def _ring_steps(call: LocalCall) -> Iterator[_RingStep]:
    """All steps of the ring; the tensors of the next step are sent before this step is processed."""
    names, axes = operand_names(call.call), call.axes("n")
    places = [names.index(name) for name in _RING_OPERANDS]
    stretches = [call.operands[place] for place in places]
    widths = [call.operand_shape(place)[-1] for place in places]
    moved = dict.fromkeys(axes, 0)
    turn = _RingStep(call.operands, None, dict(moved))
    # Keys and values as one tensor, sent in one message.
    packed = call.emit.cat(stretches, -1)
    for place in shift_axes([call.mesh.sizes[axis] for axis in axes]):
        axis = axes[place]
        packed = call.emit.collective(shift, packed, 1, axis=axis)
        yield turn
        moved[axis] += 1
        held = dict(zip(places, packed.split_with_sizes(widths, -1), strict=True))
        operands = [held.get(place, value) for place, value in enumerate(call.operands)]
        turn = _RingStep(operands, axis, dict(moved))
    yield turn


def _ring_forward(call: LocalCall) -> Any:
    emit, causal = call.emit, bool(call.arg("is_causal"))
    merged: tuple[Any, Any] | None = None
    rest: Sequence[Any] = ()
    for turn in _ring_steps(call):
        result, logarithm, *others = _attend(call, turn.operands, causal=causal and turn.axis is None)
        result = result.to(logarithm.dtype)  # the dtype of the kernel's logarithms
        if merged is None:
            merged, rest = (result, logarithm), others
            continue
        if causal:
            # A logarithm of -inf: results for later keys have no weight.
            logarithm = emit.where(_queries_after_keys(call, turn), logarithm, -math.inf)
        merged = _merge_attention(call, *merged, result, logarithm)
    assert merged is not None
    return (merged[0].to(result_dtype(call)), merged[1], *rest)


def _ring_backward(call: LocalCall) -> Any:
    """Backward of each stretch of keys separately, with the logarithms and results of the whole sequence."""
    emit, causal = call.emit, bool(call.arg("is_causal"))
    statistics = call.operands[operand_names(call.call).index("logsumexp")]
    query: Any = None
    passed: Any = None  # gradients of keys and values, passed with them
    rest: Sequence[Any] = ()  # the placeholder for the gradient of a mask
    moved: Mapping[int, int] = {}
    for turn in _ring_steps(call):
        moved = turn.moved
        if turn.axis is not None:
            passed = emit.collective(shift, passed, 1, axis=turn.axis)
        results = _attend(call, turn.operands, causal=causal and turn.axis is None)
        terms, rest = results[:3], results[3:]
        # In the dtype of the kernel's logarithms.
        own, *others = (each.to(statistics.dtype) for each in terms)
        packed = emit.cat(others, -1)
        if turn.axis is None:
            query, passed = own, packed
            continue
        if causal:
            behind = _queries_after_keys(call, turn)
            own, packed = (emit.where(behind, each, 0) for each in (own, packed))
        query, passed = query + own, passed + packed
    # The gradients are where their keys stopped: pass them on to the ranks that they belong to.
    for axis, steps in moved.items():
        home = -steps % call.mesh.sizes[axis]
        passed = emit.collective(shift, passed, home, axis=axis) if home else passed
    widths = [call.result_shape(index)[-1] for index in (1, 2)]
    gradients = (query, *passed.split_with_sizes(widths, -1))
    return (*(each.to(result_dtype(call, index)) for index, each in enumerate(gradients)), *rest)


def _attend(call: LocalCall, operands: Sequence[Any], causal: bool) -> Any:
    """The kernel on this rank's queries and one stretch of keys."""
    schema = call.call.argument_names
    length = call.operand_shape(operand_names(call.call).index("query"))[2]
    lengths = {name: length for name in ("max_q", "max_k") if name in schema}
    return call.run(operands=operands, is_causal=causal, **lengths)


def _queries_after_keys(call: LocalCall, turn: _RingStep) -> Any:
    """A 0-d boolean: True if this rank's queries are after the keys that it holds."""
    stretch = None
    for axis, steps in turn.moved.items():
        size = call.mesh.sizes[axis]
        place = (call.emit.coordinate(axis) - steps).remainder(size)
        stretch = place if stretch is None else stretch * size + place
    return call.position("n") > stretch


def _merge_attention(call: LocalCall, first: Any, first_log: Any, second: Any, second_log: Any) -> tuple[Any, Any]:
    """Merge attention to two sets of keys, weighted by their sums of exponentials."""
    log = first_log.logaddexp(second_log)

    def weigh(value: Any, logarithm: Any) -> Any:
        weight = (logarithm - log).exp()
        # Some kernels keep a dim of size 1.
        return value * (weight if len(weight.shape) == len(value.shape) else weight.unsqueeze(-1))

    return weigh(first, first_log) + weigh(second, second_log), log


# Grouped-query attention over more devices than key heads: every rank selects the key heads that it needs.
#
# The query heads are one factor `g`; keys and values are whole on its axes, and the local program selects the heads of
# its own queries. The gradients of keys and values are then partial sums whose terms are nearly all zero.


_GROUPED = "(h r)"  # the dim of query heads in the rules of attention


def grouped_heads(
    call: OpCall, operands: Mapping[str, str], results: Sequence[str], inner: LocalProgram, **options: Any
) -> Rule:
    """The variant of a grouped-query attention rule, forward or backward, that shards query heads as one factor.

    Args:
        call: the attention on whole tensors, with fewer key heads than query heads.
        operands: dims of the operands by argument name, with query heads as `(h r)` and key heads as `h`.
        results: dims of the results, likewise.
        inner: the local program of the rule, run with the selected keys and values.
        options: those of the rule, as for `bind_named`.
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
        local=lambda program: _pick_key_heads(program, inner),
    )


def _pick_key_heads(call: LocalCall, inner: LocalProgram) -> Any:
    emit, names = call.emit, operand_names(call.call)
    key, query = names.index("key"), names.index("query")
    groups, heads = call.operand_shape(key)[1], call.operand_shape(query)[1]
    needed = _needed_heads(call, heads, call.call.operands[query].shape[1] // groups, groups)
    picked = [
        value.index_select(1, needed) if name in ("key", "value") else value
        for name, value in zip(names, call.operands, strict=True)
    ]
    results = inner(LocalCall(call.call, call.rule, call.choices, call.mesh, emit, picked))
    if "grad_out" not in names and "grad_out_" not in names:
        return results
    gradients = list(results)
    for index in (1, 2):
        zeros = gradients[index].new_zeros(list(call.result_shape(index)))
        gradients[index] = zeros.index_add(1, needed, gradients[index])
    return tuple(gradients)


def _needed_heads(call: LocalCall, heads: int, ratio: int, groups: int) -> Any:
    """The key heads of this rank's query heads: one if all of them share it, else one per query head.

    Each key head has `ratio` query heads. Padding query heads get any existing key head.
    """
    if ratio % heads == 0:
        held = stretch_start(call, "g", heads).reshape([1])
    else:
        held = positions(call, "g", heads, call.operands[0].device)
    return held.div(ratio, rounding_mode="floor").clamp_max(groups - 1)


# The operator of captured graphs, and kernels that `torch.nn.functional.scaled_dot_product_attention` calls.
#
# A causal kernel counts queries from the start of the sequence. The operator of captured graphs takes the position of a
# rank's first query; ATen's kernels do not, so their causal queries are whole. The memory-efficient kernel pads its
# statistics per query, so its queries are whole. Overridden kernels define what a mask looks like.

_QUERY, _KEY, _VALUE, _RESULT = "b (h r) s d!", "b h t! d!", "b h t! e!", "b (h r) s e!"
_MASK = ("b", "(h r)", "s", "t!")
_NAMES = ("b", "h", "r", "s")


_KERNELS = [
    "autoshard.attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
]


@rule_maker(*_KERNELS, "aten._scaled_dot_product_flash_attention.default")
def attention(call: OpCall) -> Rule | None:
    """Forward: result, logsumexp, and what a kernel saves for its backward."""
    if not _is_supported(call):
        return None
    results = [_RESULT, _statistics_dims(call, call.results[1].shape if call.results[1] else ())]
    return _attention_rule(call, _operand_dims(call), [*results, *_opaque_results(call, 2)])


@rule_maker(*(f"{name}_backward" for name in _KERNELS), "aten._scaled_dot_product_flash_attention_backward")
def attention_backward(call: OpCall) -> Rule | None:
    """Gradients of queries, keys, values and, if wanted, the mask; linear in the incoming gradient."""
    if not _is_supported(call):
        return None
    items = _operand_dims(call)
    results = [_QUERY, _KEY, _VALUE]
    if len(call.results) == 4 and not _is_captured_operator(call):
        results.append(items.get("attn_bias", ""))
    elif len(call.results) == 4:
        # The operator of captured graphs returns an empty tensor for an unwanted gradient of the mask.
        results.append(items["attn_mask"] if call.arg("mask_gradient") else "none!")
    return _attention_rule(call, items, results, linear=[{"grad_out", "grad_out_"}])


def _is_captured_operator(call: OpCall) -> bool:
    """Return True if the call is of the operator of captured graphs."""
    return call.op.namespace == "autoshard"


def _is_supported(call: OpCall) -> bool:
    """Return True for the operator of captured graphs, and kernels without dropout and with heads in equal groups."""
    # The operator takes a seed. Kernels keep one random state for all samples and heads, so no shard knows its part.
    if _is_captured_operator(call):
        return True
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    grouped = heads == groups or ("efficient" not in call.name and heads % groups == 0)
    return call.arg("dropout_p") == 0 and grouped


def _operand_dims(call: OpCall) -> dict[str, str]:
    """Dims of all operands by argument name."""
    items = {"query": _QUERY, "key": _KEY, "value": _VALUE}
    items |= dict.fromkeys(("grad_out", "grad_out_", "out"), _RESULT)
    for name in operand_names(call):
        if name in ("attn_mask", "attn_bias"):
            items[name] = _mask_dims(shape_of(call, name), _MASK)
        elif name == "logsumexp":
            items[name] = _statistics_dims(call, shape_of(call, name))
        elif name not in items:
            items[name] = _opaque_dims(f"y{len(items)}", shape_of(call, name))
    return items


def _opaque_dims(prefix: str, shape: Sequence[int]) -> str:
    """Dims that rules ignore: random state, lengths of packed sequences."""
    return " ".join(f"{prefix}_{dim}!" for dim in range(len(shape)))


def _opaque_results(call: OpCall, first: int) -> list[str]:
    """Dims of the results from `first` on, which rules ignore."""
    return [_opaque_dims(f"x{index}", meta.shape if meta else ()) for index, meta in enumerate(call.results[first:])]


def _mask_dims(shape: Sequence[int], names: Sequence[str]) -> str:
    """Dims of a mask or bias, broadcast to batch, heads, queries and keys."""
    names = names[len(names) - len(shape) :]
    return " ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True))


def _statistics_dims(call: OpCall, shape: Sequence[int]) -> str:
    """Dims of one number per query: `[b, h, s]`, with a further dim in cuDNN."""
    # The memory-efficient kernel pads the queries' dim.
    queries = "l!" if "efficient" in call.name else "s"
    return " ".join(["b", "(h r)", queries, "1"][: len(shape)])


def _attention_rule(call: OpCall, items: dict[str, str], results: list[str], **options: Any) -> Rule:
    kept = [None if index >= 4 or not call.is_backward else "sum" for index in range(len(results))]
    # An empty tensor is not a partial sum.
    if results[-1] == "none!":
        kept[-1] = None
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    causal = bool(call.arg("is_causal"))
    options |= {
        "reduce": dict.fromkeys(_NAMES, kept),
        "whole": ("s",) if "efficient" in call.name or (causal and not _is_captured_operator(call)) else (),
        "contiguous": ("s",) if causal else (),
        "uneven": True,
    }
    sizes = {"h": groups, "r": heads // groups}
    variants = [grouped_heads(call, items, results, _attention, **options)] if heads > groups else []
    along = sequence_parallel(call, items, results, sizes=sizes, **options)
    variants += [along] if along is not None else []
    return replace(bind_named(call, items, results, sizes=sizes, local=_attention, **options), variants=tuple(variants))


@rule_maker("autoshard.attention_seed")
def attention_seed(call: OpCall) -> Rule:
    """A random number, equal on all ranks."""
    return bind("->", call, local=lambda local: local.emit.call(draws.key.default, *draw_arguments(local)))


def _attention(call: LocalCall) -> Any:
    """Run the operator on this rank's queries, with the position of its first query and its shard's dropout seed."""
    schema = call.call.argument_names
    changed: dict[str, Any] = {}
    if "max_q" in schema:
        changed["max_q"] = call.size("s")
    if call.arg("is_causal") and call.axes("s"):
        part = call.linear_index(call.axes("s"), host=True)
        # An explicit overload, as in `stretch_start`: unequal shares are found by mul.Tensor.
        changed["start"] = call.emit.call(aten.mul.Tensor, part, call.size("s"))
    if _is_captured_operator(call.call) and call.arg("dropout_p"):
        seed = call.operands[operand_names(call.call).index("seed")]
        changed["seed"] = call.emit.call(draws.key.default, seed, 0, shard_index(call))
    return call.run(**changed)


# Flash and memory-efficient attention called by name, on samples of one length or packed ones.
#
# Heads are independent, and so are samples of one length. With fewer key heads, a query head is the product of the key
# head `h` and `r`, which keys lack. Positions are whole: the kernels count them from the start, packed samples by their
# bounds, and the memory-efficient kernel pads its statistics per query.

_ONE_LENGTH = {"query": "b s! (h r) d!", "key": "b t! h d!", "value": "b t! h e!", "out": "b s! (h r) e!"}
_PACKED = {"query": "s! (h r) d!", "key": "t! h d!", "value": "t! h e!", "out": "s! (h r) e!"}
_PACKED_AS_ONE = {name: f"1 {dims}" for name, dims in _PACKED.items()}
"""The memory-efficient kernel takes packed samples as one sample."""

_UNSUPPORTED_ARGUMENTS = ("seqused_k", "alibi_slopes", "block_table", "seqlen_k")
"""Arguments that the rules do not cover: a call that passes one has no rule."""


@rule_maker("aten._flash_attention_forward.default", "aten._flash_attention_backward")
def flash_attention(call: OpCall) -> Rule | None:
    """Result, logsumexp, and states of an unused generator; or gradients."""
    packed = len(shape_of(call, "query")) == 3
    return _named_kernel_rule(call, _PACKED if packed else _ONE_LENGTH, "(h r) s!" if packed else "b (h r) s!")


@rule_maker("aten._efficient_attention_forward", "aten._efficient_attention_backward")
def efficient_attention(call: OpCall) -> Rule | None:
    """Forward and backward, with a key head per query head."""
    if shape_of(call, "query")[2] != shape_of(call, "key")[2]:
        return None
    packed = call.arg("cu_seqlens_q") is not None
    dims, statistics = (_PACKED_AS_ONE, "q! (h r) l!") if packed else (_ONE_LENGTH, "b (h r) l!")
    return _named_kernel_rule(call, dims, statistics)


def _named_kernel_rule(call: OpCall, dims: dict[str, str], statistics: str) -> Rule | None:
    """The rule, if nothing is drawn and heads are in equal groups; else None."""
    schema = call.argument_names
    heads, groups = shape_of(call, "query")[-2], shape_of(call, "key")[-2]
    unknown = any(call.arg(name) is not None for name in _UNSUPPORTED_ARGUMENTS if name in schema)
    unknown |= "return_debug_mask" in schema and call.arg("return_debug_mask")
    if call.arg("dropout_p") != 0 or unknown or heads % groups:
        return None
    items = {**dims, "grad_out": dims["out"], "grad_out_": dims["out"], "logsumexp": statistics}
    bias = call.arg("bias") if "bias" in schema else None
    if bias is not None:
        items["bias"] = _mask_dims(bias.shape, ("b", "(h r)", "s!", "t!"))
    for name in operand_names(call):
        if name not in items:
            items[name] = _opaque_dims(name, shape_of(call, name))
    backward = call.is_backward
    results = [dims["query"], dims["key"], dims["value"]] if backward else [dims["out"], statistics]
    if backward and bias is not None:
        results.append(items["bias"])
    known = len(results)
    results += _opaque_results(call, known)
    kept = ["sum" if backward and at < known else None for at in range(len(results))]
    return bind_named(
        call,
        items,
        results,
        linear=[{"grad_out", "grad_out_"}] if backward else [],
        sizes={"h": groups, "r": heads // groups},
        reduce={name: kept for name in ("b", "h", "r") if name in dims["query"]},
        uneven=True,
    )


# Prices.


def _causal_scores(rows: int, columns: int, further: Sequence[object]) -> int:
    """Return the scores of a causal call, whose first argument after the flag is a window."""
    # Fewer queries than keys may be the last ones, as with a key cache: they see all keys.
    if rows != columns:
        return rows * columns
    width = min(further[0] or columns, columns) if isinstance(further[0], int) else columns
    return rows * width - width * width // 2


price_by_flops("attention")(attention_flops(5, _causal_scores))
price_by_flops("attention_backward")(attention_backward_flops(8, _causal_scores))
