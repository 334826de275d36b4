"""The operators of the `prims` namespace, into which torch decomposes others: `aten` operators under stricter types."""

from __future__ import annotations

from autoshard.patterns.build import build
from autoshard.patterns.ops.pointwise import Sets, pointwise_rule
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.view_factors import view_rule

_POINTWISE = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and
    bitwise_not bitwise_or bitwise_xor cbrt ceil cos cosh digamma eq erf erf_inv erfc erfcx exp exp2 expm1 floor fmax
    fmin fmod frexp gcd ge gt hypot igamma igammac isfinite le lgamma log log10 log1p log2 lt maximum minimum ndtri ne
    nextafter pow reciprocal remainder round rsqrt shift_left shift_right_arithmetic sign signbit sin sinh
    spherical_bessel_j0 sqrt tan tanh trunc zeta
"""
rule_maker(*(f"prims.{name}" for name in _POINTWISE.split()))(pointwise_rule)

_LINEAR: tuple[tuple[str, Sets], ...] = (
    ("neg real imag conj conj_physical clone", {1: "0"}),
    ("add sub", {2: "0+1"}),
    ("mul", {2: "0, 1"}),
    ("div", {2: "0"}),
    ("fma", {3: "0+2, 1+2"}),
    ("where", {3: "1+2"}),
)
for _names, _sets in _LINEAR:
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
    kept = [[each] for dim, each in enumerate(sizes) if dim not in call.arg("dims")]
    reductions = {f"d{dim}": (_KINDS[name],) for dim in call.arg("dims")}
    linear = [{0}] if name == "prims::sum" else []
    return build(sizes, [[[each] for each in sizes]], [kept], reductions=reductions, linear=linear)
