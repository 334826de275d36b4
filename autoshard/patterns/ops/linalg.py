"""Decompositions, inverses and solutions of matrices: a matrix must be whole, the batch may be sharded.

Batches are not padded: many of these operators refuse a matrix without an inverse, and padding is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.patterns.build import build
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import bind_named, factor_names, numbered_dims, shape_of
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta

_MATRIX_OPERATORS = """
    _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_svd cholesky cholesky_inverse geqrf
    linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu
    linalg_lu_factor_ex linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_qr lu_unpack ormqr
"""


@rule_maker(*(f"aten.{name}" for name in _MATRIX_OPERATORS.split()))
def _matrices(call: OpCall) -> Rule:
    """Everything but the last two dims of the first operand is a batch, which the other tensors begin with, too.

    What does not begin with it, such as a factor that was not asked for and is empty, must be whole. A product with an
    orthogonal matrix, given by its reflections, is linear in what it multiplies.
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
    reductions = dict.fromkeys(batch, (None,) * len(results))  # what lacks the batch is empty
    linear = [{2}] if call.op._schema.name == "aten::ormqr" else []
    return build(batch | rest, operands, results, whole=rest, reductions=reductions, linear=linear, uneven=False)


@rule_maker("aten._linalg_solve_ex", matrices={"A": "... n! m!"}, side="B", factors=("... n! m!", "... n!", "..."))
@rule_maker("aten.linalg_solve_triangular", matrices={"self": "... n! m!"}, side="B")
@rule_maker("aten.triangular_solve", matrices={"A": "... n! m!"}, side="self", factors=("... n! m!",))
@rule_maker("aten.cholesky_solve", matrices={"input2": "... n! m!"}, side="self")
@rule_maker("aten._cholesky_solve_helper", matrices={"A": "... n! m!"}, side="self")
@rule_maker("aten.linalg_lu_solve", matrices={"LU": "... n! m!", "pivots": "... n!"}, side="B")
@rule_maker("aten.linalg_ldl_solve", matrices={"LD": "... n! m!", "pivots": "... n!"}, side="B")
def _solve(call: OpCall, matrices: dict[str, str], side: str, factors: Sequence[str] = ()) -> Rule | None:
    """A system of equations: every column of its right-hand side for itself, or every row where it stands left.

    Args:
        call: the call on whole tensors.
        matrices: dims of the operands but for the right-hand side, by argument name.
        side: the argument that is the right-hand side, of whose shape the first result is.
        factors: dims of the results behind the first.

    Returns:
        The rule; None where the batches of the operands are broadcast.
    """
    if factors and side == "B" and shape_of(call, side) == shape_of(call, "A")[:-1]:  # one vector for every matrix
        return bind("... n! m!, ... m! -> ... m!, ... n! m!, ... m!, ...", call, uneven=False)
    left = all(argument.name != "left" for argument in call.op._schema.arguments) or call.arg("left")
    solved = "... n! c" if left else "... c n!"
    dims = {**matrices, side: solved}
    batches = {shape_of(call, name)[: 1 - len(text.split())] for name, text in dims.items()}
    if len(batches) > 1:
        return None
    kinds = (None,) * (1 + len(factors))  # what lacks the columns is the same on every rank
    linear = [] if factors else [{side}]
    return bind_named(call, dims, [solved, *factors], linear=linear, reduce={"c": kinds}, uneven=False)


@rule_maker("aten.linalg_cross")
def _cross(call: OpCall) -> Rule:
    """The three components of a vector must be whole."""
    names = factor_names("d", len(call.result.shape))
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
