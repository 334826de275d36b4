"""Routes from end to end: what every rank holds, by definition and by the local programs of all ranks.

Products of groups: every dim may be sharded, the groups and the dim that they lie along included.

Rows sent to the ranks of their groups, and what is done to them there, against one device.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the product of groups)
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture import capture
from autoshard.operators.routed.routed_rows import routed_variant
from autoshard.operators.routed.routing import routing
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.padding import emit_local
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.strategy import (
    Choices,
    axis_choices,
    describe,
    fits,
    offered_factors,
    operand_spec,
    result_spec,
)
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Routed
from autoshard.specs.tensors import shard, unshard
from autoshard.tools.verify.float64 import Float64Mode
from tests.models.routed import ROUTINGS, SortedExperts, choices_of, sorted_experts
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.patterns.units.unit_models import plan_of, worst_error
from tests.random_plans import random_plan
from tests.training import TOLERANCE

TOKENS, CHOICES, GROUPS = 24, 2, 12
ROWS = TOKENS * CHOICES
MESHES = [{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}]


class Route:
    """A routing of tokens to groups, on one device and on every rank."""

    def __init__(self, routed: str, mesh: MeshShape, kinds: tuple[str, ...]) -> None:
        self.ids = choices_of(routed, TOKENS, CHOICES, GROUPS).flatten()
        self.mesh = mesh
        self.kinds = kinds
        self.whole = routing.group(self.ids, GROUPS)
        call, rule = bound(routing.group.default, self.ids, GROUPS)
        self.local = run(call, rule, self.choices(rule), mesh, [self.ids], {})

    def choices(self, rule: Rule) -> Choices:
        """The choice of the factor that each axis is named after."""
        names = [factor.name for factor in rule.factors]
        return tuple(names.index(kind) for kind in self.kinds)

    def rows_at(self, coordinate: Sequence[int]) -> Tensor:
        """Which of the sorted rows the rank holds, by definition: its groups' rows of its line's tokens, in order."""
        order = self.whole[0]
        kept = torch.ones(ROWS, dtype=torch.bool)
        place = torch.arange(TOKENS).view([*self.mesh.sizes, -1])  # tokens lie by all axes, the first one outermost
        for axis, (kind, size) in enumerate(zip(self.kinds, self.mesh.sizes, strict=True)):
            if kind == "group":
                kept &= self.ids[order] * size // GROUPS == coordinate[axis]
            else:
                tokens = place.select(axis, coordinate[axis]).flatten()
                kept &= torch.isin(order // CHOICES, tokens)
        return kept.nonzero().flatten()

    def rows(self, tensor: Tensor, dim: int = 0) -> PerRank:
        """What every rank holds of a tensor whose dim `dim` are the sorted rows."""
        return PerRank(tuple(tensor.index_select(dim, self.rows_at(place)) for place in self.mesh.coordinates()))


def run(
    call: OpCall, rule: Rule, choices: Choices, mesh: MeshShape, operands: Sequence[Tensor], routed: Mapping[int, Any]
) -> list[PerRank]:
    """Run a strategy on all ranks; operands that are routed are given as every rank holds them."""
    values = []
    for position, operand in enumerate(operands):
        spec = operand_spec(rule, choices, mesh, position)
        assert spec.is_routed == (position in routed), (position, spec)
        parts = (shard(operand, spec, mesh, coordinate) for coordinate in mesh.coordinates() if not spec.is_routed)
        values.append(routed[position] if position in routed else PerRank(tuple(parts)))
    outputs = emit_local(LocalCall(call, rule, choices, mesh, Lockstep(mesh), values))
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def assert_parts(route: Route, rule: Rule, choices: Choices, found: Sequence[PerRank], whole: Sequence[Tensor]) -> None:
    """Every rank has its rows of the routed results; the others come together to the whole ones."""
    close = {"rtol": 1e-9, "atol": 1e-9} if whole[0].dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for result, (held, expected) in enumerate(zip(found, whole, strict=True)):
        spec = result_spec(rule, choices, route.mesh, result)
        if spec.is_routed:
            (dim,) = {placement.dim for placement in spec if isinstance(placement, Routed)}
            for one, other in zip(held.values, route.rows(expected, dim).values, strict=True):
                torch.testing.assert_close(one, other, **close)
        else:
            shards = dict(zip(route.mesh.coordinates(), held.values, strict=True))
            together = unshard(shards, spec, route.mesh, expected.shape)
            torch.testing.assert_close(together, expected, **close)


@functools.cache
def routes(routed: str) -> list[Route]:
    """Every way to split a route on the meshes: sources anywhere, groups on one axis at most."""
    meshes = map(MeshShape.of, MESHES)
    split = ((mesh, kinds) for mesh in meshes for kinds in itertools.product(("source", "group"), repeat=mesh.ndim))
    return [Route(routed, mesh, kinds) for mesh, kinds in split if kinds.count("group") < 2]


@pytest.mark.parametrize("routed", ROUTINGS)
def test_rows_go_to_their_ranks_and_come_back(routed: str) -> None:
    values = normal(TOKENS, 5)
    for route in routes(routed):
        operands = [values, *route.whole[:3]]
        call, rule = bound(routing.dispatch.default, *operands)
        choices = route.choices(rule)
        sent = run(call, rule, choices, route.mesh, operands, dict(enumerate(route.local[:3], 1)))
        rows = routing.dispatch(*operands)
        assert_parts(route, rule, choices, sent, [rows])

        operands = [rows, *route.whole[:3]]
        call, rule = bound(routing.combine.default, *operands)
        choices = route.choices(rule)
        back = run(call, rule, choices, route.mesh, operands, dict(enumerate([*sent, *route.local[:3]])))
        assert_parts(route, rule, choices, back, [values.repeat_interleave(CHOICES, 0)])


@pytest.mark.parametrize("routed", ROUTINGS)
def test_tables_with_an_entry_for_every_group(routed: str) -> None:
    table, rows = normal(GROUPS, 5), normal(ROWS, 5)
    for route in routes(routed):
        _, places, _, ends = route.whole
        for op, operands, given in (
            (routing.spread, [table, places, ends], {}),
            (routing.collect, [rows, places, ends], {0: route.rows(rows)}),
        ):
            call, rule = bound(op.default, *operands)
            given |= {1: route.local[1], 2: route.local[3]}
            choices = route.choices(rule)
            found = run(call, rule, choices, route.mesh, operands, given)
            assert_parts(route, rule, choices, found, [op(*operands)])


def test_ends_count_the_rows_that_a_rank_holds() -> None:
    for routed in ROUTINGS:
        for route in routes(routed):
            groups = route.ids[route.whole[0]]
            for place, ends in zip(route.mesh.coordinates(), route.local[3].values, strict=True):
                held, first, count = groups[route.rows_at(place)], 0, GROUPS
                if "group" in route.kinds:
                    axis = route.kinds.index("group")
                    count = GROUPS // route.mesh.sizes[axis]
                    first = place[axis] * count
                assert ends.tolist() == [int((held <= first + group).sum()) for group in range(count)]


def test_groups_are_split_by_one_axis() -> None:
    _, rule = bound(routing.group.default, torch.zeros(ROWS, dtype=torch.int64), GROUPS)
    (group,), (source,) = rule.indices("group"), rule.indices("source")
    mesh = MeshShape.of({"x": 2, "y": 2})
    assert fits(rule, (group, source), mesh)
    assert not fits(rule, (group, group), mesh)
    assert str(result_spec(rule, (source, group), mesh, 3)) == "S(by=source) S(0,by=group)"
    assert str(operand_spec(rule, (source, group), mesh, 0)) == "S(0) S(0)"
    assert axis_choices(rule, 5) == (-1,)


def test_other_dims() -> None:
    """Width is split without a word about routes; partial sums wait for the way back."""
    values, route = normal(TOKENS, 10), routing.group(choices_of("random", TOKENS, CHOICES, GROUPS).flatten(), GROUPS)
    assert_sound(routing.dispatch.default, values, *route[:3], shards="source group d1")
    assert_sound(routing.combine.default, normal(ROWS, 10), *route[:3], shards="source group d1")
    assert_sound(routing.spread.default, normal(GROUPS, 10), route[1], route[3], shards="source group d1")
    assert_sound(routing.collect.default, normal(ROWS, 10), route[1], route[3], shards="source group d1")
    assert_sound(routing.group.default, torch.zeros(ROWS, dtype=torch.int64), GROUPS, shards="source group")


# What is done to the rows meanwhile.


def operators() -> list[tuple[Any, tuple[Any, ...], dict[int, int], set[int]]]:
    """Operators with arguments, the operands that are rows (and the dim of these), and those that are ends."""
    ends = torch.zeros(GROUPS, dtype=torch.int32)
    rows, other, matrices = normal(ROWS, 8), normal(ROWS, 6), normal(GROUPS, 8, 6)
    grouped = torch.ops.transformers
    return [
        (aten.mul.Tensor, (rows, normal(ROWS, 1)), {0: 0, 1: 0}, set()),
        (aten.add.Tensor, (rows, normal(8)), {0: 0}, set()),
        (aten.split.Tensor, (rows, 4, -1), {0: 0}, set()),
        (aten.cat.default, ([rows, other], 1), {0: 0, 1: 0}, set()),
        (aten.t.default, (rows,), {0: 0}, set()),
        (aten.unsqueeze.default, (rows, 0), {0: 0}, set()),
        (aten.view.default, (rows, [ROWS, 2, 4]), {0: 0}, set()),
        (aten.expand.default, (normal(ROWS, 1), [ROWS, 8]), {0: 0}, set()),
        (aten.slice.Tensor, (rows, 1, 2, 6), {0: 0}, set()),
        (aten.slice.Tensor, (rows, 1, 1, 2**63 - 1, 2), {0: 0}, set()),
        *(
            (aten.slice_backward.default, (rows[:, start:end:step], [ROWS, 8], 1, start, end, step), {0: 0}, set())
            for start, end, step in ((0, 4, 1), (2, 6, 1), (1, 8, 2), (0, 8, 2), (2, 8, 3), (-3, 8, 1))
        ),
        (aten.sum.dim_IntList, (rows, [1], True), {0: 0}, set()),
        (aten.sum.dim_IntList, (rows, [0]), {0: 0}, set()),
        (aten.mm.default, (rows.t(), other), {0: 1, 1: 0}, set()),
        (aten.mm.default, (rows, normal(8, 3)), {0: 0}, set()),
        (aten._grouped_mm.default, (rows.float(), normal(GROUPS, 8, 4).float(), ends), {0: 0}, {2}),
        (aten._grouped_mm.default, (rows.float().t(), normal(ROWS, 4).float(), ends), {0: 1, 1: 0}, {2}),
        (grouped.grouped_mm_fallback.default, (rows, matrices, ends), {0: 0}, {2}),
        (grouped.grouped_mm_fallback_backward.default, (rows, matrices, ends, other), {0: 0, 3: 0}, {2}),
    ]


@pytest.mark.parametrize("case", range(len(operators())))
def test_operators_on_the_way(case: int) -> None:
    op, args, dims, ends = operators()[case]
    for routed in ROUTINGS:
        for route in routes(routed):
            _assert_passes(
                route, op, [route.whole[3] if place in ends else arg for place, arg in enumerate(args)], dims
            )


def _assert_passes(route: Route, op: Any, args: Sequence[Any], dims: Mapping[int, int]) -> None:
    whole = op(*args)
    call = call_of(op, args, {}, whole)
    rule = rule_for(call)
    assert rule is not None
    operands = [each for arg in args for each in (arg if isinstance(arg, list) else [arg]) if isinstance(each, Tensor)]
    ends = [position for position, operand in enumerate(operands) if operand is route.whole[3]]
    variant = routed_variant(rule, call, dims, ends, GROUPS)
    assert variant is not None
    both = replace(rule, variants=(variant,))
    both.check(call)
    given = {position: route.rows(operands[position], dim) for position, dim in dims.items()}
    given |= dict.fromkeys(ends, route.local[3])
    choices = route.choices(variant)
    assert fits(variant, choices, route.mesh)
    found = run(call, variant, choices, route.mesh, operands, given)
    assert_parts(route, variant, choices, found, list(whole) if isinstance(whole, (tuple, list)) else [whole])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.cumsum.default, (normal(ROWS, 8), 0)),
        (aten._softmax.default, (normal(ROWS, 8), 0, False)),
        (aten.mean.dim, (normal(ROWS, 8), [0])),
        (aten.amax.default, (normal(ROWS, 8), [0])),
        (aten.add.Tensor, (normal(ROWS, 8), normal(ROWS, 8))),
        (aten.view.default, (normal(ROWS, 8), [TOKENS, CHOICES, 8])),
        (aten.slice_backward.default, (normal(4, 8), [ROWS, 8], 0, 0, 4, 1)),
    ],
)
def test_what_can_not_pass(op: Any, args: tuple[Any, ...]) -> None:
    """Of the addition, the other operand's rows are in an order of their own."""
    call, rule = bound(op, *args)
    variant = routed_variant(rule, call, {0: 0}, (), GROUPS)
    assert variant is None


def test_prices_count_on_the_balanced_share() -> None:
    values, route = normal(TOKENS, 10), routing.group(choices_of("random", TOKENS, CHOICES, GROUPS).flatten(), GROUPS)
    _, rule = bound(routing.dispatch.default, values, *route[:3])
    (group,) = rule.indices("group")
    assert rule.factors[group].exchanges == (("all_to_all", math.prod((ROWS, 10, 8))),)


DTYPES = [torch.float32, torch.bfloat16]
# Products of groups in eight bits, against a reference: the kernel is of GPUs alone.

ENDS = torch.tensor([5, 5, 17, 24], dtype=torch.int32)  # the second group is empty
ALL = "g i k j"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [ENDS, ENDS.flip(0).cumsum(0, dtype=torch.int32).clamp(max=24)])
def test_groups_of_rows(dtype: torch.dtype, ends: torch.Tensor) -> None:
    rows = normal(24, 64).to(dtype)
    assert_sound(aten._grouped_mm.default, rows, normal(4, 64, 32).to(dtype), ends, shards=ALL)
    assert_sound(aten._grouped_mm.default, rows, normal(4, 32, 64).to(dtype).transpose(1, 2), ends, shards=ALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_the_contracted_dim(dtype: torch.dtype) -> None:
    """The gradient of the groups' matrices."""
    assert_sound(aten._grouped_mm.default, normal(24, 64).to(dtype).t(), normal(24, 32).to(dtype), ENDS, shards=ALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_columns(dtype: torch.dtype) -> None:
    args = (normal(4, 16, 32).to(dtype), normal(24, 32).to(dtype).t(), ENDS)
    assert_sound(aten._grouped_mm.default, *args, shards=ALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch(dtype: torch.dtype) -> None:
    args = (normal(4, 16, 32).to(dtype), normal(4, 24, 32).to(dtype).transpose(1, 2))
    assert_sound(aten._grouped_mm.default, *args, shards=ALL)


def test_rows_are_split_where_they_stay_aligned() -> None:
    _, rule = bound(aten._grouped_mm.default, normal(24, 64).bfloat16(), normal(4, 64, 32).bfloat16(), ENDS)
    sizes = {factor.name: factor.size for factor in rule.factors if factor.shardable}
    assert sizes == {"g": 4, "i": 24, "k": 64 // 8, "j": 32 // 8}


def test_a_bias_has_no_rule() -> None:
    args = (normal(24, 64), normal(4, 64, 32), ENDS, normal(4, 32))
    assert rule_for(call_of(aten._grouped_mm.default, args, {}, normal(24, 32))) is None


OP = aten._scaled_grouped_mm.default


@pytest.fixture(autouse=True)
def _kernel() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_grouped_mm", _reference, "CPU")
        yield


def _reference(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """The products of the scaled matrices, with what the kernel asks for as asserts; zeros where no group reaches."""
    assert left.stride(-1) == 1, "the first matrix lies by rows"
    assert right.stride(-2) == 1 or right.shape[-1] == 1, "the second matrix lies by columns"
    assert left.shape[-1] % 16 == 0, "rows are of whole units"
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    dtype = out_dtype or torch.bfloat16
    a, b = left.double(), right.double()
    if offs is None:
        return (a * scale_a[..., None] @ (b * scale_b[:, None, :])).to(dtype)
    ends = [0, *offs.tolist()]
    stretches = [slice(start, end) for start, end in pairwise(ends)]
    if left.dim() == right.dim() == 2:
        scales = scale_a.view(len(stretches), -1, 1), scale_b.view(len(stretches), 1, -1)
        products = [a[:, one] @ b[one] * scales[0][g] * scales[1][g] for g, one in enumerate(stretches)]
        return torch.stack(products).to(dtype)
    if left.dim() == 2:
        result = a.new_zeros(left.shape[0], right.shape[2])
        for g, one in enumerate(stretches):
            result[one] = a[one] * scale_a[one, None] @ (b[g] * scale_b[g])
        return result.to(dtype)
    result = a.new_zeros(left.shape[1], right.shape[1])
    for g, one in enumerate(stretches):
        result[:, one] = a[g] * scale_a[g][:, None] @ (b[:, one] * scale_b[one])
    return result.to(dtype)


def _eight_bits(*shape: int) -> Tensor:
    return normal(*shape).to(torch.float8_e4m3fn)


def _scale(*shape: int) -> Tensor:
    return normal(*shape).abs().float() + 0.5


def _by_columns(groups: int, columns: int) -> Tensor:
    return _eight_bits(groups, columns, 64).transpose(1, 2)


def test_scaled_groups_of_rows() -> None:
    args = (_eight_bits(24, 64), _by_columns(4, 64), _scale(24), _scale(4, 64), ENDS)
    assert_sound(OP, *args, shards="i j")


def test_scaled_groups_of_columns() -> None:
    args = (_eight_bits(4, 24, 64), _eight_bits(48, 64).t(), _scale(4, 24), _scale(48), 2 * ENDS)
    assert_sound(OP, *args, shards="i j")


def test_scaled_groups_of_the_contracted_dim() -> None:
    """The gradient of the groups' matrices: every group has scales of its own for all rows and columns."""
    ends = 16 * torch.tensor([1, 1, 3, 4], dtype=torch.int32)
    args = (_eight_bits(24, 64), _eight_bits(48, 64).t(), _scale(96), _scale(192), ends)
    assert_sound(OP, *args, shards="i j")


def test_scaled_a_batch() -> None:
    args = (_eight_bits(4, 24, 64), _by_columns(4, 48), _scale(4, 24), _scale(4, 48))
    assert_sound(OP, *args, shards="g i j")


def test_a_bias_and_scales_of_blocks_have_no_rule() -> None:
    result = normal(24, 64).bfloat16()
    args = (_eight_bits(24, 64), _by_columns(4, 64), _scale(24), _scale(4, 64), ENDS)
    assert rule_for(call_of(OP, (*args, normal(64)), {}, result)) is None
    blocks = (*args[:2], _scale(24, 2), _scale(4, 2, 64), ENDS)
    assert rule_for(call_of(OP, blocks, {}, result)) is None


BY_EXPERT = {"up": Shard(0), "bias": Shard(0), "down": Shard(0)}


def build(routing: str, **options: Any) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    return functools.partial(sorted_experts, dtype=torch.float64, routing=routing, **options)


def strategies(mesh: dict[str, int], hints: dict[str, Any]) -> dict[str, set[str]]:
    """By operator, how the plan splits what routes and what lies between."""
    found: dict[str, set[str]] = {}
    for choice in plan_of(build("random"), mesh, hints=hints).choices:
        if choice.operator.startswith(("autoshard.", "transformers.")):
            found.setdefault(choice.operator, set()).add(choice.strategy)
    return found


@pytest.mark.parametrize(("routing", "size"), [*((routing, 4) for routing in ROUTINGS), ("random", 2), ("random", 3)])
def test_experts_by_rank(routing: str, size: int) -> None:
    assert worst_error(build(routing), {"ep": size}, hints=BY_EXPERT) < TOLERANCE


@pytest.mark.parametrize(("routing", "axis"), [("random", 0), ("one expert", 1)])
def test_experts_on_one_axis_and_tokens_on_both(routing: str, axis: int) -> None:
    placements = (Shard(0), Replicate()) if axis == 0 else (Replicate(), Shard(0))
    hints = dict.fromkeys(BY_EXPERT, placements)
    assert worst_error(build(routing), {"x": 2, "y": 2}, hints=hints) < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "placements", "strategy"),
    [
        ({"ep": 4}, Shard(0), "group on ep"),
        ({"ep": 2, "dp": 2}, (Shard(0), Replicate()), "group on ep, source on dp"),
        ({"dp": 2, "ep": 2}, (Replicate(), Shard(0)), "source on dp, group on ep"),
    ],
)
def test_how_rows_are_split(mesh: dict[str, int], placements: Any, strategy: str) -> None:
    """Those were the strategies whose numbers the tests above have compared."""
    found = strategies(mesh, dict.fromkeys(BY_EXPERT, placements))
    assert set(found) >= {"autoshard.group", "autoshard.dispatch", "autoshard.combine"}
    assert all(each == {strategy} for each in found.values()), found


def test_tokens_alone() -> None:
    """Five ranks can not share six experts: each computes all of them, on its own tokens."""
    small = build("random", tokens=20, experts=6)
    plan = plan_of(small, {"dp": 5})
    found = {choice.strategy for choice in plan.choices if choice.operator.startswith(("autoshard.", "transformers."))}
    assert found == {"source on dp"}
    assert {record.kind for record in plan.collectives if record.phase == "forward"} <= {"all_gather"}  # of the output
    assert worst_error(small, {"dp": 5}) < TOLERANCE


@pytest.mark.parametrize(
    ("seed", "split"), [(5, "group on x, source on y"), (7, "partial sum passes on x, group on y")]
)
def test_random_plans(seed: int, split: str) -> None:
    """Whatever else is split how, and whatever waits for its reduction meanwhile."""
    mesh = MeshShape.of({"x": 2, "y": 3})
    module, inputs = build("random")()
    with Float64Mode():
        graph = capture(module, (), inputs)
    plan = random_plan(graph, mesh, seed, uneven=0.2)
    rules, choices = GraphRules(graph, mesh).rules, plan.decisions["choices"]
    (back,) = (node for node in rules if node.name == "combine")
    assert describe(rules[back], tuple(choices[back.name]), mesh) == split
    assert worst_error(build("random"), {"x": 2, "y": 3}, 1, plan=plan) < TOLERANCE


class Counting(SortedExperts):
    """Experts that also cumulate over the rows of all of them, which ranks with some of the rows can not."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = torch.sort(chosen.reshape(-1), stable=True)
        ends = torch.histc(order.values.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = self.first(x)[order.indices // chosen.shape[1]].cumsum(0)
        rows = torch.ops.transformers.grouped_mm_fallback(rows, self.up.transpose(1, 2), ends)
        return rows[torch.argsort(order.indices)]


def counting() -> tuple[nn.Module, dict[str, Any]]:
    _, inputs = sorted_experts(dtype=torch.float64)
    torch.manual_seed(0)
    return Counting(6, 4, 12).double(), inputs


def test_a_route_is_closed_by_an_operator_that_needs_all_rows() -> None:
    module, inputs = counting()
    rules = GraphRules(capture(module, (), inputs), MeshShape.of({"ep": 2}))
    routed = [node for node in rules.operators if "autoshard" in str(node.target)]
    assert len(routed) == 5
    for node in rules.operators:
        factors = offered_factors(rules.rules[node])
        assert not any(factor.shardable and factor.routed for factor in factors), node
    assert worst_error(counting, {"ep": 2}) < TOLERANCE
