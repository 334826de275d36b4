"""Pointwise operators: every dim of the result is a dim of each operand, broadcast as torch does."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.patterns.build import build
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.view_factors import view_rule

Sets = Mapping[int, str]
"""Linear sets by the number of tensor operands: `aten.add.Tensor` may be called with a number in place of one."""


def pointwise_rule(call: OpCall, linear: Sets | None = None) -> Rule:
    """The rule of a pointwise call.

    Args:
        linear: linear sets by number of operands. They hold for floating and complex results only: integers divide
            with rounding and booleans do not add up.
    """
    count = len(call.operands)
    exact = all(meta and not (meta.dtype.is_floating_point or meta.dtype.is_complex) for meta in call.results)
    sets = "" if exact or linear is None else linear.get(count, "")
    text = ", ".join(["..."] * count) + " -> " + ", ".join(["..."] * len(call.results))
    # Integers are not divided by what pads them, which may be zero.
    divides = call.op._schema.name.partition("::")[2] in _DIVISIONS and not any(
        meta and meta.dtype.is_floating_point for meta in call.results
    )
    return bind(text, call, linear=sets, fill={"...": 1.0} if divides else {})


# Operators that raise an error, or trap, where they divide integers by zero.
_DIVISIONS = ("floor_divide", "remainder", "fmod", "div")
_ONE_OPERAND = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp
    exp2 expm1 floor frac frexp.Tensor gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf
    isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logical_not logit mish mvlgamma nan_to_num
    polygamma rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus
    softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr
    special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 sqrt square tan
    tanh threshold trunc add.Scalar sub.Scalar rsub.Scalar div.Scalar_mode where.Scalar _add_relu.Scalar
"""
_SEVERAL_OPERANDS = """
    __and__ __lshift__ __or__ __rshift__ __xor__ _add_relu.Tensor _prelu_kernel atan2 bitwise_and
    bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp clamp_max clamp_min clip complex copysign
    div.Tensor_mode eq fill float_power floor_divide fmax fmin fmod gcd ge gt heaviside hypot igamma igammac isclose lcm
    ldexp.Tensor le logaddexp logaddexp2 logical_and logical_or logical_xor lt max.other maximum min.other minimum ne
    nextafter polar pow remainder special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_xlog1py special_zeta xlogy
"""
rule_maker(*(f"aten.{name}" for name in (_ONE_OPERAND + _SEVERAL_OPERANDS).split()))(pointwise_rule)

_LINEAR: tuple[tuple[str, Sets], ...] = (
    ("neg positive real imag _conj conj_physical _conj_physical _neg_view div.Scalar mul.Scalar", {1: "0"}),
    ("_masked_scale", {2: "0, 1"}),
    ("add.Tensor sub.Tensor rsub.Tensor", {2: "0+1"}),
    ("mul.Tensor", {1: "0", 2: "0, 1"}),
    ("div.Tensor true_divide.Tensor", {1: "0", 2: "0"}),
    ("where.self", {3: "1+2"}),
    ("masked_fill.Tensor", {3: "0+2"}),
    ("lerp.Scalar", {2: "0+1"}),
    ("lerp.Tensor", {3: "0+1"}),
    ("addcmul", {3: "0+1, 0+2"}),
    ("addcdiv", {3: "0+1"}),
    ("copy", {2: "1"}),
    # Backwards are linear in the incoming gradient alone.
    (
        "elu_backward gelu_backward hardsigmoid_backward hardtanh_backward leaky_relu_backward logit_backward "
        "sigmoid_backward silu_backward hardswish_backward mish_backward softplus_backward softshrink_backward "
        "hardshrink_backward tanh_backward threshold_backward",
        {2: "0"},
    ),
    ("log_sigmoid_backward _prelu_kernel_backward", {3: "0"}),
)
for _names, _sets in _LINEAR:
    rule_maker(*(f"aten.{name}" for name in _names.split()), linear=_sets)(pointwise_rule)


# With a number in place of a tensor: zeros leave a partial sum partial, any other number would be added once per rank.


@rule_maker("aten.masked_fill.Scalar")
def _masked_fill(call: OpCall) -> Rule:
    return pointwise_rule(call, {2: "0"} if call.arg("value") == 0 else None)


@rule_maker("aten.where.ScalarSelf")
def _where_scalar_self(call: OpCall) -> Rule:
    return pointwise_rule(call, {2: "1"} if call.arg("self") == 0 else None)


@rule_maker("aten.where.ScalarOther")
def _where_scalar_other(call: OpCall) -> Rule:
    return pointwise_rule(call, {2: "1"} if call.arg("other") == 0 else None)


@rule_maker("aten.glu", "aten.glu_backward")
def _glu(call: OpCall) -> Rule:
    """The two halves of a dim multiply each other: the dim is (2, n) on one side and n on the other."""
    backward = call.op._schema.name == "aten::glu_backward"
    gated = call.operands[-1]
    dim = call.arg("dim") % len(gated.shape)
    sizes = {f"d{index}": size for index, size in enumerate(gated.shape)}
    sizes[f"d{dim}"] //= 2
    small = [[name] for name in sizes]
    large = [["halves", *names] if index == dim else names for index, names in enumerate(small)]
    operands, results = ([small, large], [large]) if backward else ([large], [small])
    return build({"halves": 2, **sizes}, operands, results, whole=["halves"], linear=[{0}] if backward else [])


# The operators of the `prims` namespace, into which torch decomposes others: `aten` operators under stricter types.

_POINTWISE = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and
    bitwise_not bitwise_or bitwise_xor cbrt ceil cos cosh digamma eq erf erf_inv erfc erfcx exp exp2 expm1 floor fmax
    fmin fmod frexp gcd ge gt hypot igamma igammac isfinite le lgamma log log10 log1p log2 lt maximum minimum ndtri ne
    nextafter pow reciprocal remainder round rsqrt shift_left shift_right_arithmetic sign signbit sin sinh
    spherical_bessel_j0 sqrt tan tanh trunc zeta
"""
rule_maker(*(f"prims.{name}" for name in _POINTWISE.split()))(pointwise_rule)

_LINEAR_PRIMS: tuple[tuple[str, Sets], ...] = (
    ("neg real imag conj conj_physical clone", {1: "0"}),
    ("add sub", {2: "0+1"}),
    ("mul", {2: "0, 1"}),
    ("div", {2: "0"}),
    ("fma", {3: "0+2, 1+2"}),
    ("where", {3: "1+2"}),
)
for _names, _sets in _LINEAR_PRIMS:
    rule_maker(*(f"prims.{name}" for name in _names.split()), linear=_sets)(pointwise_rule)

rule("prims.view_of", "... -> ...", linear="0", free=True)
rule_maker("prims.squeeze", "prims.split_dim", "prims.collapse_view", "prims.collapse", "prims.reshape")(view_rule)


@rule_maker("prims.transpose")
def _transpose(call: OpCall) -> Rule:
    """The dims in the order of the argument `permutation`."""
    (operand,) = call.operands
    names = [f"d{dim}" for dim in range(len(operand.shape))]
    target = [[names[dim]] for dim in call.arg("permutation")]
    sizes = dict(zip(names, operand.shape, strict=True))
    return build(sizes, [[[name] for name in names]], [target], linear=[{0}], free=True)


@rule_maker("prims.broadcast_in_dim")
def _broadcast(call: OpCall) -> Rule:
    """Every dim of the operand becomes a dim of the result; what is repeated is a factor that only the result has."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    placed = zip(operand.shape, call.arg("broadcast_dimensions"), strict=True)
    source = [[f"d{dim}"] if size == result.shape[dim] else [] for size, dim in placed]
    return build(
        sizes,
        [source],
        [[[name] for name in sizes]],
        linear=[{0}],
        local=lambda program: program.run(shape=list(program.result_shape())),
        free=True,
    )


@rule_maker("prims.rev")
def _rev(call: OpCall) -> Rule:
    """Dims stay where they are; those that are turned round must be whole."""
    (operand,) = call.operands
    sizes = {f"d{dim}": size for dim, size in enumerate(operand.shape)}
    named = [[name] for name in sizes]
    return build(sizes, [named], [named], whole=[f"d{dim}" for dim in call.arg("dims")], linear=[{0}])


_KINDS = {"prims::sum": "sum", "prims::amax": "max", "prims::amin": "min", "prims::prod": "product"}
"""Reductions, and the kind of partial result that the shards of a reduced dim leave."""


@rule_maker(*_KINDS)
def _reduction(call: OpCall) -> Rule:
    (operand,) = call.operands
    name = call.op._schema.name
    sizes = {f"d{dim}": size for dim, size in enumerate(operand.shape)}
    kept = [[dim_name] for dim, dim_name in enumerate(sizes) if dim not in call.arg("dims")]
    reductions = {f"d{dim}": (_KINDS[name],) for dim in call.arg("dims")}
    linear = [{0}] if name == "prims::sum" else []
    return build(sizes, [[[dim_name] for dim_name in sizes]], [kept], reductions=reductions, linear=linear)
