"""Random operators: each becomes a function of the step's seed, whether it is split or not.

Default generators differ between ranks, and recomputation must not draw new numbers, so no random operator of a graph
runs unchanged. Local programs draw by operators of the `autoshard` namespace. Their results depend only on the seed,
the number of the operator in the program (`stream`) and the shard: replicas of a shard agree, shards differ, and a
rerun draws the same numbers. The device's generator is neither read nor advanced. All dims may be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.operator_library import accumulation_dtype
from autoshard.patterns._torch import has_philox, philox_normal_, philox_uniform_
from autoshard.patterns.exchanging import define_operator
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import factor_names, result_dtype
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule, TensorMeta

_MASK = (1 << 64) - 1
# Number of uniform numbers held at once while others are computed from them: 64 MiB of float32.
_BLOCK = 1 << 24

_STEP = "Tensor seed, int stream, Tensor? shard"


def _splitmix64(value: int) -> int:
    """A 64-bit hash (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def generator(seed: Tensor, stream: int, shard: Tensor | None, device: torch.device) -> torch.Generator:
    """The generator of one shard of one random operator in one step.

    Args:
        seed: the step's seed, a 0-d integer tensor; on the CPU, reading it needs no synchronisation.
        stream: number of the operator in the program.
        shard: index of the shard, a 0-d integer tensor; None for a tensor that is not split.
        device: where the numbers are needed.
    """
    return _generator(_key(seed, stream, shard), device)


def _key(seed: Tensor, stream: int, shard: Tensor | None) -> int:
    """The 64-bit key of one shard of one random operator in one step."""
    index = 0 if shard is None else int(shard) + 1
    return _splitmix64(_splitmix64(_splitmix64(int(seed) & _MASK) ^ stream) ^ index)


def _generator(key: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(key)


# Distributions with scalar parameters: operators `name(size, *parameters, seed, stream, shard, *, dtype, device)`.


def _is_stateless(values: Tensor) -> bool:
    """Return True if the stateless generator can fill a tensor."""
    # A GPU's default generator depends on its number of multiprocessors, too; the stateless one agrees on all GPUs.
    return values.is_floating_point() and has_philox(values.device.type)


def _fill_uniform(values: Tensor, key: int, low: float, high: float) -> Tensor:
    if _is_stateless(values):
        return philox_uniform_(values, key, 0, low, high)
    return values.uniform_(low, high, generator=_generator(key, values.device))


def _fill_normal(values: Tensor, key: int, mean: float, std: float) -> Tensor:
    if _is_stateless(values):
        return philox_normal_(values, key, mean, std)
    return values.normal_(mean, std, generator=_generator(key, values.device))


def _integers(values: Tensor, key: int, low: int, high: int) -> Tensor:
    if not has_philox(values.device.type):
        return values.random_(low, high, generator=_generator(key, values.device))
    width = high - low
    for offset, block in _blocks(values):
        if width > 1 << 53:  # beyond the precision of float64: combine 31 and 32 bits
            drawn = _integers_below(block, key, offset, 1 << 31) << 32 | _integers_below(
                block, _splitmix64(key), offset, 1 << 32
            )
            drawn = drawn if width >= 1 << 63 else drawn.remainder_(width)
        else:
            drawn = _integers_below(block, key, offset, width)
        block.copy_(drawn.add_(low))
    return values


def _fill_bernoulli(values: Tensor, key: int, p: float) -> Tensor:
    if not has_philox(values.device.type):
        return values.bernoulli_(p, generator=_generator(key, values.device))
    for offset, block in _blocks(values):
        block.copy_(_fractions(block, key, offset, torch.float32) < p)
    return values


def _blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Split a contiguous tensor into blocks, each with its start."""
    return ((number * _BLOCK, block) for number, block in enumerate(values.view(-1).split(_BLOCK)))


def _fractions(block: Tensor, key: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), one per element of a block."""
    return philox_uniform_(torch.empty(block.shape, dtype=dtype, device=block.device), key, offset, 0.0, 1.0)


def _integers_below(block: Tensor, key: int, offset: int, width: int) -> Tensor:
    """Uniform integers from 0 to `width` - 1, one per element of a block; `width` is at most 2**53."""
    return _fractions(block, key, offset, torch.float64).mul_(width).to(torch.int64)


def _define_fill(name: str, parameters: str, fill: Callable[..., Tensor]) -> None:
    """Define an operator that draws by filling a new tensor: `fill(values, key, *parameters)`."""

    def draw(size: Sequence[int], *arguments: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        *parameters, seed, stream, shard = arguments
        return fill(torch.empty(size, dtype=dtype, device=device), _key(seed, stream, shard), *parameters)

    def shapes(size: Sequence[int], *_: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    arguments = f"SymInt[] size, {parameters}, {_STEP}, *, ScalarType dtype, Device device"
    define_operator(f"{name}({arguments}) -> Tensor", draw, shapes)


_define_fill("uniform", "float low, float high", _fill_uniform)
_define_fill("normal", "float mean, float std", _fill_normal)
_define_fill("integers", "int low, int high", _integers)
_define_fill("bernoulli", "float p", _fill_bernoulli)


# Distributions with tensor parameters, of the shape of the first: operators `name(*parameters, seed, stream, shard)`.


def _define_sample(name: str, parameters: str, sample: Callable[..., Tensor]) -> None:
    """Define an operator that draws by a kernel of torch: `sample(*parameters, generator)`."""

    def draw(*arguments: Any) -> Tensor:
        *parameters, seed, stream, shard = arguments
        return sample(*parameters, generator(seed, stream, shard, parameters[0].device))

    define_operator(f"{name}({parameters}, {_STEP}) -> Tensor", draw, _shape_of_first)


def _shape_of_first(parameter: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(parameter)


_define_sample("poisson", "Tensor rate", torch.poisson)
_define_sample("gamma", "Tensor concentration", torch.ops.aten._standard_gamma)
_define_sample("dirichlet", "Tensor concentration", torch.ops.aten._sample_dirichlet)
_define_sample("binomial", "Tensor count, Tensor probability", torch.binomial)


# A seed for one shard of one random operator: a non-negative 0-d tensor on the host.
define_operator(
    f"key({_STEP}) -> Tensor",
    lambda seed, stream, shard: torch.full((), _key(seed, stream, shard) >> 1, dtype=torch.int64, device="cpu"),
    _shape_of_first,
)

draws = torch.ops.autoshard


def draw(
    call: LocalCall,
    op: Any,
    *parameters: Any,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Emit one of the operators of `draws`, with different numbers on every shard.

    Args:
        call: the call; all of its sharded factors are factors of the drawn tensor.
        op: the operator.
        parameters: its arguments after the size.
        size: local shape of the drawn tensor; that of the first result by default.
        dtype: its dtype; that of the first result by default.
    """
    emit = call.emit
    device = call.operands[0].device if call.operands else emit.home
    return emit.call(
        op,
        list(call.result_shape() if size is None else size),
        *parameters,
        *draw_arguments(call),
        dtype=result_dtype(call) if dtype is None else dtype,
        device=device,
    )


def draw_arguments(call: LocalCall) -> tuple[Any, int, Any]:
    """Arguments of every drawing operator: the step's seed, the operator's number, and the index of the shard.

    Seed and shard are on the CPU: generators are seeded by the host.
    """
    return call.emit.seed(), call.emit.stream(), shard_index(call)


def shard_index(call: LocalCall) -> Any:
    """Index of this rank's shard of a call, on the CPU, equal for replicas of a shard."""
    return call.linear_index([axis for axis, choice in enumerate(call.choices) if choice >= 0], host=True)


def _native_dropout(call: LocalCall) -> Any:
    p = call.arg("p")
    # Nothing is drawn.
    if p == 0 or call.arg("train") is False:
        return call.run()
    mask = draw(call, draws.bernoulli.default, 1.0 - p, dtype=result_dtype(call, 1))
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    # The backward kernel masks and scales in one pass.
    return call.operands[0].native_dropout_backward(mask, scale), mask


rule("aten.native_dropout", "... -> ..., ...", local=_native_dropout, uneven=True)
rule("aten.native_dropout_backward", "..., ... -> ...", linear="0")


def _draw_rule(call: OpCall, local: LocalProgram) -> Rule:
    """Operands broadcast to the result; or, without operands, one factor per dim of the result."""
    if call.operands:
        return bind(f"{', '.join('...' for _ in call.operands)} -> ...", call, local=local, uneven=True)
    return bind(f"-> {' '.join(factor_names('d', len(call.result.shape)))}", call, local=local, uneven=True)


def register_draw(program: LocalProgram, *names: str) -> None:
    """Register operators of ATen with the program that draws their result."""
    rule_maker(*(f"aten.{name}" for name in names), local=program)(_draw_rule)


def draw_program(op: Any, *arguments: str | float) -> Callable[[LocalCall], Any]:
    """A program that draws with scalar parameters: numbers, or names of the call's arguments."""

    def program(call: LocalCall) -> Any:
        return draw(call, op, *(call.arg(value) if isinstance(value, str) else value for value in arguments))

    return program


for _op, _arguments, _names in (
    (draws.uniform, (0.0, 1.0), "rand.default rand.generator rand_like.default rand_like.generator"),
    (draws.normal, (0.0, 1.0), "randn.default randn.generator randn_like.default randn_like.generator"),
    (draws.integers, (0, "high"), "randint.default randint.generator randint_like.default randint_like.generator"),
    (draws.integers, ("low", "high"), "randint.low randint.low_generator randint_like.low_dtype"),
    (draws.integers, ("low", "high"), "randint_like.low_generator_dtype"),
    (draws.integers, (0, "to"), "random.to"),
    (draws.uniform, ("from", "to"), "uniform.default"),
    (draws.normal, ("mean", "std"), "normal_functional.default normal.float_float"),
    (draws.bernoulli, ("p",), "bernoulli.p"),
):
    register_draw(draw_program(_op.default, *_arguments), *_names.split())


def _uniform(call: LocalCall, dtype: torch.dtype | None, size: Sequence[int] | None = None) -> Any:
    """Uniform numbers in [0, 1)."""
    return draw(call, draws.uniform.default, 0.0, 1.0, size=size, dtype=dtype)


def _exponential_noise(call: LocalCall, size: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Any:
    """The negative of exponentially distributed numbers of rate one."""
    # u is in [0, 1), so 1 - u is never zero.
    return (-_uniform(call, dtype, size)).log1p()


register_draw(lambda call: _exponential_noise(call) * (-1.0 / call.arg("lambd")), "exponential.default")


def _bernoulli(call: LocalCall) -> Any:
    """Ones with the probabilities in the last, or only, operand."""
    probabilities = call.operands[-1]
    uniform = _uniform(call, accumulation_dtype(probabilities.dtype))
    # Half-precision uniform numbers are too coarse for small probabilities.
    return (uniform < probabilities).to(result_dtype(call))


register_draw(_bernoulli, "bernoulli.default", "bernoulli.Tensor")


def _normal(call: LocalCall) -> Any:
    """Normal numbers whose mean or deviation, or both, are tensors."""
    value = draw(call, draws.normal.default, 0.0, 1.0)
    mean, std = call.arg("mean"), call.arg("std")
    value = value * (call.operands[-1] if isinstance(std, TensorMeta) else std)
    return value + (call.operands[0] if isinstance(mean, TensorMeta) else mean)


register_draw(_normal, "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")


def _randperm(call: LocalCall) -> Any:
    """A permutation, the same on every rank."""
    # Double-precision sort keys make ties, whose order would not be random, practically impossible.
    return _uniform(call, torch.float64).argsort(stable=True).to(result_dtype(call))


rule("aten.randperm", "-> d!", local=_randperm)


def _multinomial(call: LocalCall) -> Any:
    """Indices drawn by weight; rows are independent."""
    (weights,), count = call.operands, call.arg("num_samples")
    weights = weights.to(accumulation_dtype(weights.dtype))
    if call.arg("replacement") and count > 1:
        return _with_replacement(call, weights)
    # Exponential clocks: the first k to ring are distributed as k sequential draws without replacement.
    return (weights / -_exponential_noise(call, weights.shape, weights.dtype)).topk(count)[1]


def _with_replacement(call: LocalCall, weights: Any) -> Any:
    # Inverse transform sampling: one uniform number per draw.
    cumulative = weights.cumsum(-1)
    total = cumulative.slice(-1, -1)
    sample = cumulative.searchsorted(_uniform(call, weights.dtype) * total, right=True)
    # Rounding may put a number close to the total after the last step.
    return sample.clamp_max(weights.shape[-1] - 1)


rule("aten.multinomial", "... d! -> ... k!", local=_multinomial, uneven=True)


# Further distributions.
#
# Where a distribution has a simple quantile function, its numbers are computed from uniform ones, without an operator.


def _cauchy(call: LocalCall) -> Any:
    angle = (_uniform(call, torch.float64) - 0.5) * math.pi
    return (angle.tan() * call.arg("sigma") + call.arg("median")).to(result_dtype(call))


def _geometric(call: LocalCall) -> Any:
    """Number of trials up to the first success, at least one."""
    # Inverts P(trials > k) = (1 - p)^k.
    survival = (-_uniform(call, torch.float64)).log1p()
    return (survival / math.log1p(-call.arg("p"))).ceil().clamp_min(1.0).to(result_dtype(call))


register_draw(_cauchy, "cauchy.default")
register_draw(_geometric, "geometric.default")
register_draw(
    lambda call: draw(call, draws.normal.default, call.arg("mean"), call.arg("std")).exp(),
    "log_normal.default",
)


def _random(call: LocalCall) -> Any:
    # The other overload has no bounds.
    bounded = call.call.op._schema.overload_name == "from"
    low, high = (call.arg("from"), call.arg("to")) if bounded else (0, None)
    return draw(call, draws.integers.default, low, _random_limit(result_dtype(call)) if high is None else high)


def _random_limit(dtype: torch.dtype) -> int:
    """The exclusive upper bound of `Tensor.random_`: the dtype represents all integers below it."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype is torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)


register_draw(_random, "random.from", "random.default")


def _register(kernel: Any, text: str, *names: str) -> None:
    """Register operators that draw with tensor parameters, by a kernel that takes these and `draw_arguments`."""

    def program(call: LocalCall) -> Any:
        return call.emit.call(kernel, *call.operands, *draw_arguments(call))

    # Pad with ones, valid for all distributions: rejection samplers may never end for invalid parameters.
    rule(names, text, local=program, fill={"...": 1.0})


_register(draws.poisson.default, "... -> ...", "aten.poisson.default")
_register(draws.gamma.default, "... -> ...", "aten._standard_gamma.default")
_register(draws.dirichlet.default, "... k! -> ... k!", "aten._sample_dirichlet.default")
_register(draws.binomial.default, "..., ... -> ...", "aten.binomial.default")
rule("aten._standard_gamma_grad.default", "..., ... -> ...")
rule("aten._dirichlet_grad.default", "... k!, ... k!, ... k! -> ... k!")


def _rrelu(call: LocalCall) -> Any:
    """Leaky ReLU with random slopes for negative numbers: the value, and the slopes."""
    if not call.arg("training"):
        return call.run()
    x = call.operands[0]
    slope = draw(call, draws.uniform.default, call.arg("lower"), call.arg("upper"))
    slope = slope.masked_fill(x > 0, 1.0)
    return x * slope, slope


rule("aten.rrelu_with_noise_functional.default", "..., ... -> ..., ...", local=_rrelu, uneven=True)
rule("aten.rrelu_with_noise_backward.default", "..., ..., ... -> ...", linear="0")
