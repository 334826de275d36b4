"""Context parallelism: queries, keys and values of self-attention lie along the sequence, and keys are passed round.

The sequence is one factor `n`. A rank keeps its stretch of queries; the stretches of keys and values are sent to all
ranks one after another, each is attended to by itself, and the results are merged by the logarithms of their sums of
exponentials. So a rank holds the keys of one stretch at a time, where the rule itself (queries sharded, keys gathered
before the operator, their gradients scattered behind it) holds all of them. The bytes sent forward are the same;
backward, gradients of keys are summed stretch by stretch, which takes twice the bytes of one scattered sum. The rule is
thus the faster of the two where its kernel takes a mask; this one serves where memory or the kernel does not allow it.

With a causal mask a rank attends to its own stretch causally and to earlier ones in full; what it computes for later
ones is thrown away, since all ranks run one program.

Source: Ring Attention with Blockwise Transformers (Liu, Zaharia, Abbeel 2023), section 3, with broadcasts in place of
the ring: a shift along a ring is another program on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.patterns.local import LocalCall, collectives
from autoshard.patterns.ops._helpers import bind_named, cast, operand_names, result_dtype, shape_of
from autoshard.patterns.rule import OpCall, Rule

aten = torch.ops.aten

_SEQUENCE = {"s": "n", "t!": "n"}  # how the rules of attention write the dims of queries and keys


def sequence_parallel(call: OpCall, operands: Mapping[str, str], results: Sequence[str], **options: Any) -> Rule | None:
    """The variant of a rule of attention, forward or backward, whose factor `n` is the sequence of queries and keys.

    Args:
        call: the attention on whole tensors.
        operands: dims of the operands by argument name, queries' sequence written `s`, keys' `t!`.
        results: dims of the results, likewise.
        options: those of the rule, as `bind_named` takes them, with the `sizes` of its names.

    Returns:
        None where queries and keys are not of one length, where there is a mask, and for kernels that do not hand out
        one logarithm per query.
    """
    query, key = shape_of(call, "query"), shape_of(call, "key")
    plain = all(name not in operands or call.arg(name) is None for name in ("attn_mask", "attn_bias"))
    if "flash" not in call.op.name() or query[2] != key[2] or not plain:
        return None
    moved = sum(meta.bytes for name, meta in zip(operand_names(call), call.operands, strict=True) if name in _PASSED)
    backward = "grad_out" in operand_names(call)
    reduce = {name: kinds for name, kinds in options.pop("reduce").items() if name != "s"}
    options |= {"whole": (), "contiguous": ("n",), "uneven": False}
    return bind_named(
        call,
        {name: _renamed(text) for name, text in operands.items()},
        [_renamed(text) for text in results],
        reduce=reduce | {"n": reduce["b"]},
        exchange={"n": [("broadcast", moved), *([("all_reduce", moved)] if backward else [])]},
        local=_backward if backward else _forward,
        **options,
    )


_PASSED = ("key", "value")


def _renamed(text: str) -> str:
    return " ".join(_SEQUENCE.get(word, word) for word in text.split())


def _forward(call: LocalCall) -> Any:
    emit, causal = call.emit, bool(call.arg("is_causal"))
    merged: tuple[Any, Any] | None = None
    rest: Sequence[Any] = ()
    if causal:
        result, logarithm, *rest = _attend(call, call.operands, causal=True)
        merged = _accumulated(call, result, logarithm), logarithm
    for stretch in range(call.share("n") - causal):
        result, logarithm, *rest = _attend(call, _passed(call, stretch), causal=False)
        result = _accumulated(call, result, logarithm)
        if causal:
            logarithm = emit.call(aten.where.ScalarOther, _behind(call, stretch), logarithm, -math.inf)
        merged = (result, logarithm) if merged is None else _merged(call, *merged, result, logarithm)
    assert merged is not None
    return (cast(call, merged[0], result_dtype(call)), merged[1], *rest)


def _backward(call: LocalCall) -> Any:
    """Every stretch of keys by itself, with the logarithms and results of the whole sequence."""
    emit, causal = call.emit, bool(call.arg("is_causal"))
    statistics = call.operands[operand_names(call.call).index("logsumexp")]
    sums: list[Any] = []
    if causal:
        sums = [_accumulated(call, each, statistics) for each in _attend(call, call.operands, causal=True)]
    for stretch in range(call.share("n") - causal):
        terms = [_accumulated(call, each, statistics) for each in _attend(call, _passed(call, stretch), causal=False)]
        if causal:
            behind = _behind(call, stretch)
            terms = [emit.call(aten.where.ScalarOther, behind, each, 0) for each in terms]
        here = emit.call(aten.eq.Scalar, call.position("n"), stretch)
        terms[1:] = [emit.call(aten.where.ScalarOther, here, call.all_reduce(each, "n"), 0) for each in terms[1:]]
        sums = [emit.call(aten.add.Tensor, *pair) for pair in zip(sums, terms, strict=True)] if sums else terms
    return tuple(cast(call, each, result_dtype(call, index)) for index, each in enumerate(sums))


def _attend(call: LocalCall, operands: Sequence[Any], causal: bool) -> Any:
    """The kernel on this rank's queries and one stretch of keys."""
    schema = [argument.name for argument in call.call.op._schema.arguments]
    length = call.operand_shape(operand_names(call.call).index("query"))[2]
    lengths = {name: length for name in ("max_q", "max_k") if name in schema}
    return call.run(operands=operands, is_causal=causal, **lengths)


def _passed(call: LocalCall, stretch: int) -> list[Any]:
    """The local operands, with the keys and values of the rank that holds the stretch."""
    names = operand_names(call.call)
    return [
        _broadcast(call, value, stretch) if name in _PASSED else value
        for name, value in zip(names, call.operands, strict=True)
    ]


def _broadcast(call: LocalCall, value: Any, stretch: int) -> Any:
    """What the rank that holds a stretch has, on all ranks that hold one: along the innermost axis first."""
    emit = call.emit
    value = emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    for axis in reversed(call.axes("n")):
        stretch, root = divmod(stretch, call.mesh.sizes[axis])
        pending = emit.call(collectives.broadcast.default, value, root, emit.group(axis))
        value = emit.call(collectives.wait_tensor.default, pending)
    return value


def _behind(call: LocalCall, stretch: int) -> Any:
    """Whether this rank's queries come after a stretch of keys: a 0-d truth value."""
    return call.emit.call(aten.gt.Scalar, call.position("n"), stretch)


def _accumulated(call: LocalCall, value: Any, statistics: Any) -> Any:
    """`value` in the precision in which kernels keep their logarithms."""
    return cast(call, value, call.emit.dtype(statistics))


def _merged(call: LocalCall, first: Any, first_log: Any, second: Any, second_log: Any) -> tuple[Any, Any]:
    """Attention to two sets of keys, from attention to each: weighted by their sums of exponentials."""
    emit = call.emit
    log = emit.call(aten.logaddexp.default, first_log, second_log)
    parts = []
    for value, own in ((first, first_log), (second, second_log)):
        weight = emit.call(aten.exp.default, emit.call(aten.sub.Tensor, own, log))
        parts.append(emit.call(aten.mul.Tensor, value, emit.call(aten.unsqueeze.default, weight, -1)))
    return emit.call(aten.add.Tensor, *parts), log
