"""Rules of matrix products against the operators themselves.

Rules of linear algebra, Fourier transforms and distances, against torch.
"""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.soundness import check
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.precision import BFLOAT16, CastModule
from tests.releases import skip
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, held_by_ranks, train

LEFT, RIGHT = normal(12, 6), normal(6, 4)
LEFTS, RIGHTS = normal(4, 12, 6), normal(4, 6, 2)

CASES = {
    "mm": partial(assert_sound, aten.mm.default, LEFT, RIGHT, shards="i k j"),
    "bmm": partial(assert_sound, aten.bmm.default, LEFTS, RIGHTS, shards="b i k j"),
    "mv": partial(assert_sound, aten.mv.default, LEFT, normal(6), shards="i k"),
    "dot": partial(assert_sound, aten.dot.default, normal(12), normal(12), shards="k"),
    "outer": partial(assert_sound, aten.outer.default, normal(12), normal(6), shards="i j"),
    "addr": partial(assert_sound, aten.addr.default, normal(6), normal(12), normal(6), alpha=2, shards="i j"),
    "addmm": partial(assert_sound, aten.addmm.default, normal(4), LEFT, RIGHT, shards="i k j"),
    "addmm scaled": partial(assert_sound, aten.addmm.default, normal(4), LEFT, RIGHT, beta=0.5, alpha=2),
    "addmm of a matrix": partial(assert_sound, aten.addmm.default, normal(12, 1), LEFT, RIGHT, shards="i k j"),
    "addmm of a number": partial(assert_sound, aten.addmm.default, normal(), LEFT, RIGHT, shards="i k j"),
    "baddbmm": partial(assert_sound, aten.baddbmm.default, normal(4, 1, 2), LEFTS, RIGHTS, shards="b i k j"),
    "addbmm": partial(assert_sound, aten.addbmm.default, normal(12, 2), LEFTS, RIGHTS, shards="b i k j"),
    "addmv": partial(assert_sound, aten.addmv.default, normal(12), LEFT, normal(6), shards="i k"),
    "linear": partial(assert_sound, aten.linear.default, normal(2, 6, 12), normal(4, 12), shards="dim0 dim1 k j"),
    "linear with bias": partial(
        assert_sound, aten.linear.default, normal(2, 6, 12), normal(4, 12), normal(4), shards="dim0 dim1 k j"
    ),
    "matmul of vectors": partial(assert_sound, aten.matmul.default, normal(12), normal(12), shards="k"),
    "matmul of vector and matrices": partial(
        assert_sound, aten.matmul.default, normal(12), normal(4, 12, 6), shards="dim0 k j"
    ),
    "matmul of matrices and vector": partial(
        assert_sound, aten.matmul.default, normal(4, 6, 12), normal(12), shards="dim0 i k"
    ),
    "matmul of batches": partial(
        assert_sound, aten.matmul.default, normal(4, 1, 6, 12), normal(2, 12, 4), shards="dim0 dim1 i k j"
    ),
    "_addmm_activation": partial(assert_sound, aten._addmm_activation.default, normal(4), LEFT, RIGHT, shards="i j"),
    "_addmm_activation of a matrix": partial(
        assert_sound, aten._addmm_activation.default, normal(12, 4), LEFT, RIGHT, use_gelu=True, shards="i j"
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_an_infinite_bias_is_added_once() -> None:
    bias = torch.tensor([float("inf"), 1, 2, 3], dtype=torch.float64)
    # Not by parts: an infinite number is no sum of two others, so only strategies without linear sets apply.
    findings = check(aten.addmm.default, (bias, normal(12, 6), normal(6, 4)))
    assert [finding for finding in findings if "partial sum" not in finding.strategy] == []


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


def test_products_of_integers_are_split_in_units_of_eight() -> None:
    assert_sound(aten._int_mm.default, _integers(24, 32), _integers(32, 16), shards="i k j")
    _, rule = bound(aten._int_mm.default, _integers(24, 32), _integers(32, 16))
    assert {factor.name: factor.size for factor in rule.factors if factor.shardable} == {"i": 24, "k": 4, "j": 2}
    assert_sound(aten._int_mm.default, _integers(24, 12), _integers(12, 16), shards="i j")


def test_weights_of_eight_bits() -> None:
    scales = torch.rand(48, generator=torch.Generator().manual_seed(0)).bfloat16()
    args = (normal(24, 64).bfloat16(), _integers(48, 64), scales)
    assert_sound(aten._weight_int8pack_mm.default, *args, shards="i j k")


# Products in eight bits, against torch.


def _eight_bits(*shape: int) -> torch.Tensor:
    return normal(*shape).to(torch.float8_e4m3fn)


def _assert_sound_where_cpus_have_it(op: Any, *args: Any, **options: Any) -> None:
    """Torch 2.11 has products in eight bits with one scale alone on CPUs, and none with scales in lists."""
    kwargs = {name: value for name, value in options.items() if name != "shards"}
    try:
        op(*args, **kwargs)
    except RuntimeError as error:
        missing = f"Could not run '{op.name().split('.')[0]}'|only supports per-tensor scaling for CPU"
        if not re.search(missing, str(error)):
            raise
        skip(f"a kernel on CPUs for these scales of {op.name()}")
    assert_sound(op, *args, **options)


ONE = torch.tensor(0.5)
SCALED = (_eight_bits(48, 64), _eight_bits(48, 64).t())


@pytest.mark.parametrize(
    "rest",
    [
        (ONE, ONE),
        (ONE, ONE, normal(48).bfloat16()),
        (ONE.expand(1, 1), ONE.expand(1, 1)),
        (normal(48, 1).abs().float(), normal(1, 48).abs().float()),
    ],
    ids=["one scale", "bias", "one scale as a matrix", "scales of rows and columns"],
)
def test_products_in_eight_bits(rest: tuple[torch.Tensor, ...]) -> None:
    _assert_sound_where_cpus_have_it(aten._scaled_mm.default, *SCALED, *rest, out_dtype=torch.bfloat16, shards="i k j")


def test_a_result_of_eight_bits_is_no_partial_sum() -> None:
    _, rule = bound(aten._scaled_mm.default, *SCALED, ONE, ONE, None, ONE, out_dtype=torch.float8_e4m3fn)
    assert {factor.name for factor in rule.factors if factor.shardable} == {"i", "j"}


def _second_version(*scales: torch.Tensor, bias: torch.Tensor | None = None, way: int = 0) -> tuple[Any, ...]:
    """Arguments of `_scaled_mm_v2`: scales in lists, each with how it is meant and how it lies in memory."""
    first, second = scales
    return (*SCALED, [first], [way], [0], [second], [way], [0], bias, torch.bfloat16)


@pytest.mark.parametrize(
    "args",
    [
        _second_version(ONE, ONE),
        _second_version(ONE, ONE, bias=normal(48).bfloat16()),
        _second_version(normal(48, 1).abs().float(), normal(1, 48).abs().float(), way=1),
    ],
    ids=["one scale", "bias", "scales of rows and columns"],
)
def test_products_with_scales_in_lists(args: tuple[Any, ...]) -> None:
    _assert_sound_where_cpus_have_it(aten._scaled_mm_v2.default, *args, shards="i k j")


def test_scales_of_blocks_are_left_whole() -> None:
    args = _second_version(torch.ones(48, 4), torch.ones(48, 4), way=2)
    result = torch.empty(48, 48, dtype=torch.bfloat16)
    assert rule_for(call_of(aten._scaled_mm_v2.default, args, {}, result)) is None


def test_every_dim_is_a_loop() -> None:
    """As `torch.nn.Bilinear` calls it: samples, outputs, and the features of both inputs."""
    left, weight, right = normal(4, 6), normal(8, 6, 12), normal(4, 12)
    assert_sound(aten._trilinear.default, left, weight, right, [1, 3], [0], [1, 2], [2, 3], shards="d0 d1 d2 d3")


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


SOLVE_CASES = {
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


@pytest.mark.parametrize("sound", SOLVE_CASES.values(), ids=SOLVE_CASES)
def test_rule_of_decompositions_is_sound(sound: partial[None]) -> None:
    sound()


def test_a_solution_is_linear_in_the_right_hand_side_alone() -> None:
    _, rule = bound(aten.linalg_solve_triangular.default, TRIANGLE, COLUMNS, upper=True)
    assert rule.linear == (frozenset({1}),)


def test_batches_that_are_broadcast_have_no_rule() -> None:
    args = (A, normal(6, 4, 12))
    assert rule_for(call_of(aten._linalg_solve_ex.default, args, {}, aten._linalg_solve_ex.default(*args))) is None


@pytest.mark.parametrize(("dims", "shards"), [([2], "d0 d1"), ([0, 2], "d1"), ([1], "d0 d2")])
def test_dims_that_are_not_transformed_may_be_sharded(dims: list[int], shards: str) -> None:
    x = normal(4, 6, 12)
    spectrum = aten._fft_r2c(x, dims, 1, True)
    assert_sound(aten._fft_c2c.default, torch.complex(x, x + 1), dims, 0, True, shards=shards)
    assert_sound(aten._fft_r2c.default, x, dims, 1, True, shards=shards)
    assert_sound(aten._fft_c2r.default, spectrum, dims, 2, x.shape[dims[-1]], shards=shards)


class Filtered(nn.Module):
    """A learned filter of a signal's spectrum, and the short-time spectrum of what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.filter = nn.Linear(12, 12), nn.Parameter(torch.randn(7, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.linear(x)) * torch.view_as_complex(self.filter)
        signal = torch.fft.irfft(spectrum, n=12)
        short = torch.stft(signal, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True)
        return signal.square().mean() + torch.view_as_real(short).abs().sum() + short.conj().real.mean()


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_training_with_spectra_is_training_on_one_device(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 12)}
    torch.manual_seed(1)
    reference = train(Filtered(), inputs)
    torch.manual_seed(1)
    module = Filtered()
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE


class Upcast(Filtered):
    """The filter in float32, whatever the precision around it: there is no spectrum in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.linear(x).float()) * torch.view_as_complex(self.filter.float())
        return torch.fft.irfft(spectrum, n=12).square().mean().to(x.dtype)


def test_spectra_of_float32_under_a_policy_of_bfloat16_are_near_those_of_one_device() -> None:
    torch.manual_seed(0)
    module, inputs = Upcast(), {"x": torch.randn(8, 12)}
    alone = CastModule(copy.deepcopy(module))
    loss = alone(**inputs)
    loss.backward()
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), mp_policy=BFLOAT16)
        ours = module(**inputs)
        ours.backward()
        pairs = [(ours, loss)]
        pairs += [(one.grad, two.grad) for one, two in zip(module.parameters(), alone.parameters(), strict=True)]
        for found, expected in pairs:
            for held in held_by_ranks(found.detach()):
                assert bool(torch.isfinite(held).all())
                assert (held - expected).abs().max() <= 0.05 * expected.abs().max()


# Distances between the points of two sets.

LEFT_FACTORS, RIGHT_FACTORS = normal(4, 12, 6), normal(4, 8, 6)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, math.inf])
def test_points_may_be_sharded(p: float) -> None:
    assert_sound(aten._cdist_forward.default, LEFT_FACTORS, RIGHT_FACTORS, p, None, shards="dim0 i j")


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_gradients_are_summed_over_the_other_points(p: float) -> None:
    distances = aten._cdist_forward(LEFT_FACTORS, RIGHT_FACTORS, p, None)
    args = (normal(4, 12, 8), LEFT_FACTORS, RIGHT_FACTORS, p, distances)
    assert_sound(aten._cdist_backward.default, *args, shards="dim0 i j k")


def test_euclidean_distances_by_products() -> None:
    assert_sound(aten._euclidean_dist.default, LEFT_FACTORS, RIGHT_FACTORS, shards="dim0 i j")
