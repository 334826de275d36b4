"""Products of groups of rows with a matrix of their own each, as in a mixture of experts.

The groups lie behind each other along one dim, and `offs` says where each of them ends. A rank that holds a stretch of
that dim cuts the ends to its stretch. A rank that holds some of the groups needs only their elements: it turns the dim
round until they come first, so that the operator computes them and no others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.patterns.build import build
from autoshard.patterns.exchanging import define_operator
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import aten, local_ends, local_group_bounds, reshape_along
from autoshard.patterns.ops.matmul import divide_into_units
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_ALIGNED_BYTES = 16
"""Rows must begin at multiples of so many bytes, which a shard of a row must keep to."""

GROUPED_DIM = {(2, 3): "i", (2, 2): "k", (3, 2): "j"}
"""The dim of a product `i k, k j -> i j` that the groups lie along, by the number of dims of its operands.

Two operands of three dims are a batch of matrices.
"""


def _grouped_mm_or_zeros(
    left: Tensor, right: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`aten._grouped_mm`, also for a rank to which no rows were sent, where torch's kernel refuses."""
    if left.numel() and right.numel():
        product: Tensor = aten._grouped_mm.default(left, right, offs, bias, out_dtype)
        return product
    groups = offs.shape if left.dim() == right.dim() == 2 else ()
    return left.new_zeros((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


_SCHEMA = "(Tensor left, Tensor right, Tensor offs, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
_GROUPED_MM_OR_ZEROS = define_operator(f"grouped_mm_of_any{_SCHEMA}", _grouped_mm_or_zeros, _grouped_mm_or_zeros)


@rule_maker("aten._grouped_mm")
def _grouped_mm(call: OpCall) -> Rule | None:
    """Rows, columns and contracted dim of all groups, and the groups."""
    if call.arg("bias") is not None:
        return None
    left, right = call.operands[:2]
    ndims = len(left.shape), len(right.shape)
    grouped = GROUPED_DIM.get(ndims)
    sizes = (
        {"g": left.shape[0]} if grouped is None else {"g": call.operands[2].shape[0], "ends": call.operands[2].shape[0]}
    )
    dims: dict[str, list[str]] = {}
    for name, size in (("i", left.shape[-2]), ("k", left.shape[-1]), ("j", right.shape[-1])):
        lanes = 1 if name == grouped else _ALIGNED_BYTES // left.dtype.itemsize
        sizes[name], sizes[f"{name}_lane"] = divide_into_units(size, lanes)
        dims[name] = [name, f"{name}_lane"]

    def matrix(ndim: int, *names: str) -> list[list[str]]:
        return [["g"]] * (ndim - 2) + [dims[name] for name in names]

    return build(
        sizes,
        [matrix(ndims[0], "i", "k"), matrix(ndims[1], "k", "j"), *([["ends"]] for _ in call.operands[2:])],
        [matrix(2 if grouped in ("i", "j") else 3, "i", "j")],
        whole=["ends", "i_lane", "k_lane", "j_lane"],
        contiguous=[] if grouped is None else ["g", grouped],
        linear=[{0}, {1}],
        local=None if grouped is None else _local_grouped_mm,
        uneven=True,
        # No group reaches into padding, and groups that are padding are empty.
        fill={} if grouped is None else {"g": None, grouped: None},
    )


def _local_grouped_mm(call: LocalCall) -> Any:
    left, right, ends = call.operands
    grouped = GROUPED_DIM[len(call.call.operands[0].shape), len(call.call.operands[1].shape)]
    length = call.operand_shape(1)[-1] if grouped == "j" else call.operand_shape(0)[0 if grouped == "i" else 1]
    if call.axes(grouped):
        ends = local_ends(call, ends, grouped, length)
    start = None
    if call.axes("g"):
        start, ends = local_group_bounds(call, ends, call.size("g"))
    if grouped in "ik":
        left = _align_groups(call, left, 0 if grouped == "i" else 1, start)
    if grouped in "kj":
        right = _align_groups(call, right, 0 if grouped == "k" else 1, start)
    # Routed rows may be none; torch's kernel asks for one at least.
    op = _GROUPED_MM_OR_ZEROS if call.axes("group") else None
    product = call.run(op, operands=[left, right, ends])
    if start is None or grouped == "k":
        return product
    dim = 0 if grouped == "i" else 1
    computed = call.emit.arange(length, device=ends.device) < ends.slice(0, -1)
    # Rows behind this rank's groups were not computed: they hold anything.
    product = call.emit.where(reshape_along(computed, dim, 2), product, 0)
    return _align_groups(call, product, dim, -start)


def _align_groups(call: LocalCall, value: Any, dim: int, start: Any) -> Any:
    """A matrix whose dim `dim`, which the groups lie along, is the outer one in memory, so that groups are aligned.

    Args:
        start: the position whose element comes first, and what stands before it comes last; None to turn nothing.
    """
    emit = call.emit
    if dim == 1:
        value = value.t()
    if start is None:
        value = value.contiguous()
    else:
        length = value.shape[0]
        order = emit.arange(length, device=start.device) + start
        value = value.index_select(0, order.remainder(length))
    return value.t() if dim == 1 else value


# Products of groups of rows with a matrix of their own each, in eight bits, with a scale for every row and column.
#
# The rows or columns that groups lie along may be cut: a rank counts the groups' ends in its stretch. Groups are not
# shared, and neither is the contracted dim, whose sums are rounded.

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
    left, right, *rest = call.operands
    grouped = GROUPED_DIM.get((len(left.shape), len(right.shape)))
    if grouped is not None and call.axes(grouped):
        length = left.shape[0] if grouped == "i" else right.shape[1]
        rest[-1] = local_ends(call, rest[-1], grouped, length)
    right = right.transpose(-2, -1).contiguous().transpose(-2, -1)
    return call.run(operands=[left.contiguous(), right, *(value.contiguous() for value in rest)])


# Hugging Face's product of groups of rows with a matrix each, which mixtures of experts call where `aten._grouped_mm`
# does not serve (`transformers::grouped_mm_fallback`): rows, columns, contracted dim, and the groups.
#
# The rows of groups that a rank does not hold are zero in its result, which is a partial sum. So expert weights may lie
# by expert, or by any of their other dims, and are never gathered.


@rule_maker("transformers::grouped_mm_fallback")
def grouped_product(call: OpCall) -> Rule:
    """`(rows [i, k], weights [g, k, j], ends [g]) -> [i, j]`."""
    text = "i^ k, g^ k j, ends! -> i^ j"
    return bind(text, call, linear="0, 1", local=_local_product, uneven=True, fill={"g": None})


@rule_maker("transformers::grouped_mm_fallback_backward")
def grouped_product_backward(call: OpCall) -> Rule:
    """`(rows [i, k], weights [g, k, j], ends [g], gradient [i, j]) -> [i, k], [g, k, j]`."""
    text = "i^ k, g^ k j, ends!, i^ j -> i^ k, g^ k j"
    return bind(text, call, linear="3", local=_local_product, uneven=True, fill={"g": None, "i": None})


def _local_product(call: LocalCall) -> Any:
    rows, weights, ends, *gradient = call.operands
    if call.axes("i"):
        ends = local_ends(call, ends, "i", call.operand_shape(0)[0])
    if not call.axes("g"):
        return call.run(operands=[rows, weights, ends, *gradient])
    start, ends = local_group_bounds(call, ends, call.operand_shape(1)[0])
    rows, *gradient = (_align_groups(call, value, 0, start) for value in (rows, *gradient))
    results = call.run(operands=[rows, weights, ends, *gradient])
    if not gradient:
        return _align_groups(call, results, 0, -start)
    return _align_groups(call, results[0], 0, -start), results[1]
