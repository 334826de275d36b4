"""Scaled dot-product attention, forward and backward: the operator of captured graphs, and the kernels of ATen by name.

Batch and heads are independent. Fewer heads of keys than of queries (grouped-query attention) make a query head the
product of the key head `h` and its share `r`, which keys lack. The queries' sequence may be sharded too, keys and
values being whole: their gradients are then partial, as autograd of a contracted dim. A causal kernel counts queries
from the start of the sequence; the operator of captured graphs is told where a rank's queries begin. ATen's kernels
are not, so that their causal queries stay whole. The memory-efficient kernel pads what it keeps of each query, so that
its queries are not sharded at all, and what a mask must look like for overridden kernels is theirs to say. Keys may go
round instead (`units.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._draws import draws
from autoshard.patterns.ops._helpers import aten, bind_named, operand_names, shape_of
from autoshard.patterns.ops.random import draw_arguments, shard_index
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.units.attention import grouped_heads, sequence_parallel

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
    """Forward: result, logarithm of the sum of exponentials, and what a kernel keeps for its backward."""
    if not _is_supported(call):
        return None
    results = [_RESULT, _statistics_dims(call, call.results[1].shape if call.results[1] else ())]
    return _attention_rule(call, _operand_dims(call), [*results, *_opaque_results(call, 2)])


@rule_maker(*(f"{name}_backward" for name in _KERNELS), "aten._scaled_dot_product_flash_attention_backward")
def attention_backward(call: OpCall) -> Rule | None:
    """Gradients of queries, keys, values and, where asked for, the mask; linear in the incoming gradient."""
    if not _is_supported(call):
        return None
    items = _operand_dims(call)
    results = [_QUERY, _KEY, _VALUE]
    if len(call.results) == 4:
        results.append(_mask_gradient_dims(call, items))
    return _attention_rule(call, items, results, linear=[{"grad_out", "grad_out_"}])


def _mask_gradient_dims(call: OpCall, items: dict[str, str]) -> str:
    """Dims of the gradient of the mask; the operator of captured graphs gives no elements where none is asked for."""
    if not _is_captured_operator(call):
        return items.get("attn_bias", "")
    return items["attn_mask"] if call.arg("mask_gradient") else "none!"


def _is_captured_operator(call: OpCall) -> bool:
    """Return True if the call is of the operator of captured graphs."""
    return call.op.namespace == "autoshard"


def _is_supported(call: OpCall) -> bool:
    """Kernels that are called by name, not with dropout: what one drew is kept as one state for all samples and heads,
    which no shard can tell its part of. The operator of captured graphs is given a seed.
    """
    if _is_captured_operator(call):
        return True
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    grouped = heads == groups or ("efficient" not in call.op.name() and heads % groups == 0)
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
    """Dims that mean nothing here: random state, lengths of packed sequences."""
    return " ".join(f"{prefix}_{dim}!" for dim in range(len(shape)))


def _opaque_results(call: OpCall, first: int) -> list[str]:
    """Dims of the results from `first` on, which mean nothing here."""
    return [_opaque_dims(f"x{index}", meta.shape if meta else ()) for index, meta in enumerate(call.results[first:])]


def _mask_dims(shape: Sequence[int], names: Sequence[str]) -> str:
    """Dims of a mask or of what is added to the scores, which is broadcast to batch, heads, queries and keys."""
    names = names[len(names) - len(shape) :]
    return " ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True))


def _statistics_dims(call: OpCall, shape: Sequence[int]) -> str:
    """Dims of one number per query: `[b, h, s]`, with a further dim in cuDNN.

    The memory-efficient kernel pads the queries' dim, so that its queries can not be sharded.
    """
    queries = "l!" if "efficient" in call.op.name() else "s"
    return " ".join(["b", "(h r)", queries, "1"][: len(shape)])


def _attention_rule(call: OpCall, items: dict[str, str], results: list[str], **options: Any) -> Rule:
    kept = [None if index >= 4 or "backward" not in call.op.name() else "sum" for index in range(len(results))]
    if results[-1] == "none!":
        kept[-1] = None
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    causal = bool(call.arg("is_causal"))
    options |= {
        "reduce": dict.fromkeys(_NAMES, kept),
        "whole": ("s",) if "efficient" in call.op.name() or (causal and not _is_captured_operator(call)) else (),
        "contiguous": ("s",) if causal else (),
        "uneven": True,
    }
    sizes = {"h": groups, "r": heads // groups}
    variants = [grouped_heads(call, items, results, _attention, **options)] if heads > groups else []
    along = sequence_parallel(call, items, results, sizes=sizes, **options)
    variants += [along] if along is not None else []
    return bind_named(call, items, results, sizes=sizes, local=_attention, variants=variants, **options)


@rule_maker("autoshard.attention_seed")
def attention_seed(call: OpCall) -> Rule:
    """A number, the same on every rank."""
    return bind("->", call, local=lambda local: local.emit.call(draws.key.default, *draw_arguments(local)))


def _attention(call: LocalCall) -> Any:
    """The operator itself on this rank's queries, with its first query's position and its shard's seed of dropout."""
    schema = [argument.name for argument in call.call.op._schema.arguments]
    changed: dict[str, Any] = {}
    if "max_q" in schema:
        changed["max_q"] = call.size("s")
    if call.arg("is_causal") and call.axes("s"):
        part = call.linear_index(call.axes("s"), host=True)
        # By name, as in `stretch_start`: an emitter of unequal shares reads starts off mul.Tensor.
        changed["start"] = call.emit.call(aten.mul.Tensor, part, call.size("s"))
    if _is_captured_operator(call.call) and call.arg("dropout_p"):
        seed = call.operands[operand_names(call.call).index("seed")]
        changed["seed"] = call.emit.call(draws.key.default, seed, 0, shard_index(call))
    return call.run(**changed)


# Flash and memory-efficient attention called by name, on samples of one length or packed behind each other.
#
# Heads are independent, and so are samples of one length. Fewer heads of keys than of queries make a query head the
# product of the key head `h` and its share `r`, which keys lack. Positions stay together: the kernels count them from
# the start, packed samples by their bounds, and the memory-efficient one pads what it keeps of each query.

_ONE_LENGTH = {"query": "b s! (h r) d!", "key": "b t! h d!", "value": "b t! h e!", "out": "b s! (h r) e!"}
_PACKED = {"query": "s! (h r) d!", "key": "t! h d!", "value": "t! h e!", "out": "s! (h r) e!"}
_PACKED_AS_ONE = {name: f"1 {dims}" for name, dims in _PACKED.items()}
"""The memory-efficient kernel takes packed samples as one sample."""

_UNSUPPORTED_ARGUMENTS = ("seqused_k", "alibi_slopes", "block_table", "seqlen_k")
"""Arguments that the rules do not cover: a call that passes one has no rule."""


@rule_maker("aten._flash_attention_forward.default", "aten._flash_attention_backward")
def flash_attention(call: OpCall) -> Rule | None:
    """Result, logarithms of the sums of exponentials, and states of a generator that draws nothing; or gradients."""
    packed = len(shape_of(call, "query")) == 3
    return _named_kernel_rule(call, _PACKED if packed else _ONE_LENGTH, "(h r) s!" if packed else "b (h r) s!")


@rule_maker("aten._efficient_attention_forward", "aten._efficient_attention_backward")
def efficient_attention(call: OpCall) -> Rule | None:
    """Forward and backward; every query head has a key head of its own."""
    if shape_of(call, "query")[2] != shape_of(call, "key")[2]:
        return None
    packed = call.arg("cu_seqlens_q") is not None
    dims, statistics = (_PACKED_AS_ONE, "q! (h r) l!") if packed else (_ONE_LENGTH, "b (h r) l!")
    return _named_kernel_rule(call, dims, statistics)


def _named_kernel_rule(call: OpCall, dims: dict[str, str], statistics: str) -> Rule | None:
    """The rule, if nothing is drawn and heads are shared evenly; None otherwise."""
    schema = {argument.name for argument in call.op._schema.arguments}
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
    backward = "backward" in call.op.name()
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
