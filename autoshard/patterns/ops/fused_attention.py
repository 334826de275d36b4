"""Flash and memory-efficient attention called by name, on samples of one length or packed behind each other.

Heads are independent, and so are samples of one length. Fewer heads of keys than of queries make a query head the
product of the key head `h` and its share `r`, which keys lack. Positions stay together: the kernels count them from the
start, packed samples by their bounds, and the memory-efficient one pads what it keeps of each query.
"""

from __future__ import annotations

from autoshard.patterns.ops._helpers import bind_named, operand_names, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_ONE_LENGTH = {"query": "b s! (h r) d!", "key": "b t! h d!", "value": "b t! h e!", "out": "b s! (h r) e!"}
_PACKED = {"query": "s! (h r) d!", "key": "t! h d!", "value": "t! h e!", "out": "s! (h r) e!"}
_PACKED_AS_ONE = {name: f"1 {dims}" for name, dims in _PACKED.items()}
"""The memory-efficient kernel takes packed samples as one sample."""

_UNSUPPORTED_ARGUMENTS = ("seqused_k", "alibi_slopes", "block_table", "seqlen_k")
"""What the rules know nothing of."""


@rule_maker("aten._flash_attention_forward.default")
def flash_attention(call: OpCall) -> Rule | None:
    """Result and logarithms of the sums of exponentials; states of a generator that draws nothing."""
    packed = call.arg("cum_seq_q") is not None
    return _attention_rule(call, _PACKED if packed else _ONE_LENGTH, "(h r) s!" if packed else "b (h r) s!")


@rule_maker("aten._flash_attention_backward")
def flash_attention_backward(call: OpCall) -> Rule | None:
    """Gradients of queries, keys and values; linear in the incoming one."""
    packed = len(shape_of(call, "query")) == 3
    return _attention_rule(call, _PACKED if packed else _ONE_LENGTH, "(h r) s!" if packed else "b (h r) s!")


@rule_maker("aten._efficient_attention_forward", "aten._efficient_attention_backward")
def efficient_attention(call: OpCall) -> Rule | None:
    """Forward and backward; every query head has a key head of its own."""
    packed = call.arg("cu_seqlens_q") is not None
    if shape_of(call, "query")[2] != shape_of(call, "key")[2]:
        return None
    return _attention_rule(call, _PACKED_AS_ONE if packed else _ONE_LENGTH, "q! (h r) l!" if packed else "b (h r) l!")


def _attention_rule(call: OpCall, dims: dict[str, str], statistics: str) -> Rule | None:
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
        items["bias"] = _bias_dims(bias.shape)
    for name in operand_names(call):
        if name not in items:
            items[name] = _opaque_dims(name, shape_of(call, name))
    backward = "backward" in call.op.name()
    results = [dims["query"], dims["key"], dims["value"]] if backward else [dims["out"], statistics]
    if backward and bias is not None:
        results.append(items["bias"])
    known = len(results)
    results += [
        _opaque_dims(f"x{at}", meta.shape if meta else ()) for at, meta in enumerate(call.results[known:], known)
    ]
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


def _bias_dims(shape: tuple[int, ...]) -> str:
    """Dims of what is added to the scores, which may be the same for all samples or heads."""
    return " ".join("1" if size == 1 else name for name, size in zip(("b", "(h r)", "s!", "t!"), shape, strict=True))


def _opaque_dims(name: str, shape: tuple[int, ...]) -> str:
    """Dims that mean nothing here: random state, bounds of packed samples."""
    return " ".join(f"{name}_{dim}!" for dim in range(len(shape)))
