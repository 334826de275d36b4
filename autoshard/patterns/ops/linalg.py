"""Decompositions, inverses and solutions of matrices: a matrix must be whole, the batch may be sharded.

Batches are not padded: many of these operators refuse a matrix without an inverse, and padding is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.patterns.build import build
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import bind_named, shape_of
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta


@rule_maker(
    "aten._linalg_det",
    "aten._linalg_eigh",
    "aten._linalg_eigvals",
    "aten._linalg_slogdet",
    "aten._linalg_svd",
    "aten.cholesky",
    "aten.cholesky_inverse",
    "aten.geqrf",
    "aten.linalg_cholesky_ex",
    "aten.linalg_eig",
    "aten.linalg_householder_product",
    "aten.linalg_inv_ex",
    "aten.linalg_ldl_factor_ex",
    "aten.linalg_lstsq",
    "aten.linalg_lu",
    "aten.linalg_lu_factor_ex",
    "aten.linalg_matrix_exp",
    "aten.linalg_pinv.atol_rtol_tensor",
    "aten.linalg_qr",
    "aten.lu_unpack",
    "aten.ormqr",
)
def _matrices(call: OpCall) -> Rule:
    """Everything but the last two dims of the first operand is a batch, which the other tensors begin with, too.

    What does not begin with it, such as a factor that was not asked for and is empty, must be whole. A product with an
    orthogonal matrix, given by its reflections, is linear in what it multiplies.
    """
    batch = call.operands[0].shape[:-2]
    sizes = {f"b{dim}": size for dim, size in enumerate(batch)}
    whole: list[str] = []

    def name_dims(place: str, meta: TensorMeta | None) -> list[list[str]] | None:
        if meta is None:
            return None
        shared = len(batch) if meta.shape[: len(batch)] == batch else 0
        rest = {f"{place}_{dim}": size for dim, size in enumerate(meta.shape[shared:])}
        sizes.update(rest)
        whole.extend(rest)
        return [[f"b{dim}"] for dim in range(shared)] + [[name] for name in rest]

    operands = [name_dims(f"operand{position}", meta) or [] for position, meta in enumerate(call.operands)]
    results = [name_dims(f"result{position}", meta) for position, meta in enumerate(call.results)]
    lacking = tuple(None for _ in results)  # what lacks the batch is empty
    reductions = {f"b{dim}": lacking for dim in range(len(batch))}
    linear = [{2}] if call.op._schema.name == "aten::ormqr" else []
    return build(sizes, operands, results, whole=whole, reductions=reductions, linear=linear, uneven=False)


def _solve_rule(
    call: OpCall, others: dict[str, str], side: str, results: Sequence[str] = (), *, left: bool = True
) -> Rule | None:
    """A system of equations: every column of its right-hand side for itself, or every row where it stands left.

    Args:
        others: dims of the operands but for the right-hand side, by argument name; they end in matrices or vectors.
        side: the argument that is the right-hand side, of whose shape the first result is.
        results: dims of the results behind the first.
        left: whether the matrix stands left of what is solved for.

    Returns:
        The rule; None where the batches of the operands are broadcast.
    """
    solved = "... n! c" if left else "... c n!"
    dims = {**others, side: solved}
    batches = {shape_of(call, name)[: 1 - len(text.split())] for name, text in dims.items()}
    if len(batches) > 1:
        return None
    kinds = (None,) * (1 + len(results))  # what lacks the columns is the same on every rank
    linear = [] if results else [{side}]
    return bind_named(call, dims, [solved, *results], linear=linear, reduce={"c": kinds}, uneven=False)


@rule_maker("aten._linalg_solve_ex")
def _solve(call: OpCall) -> Rule | None:
    matrix, side = shape_of(call, "A"), shape_of(call, "B")
    if side == matrix[:-1]:  # one vector for every matrix
        return bind("... n! m!, ... m! -> ... m!, ... n! m!, ... m!, ...", call, uneven=False)
    factors = ["... n! m!", "... n!", "..."]
    return _solve_rule(call, {"A": "... n! m!"}, "B", factors, left=call.arg("left"))


@rule_maker("aten.linalg_solve_triangular")
def _solve_triangular(call: OpCall) -> Rule | None:
    return _solve_rule(call, {"self": "... n! m!"}, "B", left=call.arg("left"))


@rule_maker("aten.triangular_solve")
def _triangular_solve(call: OpCall) -> Rule | None:
    return _solve_rule(call, {"A": "... n! m!"}, "self", ["... n! m!"])


@rule_maker("aten.cholesky_solve")
def _cholesky_solve(call: OpCall) -> Rule | None:
    return _solve_rule(call, {"input2": "... n! m!"}, "self")


@rule_maker("aten._cholesky_solve_helper")
def _cholesky_solve_helper(call: OpCall) -> Rule | None:
    return _solve_rule(call, {"A": "... n! m!"}, "self")


@rule_maker("aten.linalg_lu_solve")
def _lu_solve(call: OpCall) -> Rule | None:
    return _solve_rule(call, {"LU": "... n! m!", "pivots": "... n!"}, "B", left=call.arg("left"))


@rule_maker("aten.linalg_ldl_solve")
def _ldl_solve(call: OpCall) -> Rule | None:
    return _solve_rule(call, {"LD": "... n! m!", "pivots": "... n!"}, "B")


@rule_maker("aten.linalg_cross")
def _cross(call: OpCall) -> Rule:
    """The three components of a vector must be whole."""
    (result,) = call.results
    assert result is not None
    names = [f"d{dim}" for dim in range(len(result.shape))]
    names[call.arg("dim")] += "!"
    text = " ".join(names)
    return bind(f"{text}, {text} -> {text}", call, linear="0, 1")


# Fourier transforms: every dim that is not transformed is independent.


@rule_maker("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def fourier(call: OpCall) -> Rule:
    """Complex to complex, real to complex and back; the last transformed dim of the latter two changes its size."""
    rank = len(call.operands[0].shape)
    transformed = {dim % rank for dim in call.arg("dim")}
    source = [f"p{dim}!" if dim in transformed else f"d{dim}" for dim in range(rank)]
    result = [f"q{dim}!" if dim in transformed else f"d{dim}" for dim in range(rank)]
    return bind(f"{' '.join(source)} -> {' '.join(result)}", call, linear="0")


# Distances between all points of one set and all points of another: coordinates must be whole, points need not.

rule("aten._cdist_forward", "... i k!, ... j k! -> ... i j")
rule("aten._euclidean_dist", "... i k!, ... j k! -> ... i j")


@rule_maker("aten._cdist_backward")
def _cdist_backward(call: OpCall) -> Rule | None:
    """None for an empty batch: its gradient has the size of a batch that was broadcast to nothing."""
    if any(0 in meta.shape for meta in call.operands):
        return None
    return bind("... i j, ... i k, ... j k, ... i j -> ... i k", call, linear="0")
