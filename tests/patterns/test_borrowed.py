"""Rules borrowed from torch's registry: of operators that users registered there, and of torch's own.

Operators without a rule run whole; what they draw at random, every rank has from the first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import autoshard
from autoshard.patterns import borrowed
from autoshard.patterns.borrowed import (
    NOT_LINEAR,
    TorchStrategy,
    borrowed_rule,
    is_registered,
    may_borrow,
    torch_strategies,
    whole_rule,
)
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.padding import emit_local
from autoshard.patterns.registry import call_of, has_rule, is_borrowed, register_rule, rule_for
from autoshard.patterns.rule import Rule
from autoshard.patterns.soundness import check
from autoshard.patterns.strategy import WHOLE
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, normal
from tests.patterns.soundness.peers import torch_operators
from tests.patterns.units.unit_models import build_seeded, plan_of, worst_error
from tests.releases import skip
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

aten = torch.ops.aten
NAMESPACE = "autoshard_test_borrowed"
REPLICATED, SUM = Replicate(), Partial()
SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "aten.linalg__powsum.default": [(normal(12, 6), 3.0, [1]), (normal(12, 6), 2.0, None), (normal(12, 6), 2.0, [0])],
    "aten.native_batch_norm.default": [(normal(12, 6, 4), normal(6), normal(6), None, None, True, 0.1, 1e-5)],
}
"""Calls of the operators that only torch has strategies for."""
NO_STRATEGIES = {
    "aten._linalg_check_errors.default": "what it looks at has too few dims",
    "aten._local_scalar_dense.default": "its result is a number",
    "aten.equal.default": "its result is a truth value of Python",
}
"""Operators in torch's registry of which nothing can be borrowed, and why."""


@torch.library.custom_op(f"{NAMESPACE}::gated", mutates_args=())
def gated(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """A kernel that autoshard knows nothing of; its groups are of features."""
    return (x @ weight).unflatten(-1, (groups, -1)).softmax(-1).flatten(-2)


@gated.register_fake
def _(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-1])


@torch.library.custom_op(f"{NAMESPACE}::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The gradients of `gated`."""
    y = gated(x, weight, groups).unflatten(-1, (groups, -1))
    grouped = grad.unflatten(-1, (groups, -1))
    inner = (y * (grouped - (grouped * y).sum(-1, keepdim=True))).flatten(-2)
    return inner @ weight.T, x.flatten(0, -2).T @ inner.flatten(0, -2)


@gated_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.groups = inputs[2]


gated.register_autograd(
    lambda ctx, grad: (*gated_backward(grad, *ctx.saved_tensors, ctx.groups), None), setup_context=_keep
)


@register_sharding(torch.ops.autoshard_test_borrowed.gated.default)
def _(x: Any, weight: Any, groups: int) -> list[Any]:
    return [([Shard(dim)], [Shard(dim), REPLICATED, None]) for dim in range(x.ndim - 1)]


@register_sharding(torch.ops.autoshard_test_borrowed.gated_backward.default)
def _(grad: Any, x: Any, weight: Any, groups: int) -> list[Any]:
    rows = [([Shard(dim), SUM], [Shard(dim), Shard(dim), REPLICATED, None]) for dim in range(x.ndim - 1)]
    return [*rows, ([SUM, SUM], [SUM, REPLICATED, REPLICATED, None])]


class Gated(nn.Module):
    """A block around the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(12, 24)
        self.weight = nn.Parameter(torch.randn(24, 12) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.inside(x), self.weight, 3).square().mean()


def _model() -> tuple[nn.Module, dict[str, Any]]:
    return build_seeded(Gated), {"x": normal(4, 6, 12)}


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        yield library


def _borrowed(op: Any, *args: Any) -> Rule | None:
    return borrowed_rule(call_of(op, args, {}, op(*args)))


def _shardable(rule: Rule | None) -> list[str]:
    assert rule is not None
    return [factor.name for factor in rule.factors if factor.shardable]


def test_a_custom_operator_with_strategies_in_torch_needs_no_rule() -> None:
    x, weight = normal(4, 6, 24), normal(24, 12)
    assert is_borrowed(torch.ops.autoshard_test_borrowed.gated.default)
    assert_sound(torch.ops.autoshard_test_borrowed.gated.default, x, weight, 3, shards="x0 x1")
    backward = torch.ops.autoshard_test_borrowed.gated_backward.default
    assert_sound(backward, normal(4, 6, 12), x, weight, 3, shards="grad0 grad1")
    rule = rule_for(call_of(backward, (normal(4, 6, 12), x, weight, 3), {}, (x, weight)))
    assert rule is not None
    assert rule.linear == (frozenset({0}),)


def test_a_model_with_it_is_sharded_and_trains_as_on_one_device() -> None:
    plan = plan_of(_model, {"dp": 2})
    strategies = {each.node: each.strategy for each in plan.choices}
    assert [text for node, text in strategies.items() if node.startswith("gated")] == ["x0 on dp", "grad0 on dp"]
    assert worst_error(_model, {"dp": 2, "tp": 2}) <= 1e-9


def test_doctor_says_what_is_borrowed() -> None:
    module, inputs = _model()
    report = autoshard.doctor(module, (), inputs)
    assert report.healthy
    borrowed_ones = [one for one in report.operators if one.source == "borrowed"]
    assert {one.name.rpartition(".")[0] for one in borrowed_ones} == {
        f"{NAMESPACE}.gated",
        f"{NAMESPACE}.gated_backward",
    }
    assert "(2 borrowed from torch)" in str(report)


def test_a_rule_of_ones_own_goes_before(library: torch.library.Library) -> None:
    op = _operator(library, "own", lambda x: x.cumsum(0), [([Shard(1)], [Shard(1)])])
    assert _shardable(rule_for(call_of(op, (normal(6, 6),), {}, normal(6, 6)))) == ["x1"]
    register_rule(f"{NAMESPACE}::own", "i! j! -> i! j!")
    assert not is_borrowed(op)
    assert _shardable(rule_for(call_of(op, (normal(6, 6),), {}, normal(6, 6)))) == []


def _operator(library: torch.library.Library, name: str, function: Any, strategies: Any, schema: str = "") -> Any:
    """A new operator, with these strategies in torch's registry."""
    library.define(f"{name}{schema or '(Tensor x) -> Tensor'}")
    library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    register_sharding(op)(strategies if callable(strategies) else lambda *args, **kwargs: strategies)
    return op


def test_strategies_that_meet_in_a_dim_become_variants(library: torch.library.Library) -> None:
    """Two lists of rows, one of which may be whole: an outer sum."""
    op = _operator(
        library,
        "outer_sum",
        lambda x, y: x.sum(0) + y.sum(0),
        [([SUM], [Shard(0), Shard(0)]), ([Shard(0)], [Shard(1), Shard(1)]), ([SUM], [SUM, SUM])],
        "(Tensor x, Tensor y) -> Tensor",
    )
    rule = _borrowed(op, normal(12, 6), normal(12, 6))
    assert rule is not None
    assert (_shardable(rule), rule.variants, rule.linear) == (["x0", "x1"], (), (frozenset({0, 1}),))
    assert_sound(op, normal(12, 6), normal(12, 6))
    op = _operator(
        library,
        "row_products",
        lambda x, y: torch.einsum("ik,kj->ij", x, y),
        [([Shard(0)], [Shard(0), REPLICATED]), ([Shard(1)], [REPLICATED, Shard(1)]), ([SUM], [Shard(1), Shard(0)])],
        "(Tensor x, Tensor y) -> Tensor",
    )
    rule = _borrowed(op, normal(12, 12), normal(12, 12))
    assert _shardable(rule) == ["x0", "y1", "x1"]
    op = _operator(
        library,
        "row_sums",
        lambda x: x.sum(),
        [([SUM], [Shard(0)]), ([Partial("avg")], [Shard(0)]), ([SUM], [Shard(1)])],
    )
    rule = _borrowed(op, normal(12, 12))
    assert rule is not None
    assert (_shardable(rule), [_shardable(each) for each in rule.variants]) == (["x0", "x1"], [["x0_2"]])
    findings = check(op, (normal(12, 12),), sizes=(2,))
    assert {finding.strategy for finding in findings if finding.mesh == "x=2"} == {"x0_2 on x"}


def test_what_has_no_counterpart_is_left_out(library: torch.library.Library) -> None:
    strategies = [
        ([Partial("max")], [Partial("max"), REPLICATED]),  # only sums pass
        ([SUM], [SUM, Shard(0)]),  # partial beside sharded
        ([REPLICATED], [SUM, REPLICATED]),  # reduced by nobody
        ([Shard(0)], [REPLICATED, REPLICATED]),  # nothing is sharded that could make a shard
        ([Shard(0)], [Shard(0), REPLICATED]),
    ]
    op = _operator(library, "scaled", lambda x, y: x * y, strategies, "(Tensor x, Tensor y) -> Tensor")
    rule = _borrowed(op, normal(6, 6), normal(1, 6))
    assert rule is not None
    assert (_shardable(rule), rule.linear) == (["x0"], ())
    assert _borrowed(op, normal(1, 6), normal(1, 6)) is None


def test_an_operator_with_a_size_among_its_arguments_makes_no_shards(library: torch.library.Library) -> None:
    rows = [([Shard(0)], [Shard(0), None]), ([Shard(1)], [Shard(1), None])]
    op = _operator(library, "rows", lambda x, n: x.new_zeros(n, x.shape[1]), rows, "(Tensor x, int n) -> Tensor")
    assert _shardable(_borrowed(op, normal(6, 6), 6)) == ["x1"]


def test_dims_that_an_axis_does_not_divide_are_not_split(library: torch.library.Library) -> None:
    op = _operator(library, "negated", lambda x: -x, [([Shard(0)], [Shard(0)])])
    rule = _borrowed(op, normal(7, 6))
    assert rule is not None
    assert not any(factor.uneven for factor in rule.factors)
    assert check(op, (normal(7, 6),)) == []


def test_a_function_that_raises_is_named(library: torch.library.Library) -> None:
    def wrong(x: Any) -> list[Any]:
        raise KeyError("no such layout")

    op = _operator(library, "raising", lambda x: -x, wrong)
    with pytest.warns(UserWarning, match="raising.default are not used on .4.: .* KeyError: 'no such layout'"):
        assert _borrowed(op, normal(4)) is None
    op = _operator(library, "miscounted", lambda x: -x, [([Shard(0)], [])])
    with pytest.warns(UserWarning, match="miscounted.default are not used"):
        assert _borrowed(op, normal(4)) is None


def test_strategies_registered_later_are_seen(library: torch.library.Library) -> None:
    op = _operator(library, "later", lambda x: -x, [([REPLICATED], [REPLICATED])])
    assert _borrowed(op, normal(4, 6)) is None
    register_sharding(op)(lambda x: [([Shard(1)], [Shard(1)])])
    rule = _borrowed(op, normal(4, 6))
    assert _shardable(rule) == ["x1"]
    assert _borrowed(op, normal(4, 6)) is rule  # equal calls share one rule


def test_what_dtensor_does_not_run_as_it_is_is_not_borrowed() -> None:
    assert not may_borrow(aten.view_copy.default)  # it changes the shape that is asked for
    assert not may_borrow(aten.is_same_size.default)  # it has code of its own
    assert not may_borrow(aten.rand_like.default)  # it has generators of its own
    assert not may_borrow(aten.unique_consecutive.default)  # it has nothing


def _overload(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


@pytest.mark.parametrize("name", SAMPLES)
def test_rules_of_torchs_own_operators_are_sound(name: str) -> None:
    if not is_registered(_overload(name)):
        skip(f"strategies of {name}")
    assert is_borrowed(_overload(name))
    for args in SAMPLES[name]:
        assert_sound(_overload(name), *args)


def test_every_operator_that_is_borrowed_has_a_sample() -> None:
    lists = ("aten._foreach", "aten._fused")  # what optimizers call, on lists of tensors, and no graph holds
    names = {str(op) for op in torch_operators() if is_borrowed(op) and not str(op).startswith(lists)}
    known = {*SAMPLES, *NO_STRATEGIES}
    assert names == {name for name in known if is_registered(_overload(name))}
    assert not any(has_rule(_overload(name)) and not is_borrowed(_overload(name)) for name in NO_STRATEGIES)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_partial_sums_that_torch_lets_pass_wrongly_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    overload = f"{name.replace('::', '.')}.default"
    monkeypatch.setattr(borrowed, "NOT_LINEAR", {})
    borrowed._rule_from_strategies.cache_clear()
    findings = check(_overload(overload), SAMPLES[overload][0], sizes=(2,))
    borrowed._rule_from_strategies.cache_clear()
    assert "partial sum passes on x" in {finding.strategy for finding in findings}


X, Y = torch.randn(4, 6), torch.randn(6, 8)


def _strategies(op: Any, *args: Any) -> tuple[TorchStrategy, ...]:
    return torch_strategies(call_of(op, args, {}, op(*args)))


def test_a_product_of_matrices() -> None:
    found = {(each.operands, each.results) for each in _strategies(aten.mm.default, X, Y)}
    assert ((Shard(0), Replicate()), (Shard(0),)) in found
    assert ((Shard(1), Shard(0)), (Partial(),)) in found
    assert ((Shard(0), Shard(0)), (Partial(),)) not in found


def test_a_function_that_is_asked_about_every_placement_of_its_operand() -> None:
    found = {(each.operands, each.results) for each in _strategies(aten.linalg__powsum.default, X, 2.0, [1])}
    assert {((Shard(0),), (Shard(0),)), ((Shard(1),), (Partial(),))} <= found


def test_operands_in_lists_stand_in_order() -> None:
    found = {(each.operands, each.results) for each in _strategies(aten.cat.default, [X, X + 1], 0)}
    assert ((Shard(1), Shard(1)), (Shard(1),)) in found


def test_nothing_is_known_of_most_custom_operators() -> None:
    with torch.library._scoped_library("autoshard_test_torch_registry", "DEF") as library:
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: (x / 2, x / 2), "CPU")
        op = torch.ops.autoshard_test_torch_registry.halves.default
        assert not is_registered(op)
        assert _strategies(op, X) == ()
        register_sharding(op)(lambda x: [([Shard(0), Partial()], [Shard(0)])])
        assert is_registered(op)
        assert _strategies(op, X) == (TorchStrategy((Shard(0),), (Shard(0), Partial())),)
        register_sharding(op)(lambda x: [([Shard(0), Partial()], [Shard(0), Shard(0)])])
        with pytest.raises(AssertionError):  # whatever torch says of it
            _strategies(op, X)


def test_it_is_asked_from_within_modes() -> None:
    call = call_of(aten.linalg__powsum.default, (X, 2.0, [1]), {}, X[0])
    expected = torch_strategies(call)
    with torch._subclasses.FakeTensorMode():
        assert torch_strategies(call) == expected


MESH = MeshShape.of({"a": 2, "b": 3})


@torch.library.custom_op("unknown_test::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def draw(rates: torch.Tensor) -> torch.Tensor:
    """An operator that draws at random, and that nobody wrote a rule for."""
    return torch.poisson(rates)


def _run(op: torch._ops.OpOverload, tensor: torch.Tensor, expected: object) -> object:
    call = call_of(op, (tensor,), {}, expected)
    assert rule_for(call) is None
    operand = PerRank((tensor,) * MESH.size)
    return emit_local(LocalCall(call, whole_rule(call), (WHOLE,) * MESH.ndim, MESH, Lockstep(MESH), [operand]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_the_first_rank(dtype: torch.dtype) -> None:
    rates = torch.full((5, 7), 40.0, dtype=dtype)
    torch.manual_seed(0)
    expected, another = draw(rates), draw(rates)
    assert not torch.equal(expected, another)
    torch.manual_seed(0)
    result = _run(torch.ops.unknown_test.draw.default, rates, expected)
    assert isinstance(result, PerRank)
    for tensor in result.values:
        assert torch.equal(tensor, expected)


def test_an_operator_that_draws_nothing_is_left_alone() -> None:
    matrix = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    expected = aten.unique_consecutive.default(matrix)
    values, *rest = _run(aten.unique_consecutive.default, matrix, expected)  # type: ignore[misc]
    assert all(torch.equal(tensor, expected[0]) for tensor in values.values)
    assert len(rest) == len(expected) - 1


@torch.library.custom_op("unknown_test::encode", mutates_args=())
def encode(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A layer whose samples are independent."""
    return torch.relu(x @ weight.t())


@encode.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("unknown_test::encode_backward", mutates_args=())
def encode_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its gradients."""
    grad = grad * (y > 0)
    return grad @ weight, grad.t() @ x


@encode_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_encoded(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


encode.register_autograd(lambda ctx, grad: encode_backward(grad, *ctx.saved_tensors), setup_context=_keep_encoded)


class Encoder(nn.Module):
    """An operator that nobody wrote a rule for, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(encode(self.first(x), self.weight)).square().mean()


def _encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Encoder().double(), {"x": torch.randn(16, 6, dtype=torch.float64)}


def test_the_warning_names_the_rule_that_splits_the_batch() -> None:
    """As it is written, the line of the warning makes the rules, and the batch is split with them."""
    module, inputs = _encoder()
    report = autoshard.doctor(module, (), inputs, cluster="cpu")
    with simulated_mesh(dp=2) as mesh, warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        plan = autoshard.plan(module, mesh, (), inputs)
    assert {row.strategy for row in plan.choices if "encode" in row.operator} == {"whole"}
    lines = [re.findall(r"autoshard\.register_rule\(\".*?\"\)", str(one.message)) for one in raised]
    named = [line for found in lines for line in found]
    assert len(named) == 2
    assert all(line in " ".join(str(report).split()) for line in named)
    for line in named:
        exec(line, {"autoshard": autoshard})
    weight = torch.randn(5, 6, dtype=torch.float64)
    assert autoshard.patterns.check(encode, (inputs["x"], weight)) == []
    grad = torch.randn(16, 5, dtype=torch.float64)
    assert autoshard.patterns.check(encode_backward, (grad, inputs["x"], weight, grad + 1)) == []
    reference = train(*_encoder())
    with simulated_mesh(dp=2) as mesh:
        hints = {"first.*": Replicate(), "last.*": Replicate(), "weight": Replicate()}
        plan = autoshard.plan(module, mesh, (), inputs, hints=hints, cluster=fast_links())
        assert {row.strategy for row in plan.choices if "encode" in row.operator} == {"b on dp"}
        autoshard.parallelize(module, mesh, (), inputs, hints=hints, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
