"""Decompositions, inverses and solutions: batches, and the columns that are solved for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

A = normal(4, 6, 4, 4)
POSITIVE = A @ A.mT + 4 * torch.eye(4, dtype=torch.float64)
LOWER = torch.linalg.cholesky(POSITIVE)
TRIANGLE = A.triu() + 4 * torch.eye(4, dtype=torch.float64)
COLUMNS, SIDE_ROWS = normal(4, 6, 4, 12), normal(4, 6, 12, 4)
LU, PIVOTS, _ = torch.linalg.lu_factor_ex(A)
LD, LD_PIVOTS, _ = torch.linalg.ldl_factor_ex(POSITIVE)
REFLECTIONS, TAU = torch.geqrf(A)
BATCH, SOLVED = "b0 b1", "dim0 dim1 c"

GENERAL = """
    _linalg_det _linalg_eigvals _linalg_slogdet _linalg_svd linalg_eig linalg_inv_ex linalg_lu linalg_lu_factor_ex
    linalg_matrix_exp linalg_qr geqrf
"""


@pytest.mark.parametrize("name", GENERAL.split())
def test_batches_of_matrices(name: str) -> None:
    assert_sound(getattr(aten, name).default, A, shards=BATCH)


@pytest.mark.parametrize("name", ["_linalg_eigh", "linalg_cholesky_ex", "linalg_ldl_factor_ex"])
def test_batches_of_symmetric_matrices(name: str) -> None:
    assert_sound(getattr(aten, name).default, POSITIVE, shards=BATCH)


CASES = {
    "cholesky_inverse": partial(assert_sound, aten.cholesky_inverse.default, LOWER, shards=BATCH),
    "eigenvalues alone": partial(assert_sound, aten._linalg_eigh.default, POSITIVE, compute_v=False, shards=BATCH),
    "singular values alone": partial(assert_sound, aten._linalg_svd.default, A, compute_uv=False, shards=BATCH),
    "svd of tall matrices": partial(assert_sound, aten._linalg_svd.default, normal(4, 6, 5, 3), True, shards=BATCH),
    "r alone": partial(assert_sound, aten.linalg_qr.default, A, "r", shards=BATCH),
    "complete qr": partial(assert_sound, aten.linalg_qr.default, normal(4, 6, 5, 3), "complete", shards=BATCH),
    "one matrix": partial(assert_sound, aten.linalg_inv_ex.default, A[0, 0].clone(), shards=""),
    "householder": partial(assert_sound, aten.linalg_householder_product.default, REFLECTIONS, TAU, shards=BATCH),
    "ormqr": partial(assert_sound, aten.ormqr.default, REFLECTIONS, TAU, COLUMNS, shards=BATCH),
    "lu_unpack": partial(assert_sound, aten.lu_unpack.default, LU, PIVOTS, shards=BATCH),
    "lu_unpack of pivots": partial(assert_sound, aten.lu_unpack.default, LU, PIVOTS, False, True, shards=BATCH),
    "pinv": partial(assert_sound, aten.linalg_pinv.atol_rtol_tensor, A, shards=BATCH),
    "lstsq": partial(assert_sound, aten.linalg_lstsq.default, normal(4, 6, 5, 3), normal(4, 6, 5, 2), shards=BATCH),
    "solve": partial(assert_sound, aten._linalg_solve_ex.default, A, COLUMNS, shards=SOLVED),
    "solve of vectors": partial(assert_sound, aten._linalg_solve_ex.default, A, normal(4, 6, 4), shards="dim0 dim1"),
    "solve from the right": partial(
        assert_sound, aten._linalg_solve_ex.default, A, SIDE_ROWS, left=False, shards=SOLVED
    ),
    "solve of one": partial(assert_sound, aten._linalg_solve_ex.default, A[0, 0].clone(), normal(4, 12), shards="c"),
    "solve_triangular": partial(
        assert_sound, aten.linalg_solve_triangular.default, TRIANGLE, COLUMNS, upper=True, shards=SOLVED
    ),
    "solve_triangular from the right": partial(
        assert_sound, aten.linalg_solve_triangular.default, TRIANGLE, SIDE_ROWS, upper=True, left=False, shards=SOLVED
    ),
    "triangular_solve": partial(assert_sound, aten.triangular_solve.default, COLUMNS, TRIANGLE, shards=SOLVED),
    "cholesky_solve": partial(assert_sound, aten.cholesky_solve.default, COLUMNS, LOWER, shards=SOLVED),
    "_cholesky_solve_helper": partial(
        assert_sound, aten._cholesky_solve_helper.default, COLUMNS, LOWER, False, shards=SOLVED
    ),
    "lu_solve": partial(assert_sound, aten.linalg_lu_solve.default, LU, PIVOTS, COLUMNS, shards=SOLVED),
    "lu_solve from the right": partial(
        assert_sound, aten.linalg_lu_solve.default, LU, PIVOTS, SIDE_ROWS, left=False, shards=SOLVED
    ),
    "ldl_solve": partial(assert_sound, aten.linalg_ldl_solve.default, LD, LD_PIVOTS, COLUMNS, shards=SOLVED),
    "cross": partial(
        assert_sound, aten.linalg_cross.default, normal(4, 3, 12), normal(4, 3, 12), dim=1, shards="d0 d2"
    ),
    "cross broadcast": partial(
        assert_sound, aten.linalg_cross.default, normal(4, 1, 3), normal(4, 12, 3), shards="d0 d1"
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_a_solution_is_linear_in_the_right_hand_side_alone() -> None:
    _, rule = bound(aten.linalg_solve_triangular.default, TRIANGLE, COLUMNS, upper=True)
    assert rule.linear == (frozenset({1}),)


def test_batches_that_are_broadcast_have_no_rule() -> None:
    args = (A, normal(6, 4, 12))
    assert rule_for(call_of(aten._linalg_solve_ex.default, args, {}, aten._linalg_solve_ex.default(*args))) is None
