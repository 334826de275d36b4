"""Embedding and its gradient, the vocabulary sharded included.

A rank that holds a stretch of the vocabulary looks up the indices that fall into it and leaves zeros for the others:
the sum over ranks is the embedding (vocabulary parallelism, as for a sharded table in Whale 3.2.2).
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._positions import stretch_start
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def local_positions(call: LocalCall, indices: Any, name: str, stretch: int) -> tuple[Any, Any]:
    """Indices counted from the start of this rank's stretch of the factor `name`, and which of them lie outside.

    Args:
        call: the call; the factor is sharded.
        indices: global indices.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    emit = call.emit
    indices = indices - stretch_start(call, name, stretch)
    before = indices < 0
    return indices, emit.logical_or(before, indices >= stretch)


@rule_maker("aten.embedding")
def embedding(call: OpCall) -> Rule:
    """Rows of the table; linear in the table."""
    # Indices never point at padding of the table.
    return bind("v^ d, ... -> ... d", call, linear="0", local=_embedding, uneven=("d", "..."), fill={"v": None})


def _embedding(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    emit = call.emit
    table, indices = call.operands
    indices, outside = local_positions(call, indices, "v", call.operand_shape(0)[0])
    rows = call.run(operands=[table, emit.masked_fill(indices, outside, 0)])
    return emit.masked_fill(rows, emit.unsqueeze(outside, -1), 0)


@rule_maker("aten.embedding_dense_backward")
def embedding_dense_backward(call: OpCall) -> Rule:
    """The gradient of the table: partial over the indices, sharded over the vocabulary without communication."""
    counted = call.arg("scale_grad_by_freq")  # the frequency of a word is that among all indices
    return bind(
        "... d, ... -> v^ d",
        call,
        linear="0",
        whole=("...", "v") if counted else (),
        local=_embedding_dense_backward,
        uneven=True,
    )


def _embedding_dense_backward(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    emit = call.emit
    gradient, indices = call.operands
    stretch = call.result_shape()[0]
    local, skipped = local_positions(call, indices, "v", stretch)
    if call.arg("padding_idx") >= 0:
        padding = emit.eq(indices, call.arg("padding_idx"))
        skipped = emit.logical_or(skipped, padding)
    # The operator skips the padding index: all indices that are not this rank's become that.
    local = emit.masked_fill(local, skipped, -1)
    return call.run(operands=[gradient, local], num_weights=stretch, padding_idx=-1)
