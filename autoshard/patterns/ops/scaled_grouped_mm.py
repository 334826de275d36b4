"""Products of groups of rows with a matrix of their own each, in eight bits, with a scale for every row and column.

The rows or columns that groups lie along may be cut: a rank counts the groups' ends in its stretch. Groups are not
shared, and neither is the contracted dim, whose sums are rounded.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._positions import stretch_start
from autoshard.patterns.ops.grouped_mm import GROUPED_DIM
from autoshard.patterns.ops.matmul import divide_into_units
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_UNIT = 16
"""Kernels take so many elements of a row at a time."""


@rule_maker("aten._scaled_grouped_mm")
def scaled_grouped_mm(call: OpCall) -> Rule | None:
    """Rows and columns; of a batch of matrices, the batch."""
    if call.arg("bias") is not None or call.arg("scale_result") is not None:
        return None
    left, right, scale_a, _, *ends = call.operands
    grouped = GROUPED_DIM.get((len(left.shape), len(right.shape)))
    rows, columns = left.shape[-2], right.shape[-1]
    groups = ends[0].shape[0] if ends else left.shape[0]
    if scale_a.shape not in ((rows,), (groups, rows), (groups * rows,)):
        return None  # scales of blocks
    sizes = {"g": groups, "i": rows, "k": left.shape[-1]}
    sizes["j"], sizes["j_lane"] = divide_into_units(columns, _UNIT)
    matrices = [["i"], ["k"]], [["k"], ["j", "j_lane"]]
    scales: list[list[list[str]]] = [[["i"]], [["j", "j_lane"]]]
    for place, meta in enumerate((left, right)):
        if len(meta.shape) == 3:
            matrices[place].insert(0, ["g"])
            scales[place].insert(0, ["g"])
        elif grouped == "k":
            scales[place][0].insert(0, "g")  # every group's scales behind each other
    result = [["i"], ["j", "j_lane"]]
    return build(
        sizes,
        [*matrices, *scales, *([["g"]] for _ in ends)],
        [result if grouped in ("i", "j") else [["g"], *result]],
        whole=["k", "j_lane", *(["g"] if grouped else [])],
        contiguous=[grouped] if grouped in ("i", "j") else [],
        local=_local,
    )


def _local(call: LocalCall) -> Any:
    """Kernels want the first matrix by rows and the second by columns, however the shards came to lie."""
    emit = call.emit
    left, right, *rest = call.operands
    grouped = GROUPED_DIM.get((len(left.shape), len(right.shape)))
    if grouped is not None and call.axes(grouped):
        length = left.shape[0] if grouped == "i" else right.shape[1]
        ends = rest[-1] - stretch_start(call, grouped, length)
        ends = emit.clamp(ends, 0, length)
        rest[-1] = emit._to_copy(ends, dtype=rest[-1].dtype)
    columns = emit.contiguous(emit.transpose(right, -2, -1))
    return call.run(
        operands=[
            emit.contiguous(left),
            emit.transpose(columns, -2, -1),
            *(emit.contiguous(value) for value in rest),
        ]
    )
