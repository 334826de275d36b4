"""Rows that are scaled down to a largest norm: each on its own, and each needed whole."""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._positions import localize_index
from autoshard.patterns.ops.scattering import append_spare, drop_spare
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.renorm")
def _renorm(call: OpCall) -> Rule:
    """Slices along one dim."""
    ndim = len(call.operands[0].shape)
    kept = call.arg("dim") % ndim
    dims = " ".join(f"d{dim}" if dim == kept else f"d{dim}!" for dim in range(ndim))
    return bind(f"{dims} -> {dims}", call)


@rule_maker("aten.embedding_renorm")
def _embedding_renorm(call: OpCall) -> Rule:
    """Rows of a table that the indices name; a rank of a sharded table scales its own."""
    return bind("v^ d!, ...! -> v d!", call, local=_local_embedding_renorm)


def _local_embedding_renorm(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    table, indices = call.operands
    stretch = call.operand_shape(0)[0]
    own, _ = localize_index(call, indices, "v", stretch, stretch)
    return drop_spare(call, call.run(operands=[append_spare(call, table, [0]), own]), [0])
