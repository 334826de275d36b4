"""Pointwise operators: every dim of the result is a dim of each operand, broadcast as torch does."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import numbered_dims
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, build, is_inexact

Sets = Mapping[int, str]
"""Number of tensor operands -> linear sets: `aten.add.Tensor` also takes a number in place of a tensor."""


def pointwise_rule(call: OpCall, linear: Sets | None = None) -> Rule:
    """The rule of a pointwise call.

    Args:
        linear: linear sets by number of operands, for floating and complex results only: integers divide with rounding,
            and booleans cannot be summed.
    """
    count = len(call.operands)
    exact = all(meta and not is_inexact(meta.dtype) for meta in call.results)
    sets = "" if exact or linear is None else linear.get(count, "")
    text = ", ".join(["..."] * count) + " -> " + ", ".join(["..."] * len(call.results))
    # Padding may be zero, and some devices trap on an integer division by zero.
    divides = call.name.partition("::")[2] in _DIVISIONS and not any(
        meta and meta.dtype.is_floating_point for meta in call.results
    )
    return bind(text, call, linear=sets, fill={"...": 1.0} if divides else {})


# Operators that raise an error or trap when they divide integers by zero.
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

# A product is linear in either operand, a sum in all terms jointly: a replicated term would be added once per rank.
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
    # Backward operators are linear in the incoming gradient only.
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


@rule_maker("aten.masked_fill.Scalar", number="value", linear="0")
@rule_maker("aten.where.ScalarSelf", number="self", linear="1")
@rule_maker("aten.where.ScalarOther", number="other", linear="1")
def _with_number(call: OpCall, number: str, linear: str) -> Rule:
    """A number in place of a tensor: linear only for 0, since any other number would be added once per rank."""
    return pointwise_rule(call, {2: linear} if call.arg(number) == 0 else None)


@rule_maker("aten.glu", "aten.glu_backward")
def _glu(call: OpCall) -> Rule:
    """The product of two halves of a dim, which is (2, n) in the operand and n in the result."""
    gated = call.operands[-1]
    dim = call.arg("dim") % len(gated.shape)
    sizes = numbered_dims(gated.shape)
    sizes[f"d{dim}"] //= 2
    small = list(sizes)
    large = [["halves", name] if index == dim else name for index, name in enumerate(small)]
    sizes = {"halves": 2, **sizes}
    if call.name == "aten::glu_backward":
        return build(sizes, [small, large], [large], whole=["halves"], linear=[{0}])
    return build(sizes, [large], [small], whole=["halves"])
