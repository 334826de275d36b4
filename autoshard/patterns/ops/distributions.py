"""Random operators of further distributions, each a function of the step's seed as in `random`.

Numbers of one distribution are made of others by its quantile function, where it has a simple one, so that they need
no operator of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._draws import draws
from autoshard.patterns.ops._helpers import cast, result_dtype
from autoshard.patterns.ops.random import draw, draw_arguments, draw_program, register_draw
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _uniform(call: LocalCall) -> Any:
    """Uniform numbers in [0, 1) of the result's shape, in double precision."""
    return draw(call, draws.uniform.default, 0.0, 1.0, dtype=torch.float64)


def _cauchy(call: LocalCall) -> Any:
    emit = call.emit
    angle = (_uniform(call) - 0.5) * math.pi
    value = emit.tan(angle) * call.arg("sigma")
    return cast(call, value + call.arg("median"), result_dtype(call))


def _geometric(call: LocalCall) -> Any:
    """Number of trials up to the first success, at least one."""
    emit = call.emit
    survival = emit.log1p(-_uniform(call))
    trials = emit.ceil(survival / math.log1p(-call.arg("p")))
    return cast(call, emit.clamp_min(trials, 1.0), result_dtype(call))


def _log_normal(call: LocalCall) -> Any:
    normal = draw(call, draws.normal.default, call.arg("mean"), call.arg("std"))
    return call.emit.exp(normal)


register_draw(_cauchy, "aten.cauchy.default")
register_draw(_geometric, "aten.geometric.default")
register_draw(_log_normal, "aten.log_normal.default")
register_draw(draw_program(draws.integers.default, 0, "to"), "aten.random.to")


def _random_from(call: LocalCall) -> Any:
    low, high = call.arg("from"), call.arg("to")
    return draw(call, draws.integers.default, low, _random_limit(result_dtype(call)) if high is None else high)


def _random_default(call: LocalCall) -> Any:
    return draw(call, draws.integers.default, 0, _random_limit(result_dtype(call)))


def _random_limit(dtype: torch.dtype) -> int:
    """The end of the numbers that `Tensor.random_` draws: all that a dtype holds without gaps."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype is torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)


register_draw(_random_from, "aten.random.from")
register_draw(_random_default, "aten.random.default")


def _register(kernel: Any, text: str, *names: str) -> None:
    """Register operators that draw with tensors as parameters, by a kernel that takes these and the step."""

    def program(call: LocalCall) -> Any:
        return call.emit.call(kernel, *call.operands, *draw_arguments(call))

    # Ones are parameters of any of these; kernels that try until a number is accepted must not get what is none.
    rule(names, text, local=program, fill={"...": 1.0})


_register(draws.poisson.default, "... -> ...", "aten.poisson.default")
_register(draws.gamma.default, "... -> ...", "aten._standard_gamma.default")
_register(draws.dirichlet.default, "... k! -> ... k!", "aten._sample_dirichlet.default")
_register(draws.binomial.default, "..., ... -> ...", "aten.binomial.default")
rule("aten._standard_gamma_grad.default", "..., ... -> ...")
rule("aten._dirichlet_grad.default", "... k!, ... k!, ... k! -> ... k!")


@rule_maker("aten.rrelu_with_noise_functional.default")
def rrelu(call: OpCall) -> Rule:
    """A rectifier whose slope for negative numbers is drawn; results are the value and the slopes."""
    return bind("..., ... -> ..., ...", call, local=_rrelu, uneven=True)


def _rrelu(call: LocalCall) -> Any:
    if not call.arg("training"):
        return call.run()
    emit, x = call.emit, call.operands[0]
    slope = draw(call, draws.uniform.default, call.arg("lower"), call.arg("upper"))
    slope = emit.masked_fill(slope, x > 0, 1.0)
    return x * slope, slope


rule("aten.rrelu_with_noise_backward.default", "..., ..., ... -> ...", linear="0")
