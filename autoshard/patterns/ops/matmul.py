"""Operators on matrices: products, decompositions, linear solves, Fourier transforms and distances.

A product is linear in each operand; a sharded contracted dim gives partial sums. For decompositions and solves, a
matrix must be whole, and the batch may be sharded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import bind_named, factor_names, numbered_dims, shape_of
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule, TensorMeta, build

rule("aten.mm", "i k, k j -> i j", linear="0, 1")
rule("aten.bmm", "b i k, b k j -> b i j", linear="0, 1")
rule("aten.mv", "i k, k -> i", linear="0, 1")
rule(["aten.dot", "aten.vdot"], "k, k -> ", linear="0, 1")
rule(["aten.outer", "aten.ger"], "i, j -> i j", linear="0, 1")


def keep_on_first_rank(call: LocalCall, operand: int, names: Sequence[str]) -> list[Any]:
    """The local operands, with an operand that is added to the result zeroed on all ranks but the first.

    Where the factors `names` are sharded, the results are summed over ranks, and the added operand must count once.
    """
    values = list(call.operands)
    axes = sorted(axis for name in names for axis in call.axes(name))
    if axes:
        first = call.linear_index(axes).eq(0)
        # `where`, not a product: 0 * inf is nan.
        values[operand] = call.emit.where(first, values[operand], 0)
    return values


@functools.cache
def with_added(operand: int, *names: str) -> LocalProgram:
    """Local program of a product with contracted factors `names`, to which an operand is added once."""
    return lambda call: call.run(operands=keep_on_first_rank(call, operand, names))


@rule_maker("aten.addmm", product="i k, k j", result="i j", contracted="k")
@rule_maker("aten.baddbmm", product="b i k, b k j", result="b i j", contracted="k")
@rule_maker("aten.addbmm", product="b i k, b k j", result="i j", contracted="bk")
@rule_maker("aten.addmv", product="i k, k", result="i", contracted="k")
@rule_maker("aten.addr", product="i, j", result="i j", contracted="")
def _addmm(call: OpCall, product: str, result: str, contracted: str) -> Rule:
    """`result + product`: jointly linear in the added tensor and either of the others; `added` is broadcast."""
    added = result.split()[len(result.split()) - len(call.operands[0].shape) :]
    text, local = f"{' '.join(added)}, {product} -> {result}", with_added(0, *contracted)
    return bind(text, call, linear="0+1, 0+2", local=local, uneven=True, fill=dict.fromkeys(contracted, 0.0))


@rule_maker("aten.linear")
def _linear(call: OpCall) -> Rule:
    if len(call.operands) == 2:
        return bind("... k, j k -> ... j", call, linear="0, 1")
    local = with_added(2, "k")
    return bind("... k, j k, j -> ... j", call, linear="0+2, 1+2", local=local, uneven=True, fill={"k": 0.0})


@rule_maker("aten.matmul")
def _matmul(call: OpCall) -> Rule:
    """Products of vectors, matrices and batches of matrices, by the number of dims of each operand."""
    left, right = (len(operand.shape) for operand in call.operands)
    first = "k" if left == 1 else "... i k"
    second = "k" if right == 1 else "... k j"
    rows, columns = " i" if left > 1 else "", " j" if right > 1 else ""
    dots = "..." if max(left, right) > 1 else ""
    return bind(f"{first}, {second} -> {dots}{rows}{columns}", call, linear="0, 1")


def divide_into_units(size: int, unit: int) -> tuple[int, int]:
    """A size as (units, unit), or as one unit if `unit` does not divide it: kernels require aligned rows."""
    return (size // unit, unit) if size % unit == 0 else (1, size)


def unit_sizes(call: OpCall, unit: int) -> dict[str, int]:
    """Sizes of the factors of `i k, k j -> i j` where `k` and `j` may only be split into whole units."""
    contracted, columns = call.operands[1].shape
    sizes = {}
    for name, size in (("k", contracted), ("j", columns)):
        sizes[name], sizes[f"{name}_lane"] = divide_into_units(size, unit)
    return sizes


@rule_maker("aten._int_mm")
def _int_mm(call: OpCall) -> Rule:
    """Products of integers, with exact sums; kernels require multiples of 8."""
    return bind("i (k k_lane!), (k k_lane!) (j j_lane!) -> i (j j_lane!)", call, sizes=unit_sizes(call, 8))


rule("aten._weight_int8pack_mm", "i k, j k, j -> i j", linear="0", uneven=("i",))  # its kernel reads whole vectors


@rule_maker("aten._addmm_activation")
def _addmm_activation(call: OpCall) -> Rule:
    """The activation of a sum is no sum: the contracted dim must be whole."""
    # The added operand is a matrix, or one row for all.
    added = ["i", "j"][2 - len(call.operands[0].shape) :]
    return bind(f"{' '.join(added)}, i k!, k! j -> i j", call)


# Products of 8-bit matrices, with one scale per matrix, or one per row and one per column.
#
# A result that is 8-bit itself, or scaled, is rounded too early to be a term of a sum.

_UNIT = 16
"""Kernels require rows of a multiple of this number of elements."""

_ONE, _PER_ROW = 0, 1
"""Values of the enum of scaling recipes of `_scaled_mm_v2`."""


@rule_maker("aten._scaled_mm")
def _scaled_mm(call: OpCall) -> Rule | None:
    rounded = call.arg("scale_result") is not None
    return _scaled_product(call, call.arg("scale_a"), call.arg("scale_b"), rounded)


@rule_maker("aten._scaled_mm_v2")
def _scaled_mm_v2(call: OpCall) -> Rule | None:
    """Lists of scales; only plain scales split along with the rows: no blocks, no swizzling."""
    ways = {call.arg("recipe_a"), call.arg("recipe_b")}
    swizzled = any((*call.arg("swizzle_a"), *call.arg("swizzle_b")))
    if ways not in ({(_ONE,)}, {(_PER_ROW,)}) or swizzled or call.arg("contraction_dim"):
        return None
    (scale_a,), (scale_b,) = call.arg("scale_a"), call.arg("scale_b")
    return _scaled_product(call, scale_a, scale_b, rounded=False)


def _scaled_product(call: OpCall, scale_a: TensorMeta, scale_b: TensorMeta, rounded: bool) -> Rule | None:
    """The rule of a product; None where the scales are blockwise."""
    result = call.result
    single = math.prod(scale_a.shape) == math.prod(scale_b.shape) == 1
    if not single and (scale_a.shape, scale_b.shape) != ((result.shape[0], 1), (1, result.shape[1])):
        return None
    rows, columns = ("i 1", "1 (j j_lane!)") if not single else (_scalar_dims(scale_a), _scalar_dims(scale_b))
    operands = ["i (k k_lane!)", "(k k_lane!) (j j_lane!)", rows, columns]
    if call.arg("bias") is not None:
        operands.append("(j j_lane!)")
    operands += [_scalar_dims(meta) for meta in call.operands[len(operands) :]]
    return bind(
        f"{', '.join(operands)} -> i (j j_lane!)",
        call,
        whole=["k"] if rounded or result.dtype.itemsize == 1 else [],
        sizes=unit_sizes(call, _UNIT),
        local=_local_scaled_mm,
    )


def _scalar_dims(meta: TensorMeta) -> str:
    """The dims of a tensor with one element: any number of dims of size 1."""
    return " ".join("1" * len(meta.shape))


def _local_scaled_mm(call: LocalCall) -> Any:
    values = keep_on_first_rank(call, 4, ["k"]) if call.arg("bias") is not None else list(call.operands)
    # Kernels require a row-major first and a column-major second matrix, whatever the layout of the shards.
    values[0] = values[0].contiguous()
    # A transpose of a contiguous transpose: column-major.
    values[1] = values[1].t().contiguous().t()
    return call.run(operands=values)


# The product of three tensors in `torch.nn.Bilinear`: dims are broadcast, and some of them summed over.


@rule_maker("aten._trilinear.default")
def trilinear(call: OpCall) -> Rule:
    """Every dim is a factor; operands lack the dims in `expand1`, ..., and the result those in `sumdim`."""
    lacking = [call.arg(f"expand{operand}") for operand in (1, 2, 3)]
    names = [f"d{dim}" for dim in range(len(call.operands[0].shape) + len(lacking[0]))]
    lacking.append(call.arg("sumdim"))
    *operands, result = (" ".join(name for dim, name in enumerate(names) if dim not in absent) for absent in lacking)
    return bind(f"{', '.join(operands)} -> {result}", call, linear="0, 1, 2")


# Decompositions, inverses and solves: batches are not padded, since many of these operators refuse singular matrices,
# as padding would be.

_MATRIX_OPERATORS = """
    _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_svd cholesky cholesky_inverse geqrf
    linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu
    linalg_lu_factor_ex linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_qr lu_unpack ormqr
"""


@rule_maker(*(f"aten.{name}" for name in _MATRIX_OPERATORS.split()))
def _matrices(call: OpCall) -> Rule:
    """All but the last two dims of the first operand are batch dims, which the other tensors begin with, too.

    Tensors that do not, such as an empty factor that was not requested, must be whole. A product with an orthogonal
    matrix, given by its reflections, is linear in the other operand.
    """
    shape = call.operands[0].shape[:-2]
    batch = numbered_dims(shape, "b")
    rest: dict[str, int] = {}

    def name_dims(place: str, meta: TensorMeta) -> list[str]:
        shared = len(shape) if meta.shape[: len(shape)] == shape else 0
        inner = numbered_dims(meta.shape[shared:], f"{place}_")
        rest.update(inner)
        return [*list(batch)[:shared], *inner]

    operands = [name_dims(f"operand{position}", meta) for position, meta in enumerate(call.operands)]
    results = [
        None if meta is None else name_dims(f"result{position}", meta) for position, meta in enumerate(call.results)
    ]
    reductions = dict.fromkeys(batch, (None,) * len(results))  # tensors without the batch are empty
    linear = [{2}] if call.name == "aten::ormqr" else []
    return build(batch | rest, operands, results, whole=rest, reductions=reductions, linear=linear, uneven=False)


@rule_maker("aten._linalg_solve_ex", matrices={"A": "... n! m!"}, side="B", factors=("... n! m!", "... n!", "..."))
@rule_maker("aten.linalg_solve_triangular", matrices={"self": "... n! m!"}, side="B")
@rule_maker("aten.triangular_solve", matrices={"A": "... n! m!"}, side="self", factors=("... n! m!",))
@rule_maker("aten.cholesky_solve", matrices={"input2": "... n! m!"}, side="self")
@rule_maker("aten._cholesky_solve_helper", matrices={"A": "... n! m!"}, side="self")
@rule_maker("aten.linalg_lu_solve", matrices={"LU": "... n! m!", "pivots": "... n!"}, side="B")
@rule_maker("aten.linalg_ldl_solve", matrices={"LD": "... n! m!", "pivots": "... n!"}, side="B")
def _solve(call: OpCall, matrices: dict[str, str], side: str, factors: Sequence[str] = ()) -> Rule | None:
    """A linear system: columns of its right-hand side are independent; rows if the solution is the left factor.

    Args:
        call: the call on whole tensors.
        matrices: argument name -> dims, of all operands but the right-hand side.
        side: the argument of the right-hand side; the first result has its shape.
        factors: dims of the further results.

    Returns:
        The rule; None where the batches of the operands are broadcast.
    """
    if factors and side == "B" and shape_of(call, side) == shape_of(call, "A")[:-1]:  # one vector for every matrix
        return bind("... n! m!, ... m! -> ... m!, ... n! m!, ... m!, ...", call, uneven=False)
    left = "left" not in call.argument_names or call.arg("left")
    solved = "... n! c" if left else "... c n!"
    dims = {**matrices, side: solved}
    batches = {shape_of(call, name)[: 1 - len(text.split())] for name, text in dims.items()}
    if len(batches) > 1:
        return None
    kinds = (None,) * (1 + len(factors))  # results without the columns are equal on all ranks
    linear = [] if factors else [{side}]
    return bind_named(call, dims, [solved, *factors], linear=linear, reduce={"c": kinds}, uneven=False)


@rule_maker("aten.linalg_cross")
def _cross(call: OpCall) -> Rule:
    """The three components of a vector must be whole."""
    names = factor_names("d", len(call.result.shape))
    names[call.arg("dim")] += "!"
    text = " ".join(names)
    return bind(f"{text}, {text} -> {text}", call, linear="0, 1")


# Fourier transforms: dims that are not transformed are independent.


@rule_maker("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def fourier(call: OpCall) -> Rule:
    """Complex to complex, real to complex and complex to real; the latter two change the size of their last dim."""
    rank = len(call.operands[0].shape)
    transformed = {dim % rank for dim in call.arg("dim")}
    source = [f"p{dim}!" if dim in transformed else f"d{dim}" for dim in range(rank)]
    result = [f"q{dim}!" if dim in transformed else f"d{dim}" for dim in range(rank)]
    return bind(f"{' '.join(source)} -> {' '.join(result)}", call, linear="0")


# Distances between all pairs of points of two sets: coordinates must be whole, points may be sharded.

rule("aten._cdist_forward", "... i k!, ... j k! -> ... i j")
rule("aten._euclidean_dist", "... i k!, ... j k! -> ... i j")


@rule_maker("aten._cdist_backward")
def _cdist_backward(call: OpCall) -> Rule | None:
    """No rule for an empty batch, whose gradient has the size of the broadcast batch."""
    if any(0 in meta.shape for meta in call.operands):
        return None
    return bind("... i j, ... i k, ... j k, ... i j -> ... i k", call, linear="0")
