"""Scaled dot-product attention in all spellings that ATen has, forward and backward.

Batch and heads are independent. Fewer heads of keys than of queries (grouped-query attention) make a query head the
product of the key head `h` and its share `r`, which keys lack. The queries' sequence may be sharded too, keys and
values being whole: their gradients are then partial, as autograd of a contracted dim. A causal kernel counts queries
from the start of the sequence, so a rank that holds a later stretch needs the mask spelt out. The kernels for the CPU
and of cuDNN take one. Flash attention takes none: it could align the mask with the last key instead, but which one that
is depends on the rank, and so would the shape of the keys. The memory-efficient kernel pads what it keeps of each
query, so that its queries are not sharded at all, and what a mask must look like for overridden kernels is theirs to
say. For all of these, keys may go round instead (`units.sequence`), as far as it knows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import aten, bind_named, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.units.attention import attention_variants

_QUERY, _KEY, _VALUE, _RESULT = "b (h r) s d!", "b h t! d!", "b h t! e!", "b (h r) s e!"
_MASK = ("b", "(h r)", "s", "t!")
_NAMES = ("b", "h", "r", "s")


@rule_maker(
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
def attention(call: OpCall) -> Rule | None:
    """Forward: result, logarithm of the sum of exponentials, and what a kernel keeps for its backward."""
    if not _supported(call):
        return None
    items = _items(call)
    results = [_RESULT, _statistics(call, call.results[1].shape if call.results[1] else ())]
    results += [_kept(f"x{index}", meta.shape if meta else ()) for index, meta in enumerate(call.results[2:])]
    return _bound(call, items, results)


@rule_maker(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_fused_attention_overrideable_backward",
)
def attention_backward(call: OpCall) -> Rule | None:
    """Gradients of queries, keys, values and, where asked for, the mask; linear in the incoming gradient."""
    if not _supported(call):
        return None
    items = _items(call)
    results = [_QUERY, _KEY, _VALUE]
    if len(call.results) == 4:
        results.append(items.get("attn_bias", ""))
    return _bound(call, items, results, linear=[{"grad_out", "grad_out_"}])


def _supported(call: OpCall) -> bool:
    """Not with dropout: what a kernel drew is kept as one state for all samples and heads, which no shard can tell
    its part of. Capture spells attention with dropout out; only kernels that are called by name come here with it.
    """
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    grouped = heads == groups or ("efficient" not in call.op.name() and heads % groups == 0)
    return call.arg("dropout_p") == 0 and grouped


def _mask_argument(call: OpCall) -> str | None:
    """The argument by which a causal call may be given its mask as a tensor instead; None if there is none, or taken.

    Both kernels add a mask `[queries, keys]` to the scores, broadcast to samples and heads.
    """
    if "for_cpu" in call.op.name():
        name = "attn_mask"
    elif "cudnn" in call.op.name() and shape_of(call, "query")[2] == shape_of(call, "key")[2]:
        name = "attn_bias"
    else:
        return None
    return name if call.arg(name) is None else None


def _items(call: OpCall) -> dict[str, str]:
    """Dims of all operands by argument name."""
    items = {"query": _QUERY, "key": _KEY, "value": _VALUE}
    items |= dict.fromkeys(("grad_out", "grad_out_", "out"), _RESULT)
    for name, meta in _tensor_arguments(call):
        if name in ("attn_mask", "attn_bias"):
            items[name] = _mask(call, meta)
        elif name == "logsumexp":
            items[name] = _statistics(call, meta)
        elif name not in items:
            items[name] = _kept(f"y{len(items)}", meta)
    return items


def _tensor_arguments(call: OpCall) -> list[tuple[str, tuple[int, ...]]]:
    found = ((argument.name, call.arg(argument.name)) for argument in call.op._schema.arguments)
    return [(name, value.shape) for name, value in found if hasattr(value, "shape")]


def _kept(prefix: str, shape: Sequence[int]) -> str:
    """Dims that mean nothing here: random state, lengths of packed sequences."""
    return " ".join(f"{prefix}_{dim}!" for dim in range(len(shape)))


def _mask(call: OpCall, shape: Sequence[int]) -> str:
    """Dims of a mask, which is broadcast to batch, heads, queries and keys."""
    names = _MASK[len(_MASK) - len(shape) :]
    return " ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True))


def _statistics(call: OpCall, shape: Sequence[int]) -> str:
    """Dims of one number per query: `[b, h, s]`, with a further dim in cuDNN.

    The memory-efficient kernel pads the queries' dim, so that its queries can not be sharded.
    """
    queries = "l!" if "efficient" in call.op.name() else "s"
    return " ".join(["b", "(h r)", queries, "1"][: len(shape)])


def _bound(call: OpCall, items: dict[str, str], results: list[str], **options: Any) -> Rule:
    kept = [None if index >= 4 or "backward" not in call.op.name() else "sum" for index in range(len(results))]
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
    causal = bool(call.arg("is_causal"))
    options |= {
        "reduce": dict.fromkeys(_NAMES, kept),
        "whole": ("s",) if "efficient" in call.op.name() or (causal and _mask_argument(call) is None) else (),
        "contiguous": ("s",) if causal else (),
        "uneven": True,
    }
    variants = attention_variants(call, items, results, _attention, **options)
    sizes = {"h": groups, "r": heads // groups}
    return bind_named(call, items, results, sizes=sizes, local=_attention, variants=variants, **options)


def _attention(call: LocalCall) -> Any:
    """The operator itself, told which queries this rank has."""
    schema = [argument.name for argument in call.call.op._schema.arguments]
    changed: dict[str, Any] = {}
    if "max_q" in schema:
        changed["max_q"] = call.size("s")
    mask = _mask_argument(call.call)
    if call.arg("is_causal") and call.axes("s") and mask is not None:
        changed |= {"is_causal": False, mask: _causal_mask(call)}
    return call.run(**changed)


def _causal_mask(call: LocalCall) -> Any:
    """What to add to the scores of this rank's queries `[s, t]`: minus infinity for keys that come later."""
    emit, keys = call.emit, shape_of(call.call, "key")[2]
    queries = call.size("s")
    like = call.operands[0]
    first = emit.call(aten.mul.Tensor, call.position("s"), queries)
    key, query = (
        emit.call(aten.arange.default, count, dtype=torch.int64, device=emit.device(like)) for count in (keys, queries)
    )
    query = emit.call(aten.unsqueeze.default, emit.call(aten.add.Tensor, query, first), 1)
    zeros = emit.call(aten.new_zeros.default, like, [queries, keys])
    return emit.call(aten.masked_fill.Scalar, zeros, emit.call(aten.gt.Tensor, key, query), -math.inf)
