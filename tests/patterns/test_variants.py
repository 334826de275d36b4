from dataclasses import replace
from typing import Any

import pytest
import torch

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import RuleError
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import register_rule
from autoshard.patterns.rule import OpCall, Rule, build, refine
from autoshard.patterns.soundness import compare, run_all_ranks, strategies
from autoshard.patterns.strategy import (
    WHOLE,
    axis_choices,
    describe,
    fits,
    linear_choice,
    offered_factors,
    offered_linear,
    operand_spec,
    resolve_variant,
    result_spec,
)
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import aten, bound, normal

MESH = MeshShape.of({"dp": 2, "tp": 4})


def gathering(call: LocalCall) -> Any:
    """mm whose second operand arrives split along the contracted dim and is gathered inside."""
    emit, value = call.emit, call.operands[1]
    for axis in reversed(call.axes("w")):
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        pending = emit.call(gather, value, call.mesh.sizes[axis], emit.group(axis))
        value = emit.call(torch.ops._c10d_functional.wait_tensor.default, pending)
    return call.run(operands=[call.operands[0], value])


def product() -> tuple[OpCall, Rule]:
    """`mm` with a variant whose second operand arrives with its rows split by a factor of its own, and is gathered."""
    call, rule = bound(aten.mm.default, normal(8, 16), normal(16, 12))
    variant = build(
        {"i": 8, "j": 12, "w": 16, "kept": 16},
        [[["i"], ["kept"]], [["w"], ["j"]]],
        [[["i"], ["j"]]],
        whole=["kept"],
        contiguous=["w"],
        reductions={"w": (None,)},
        exchange={"w": [("all_gather", call.operands[1].bytes)]},
        linear=[{0}],
        local=gathering,
    )
    return call, replace(rule, variants=(variant,))


def test_choices_count_what_variants_add_behind_the_rule_itself() -> None:
    _, rule = product()
    assert [factor.name for factor in offered_factors(rule)] == ["i", "k", "j", "w", "kept"]
    assert axis_choices(rule, 4) == (WHOLE, 0, 1, 2, 3, linear_choice(0), linear_choice(1))
    assert offered_linear(rule) == rule.linear


def test_the_first_variant_that_knows_all_is_taken() -> None:
    _, rule = product()
    assert resolve_variant(rule, (0, 2)) == (rule, (0, 2))
    assert resolve_variant(rule, (WHOLE, WHOLE))[0] is rule
    variant, choices = resolve_variant(rule, (0, 3))
    assert variant is rule.variants[0]
    assert [variant.factors[choice].name for choice in choices] == ["i", "w"]


def test_choices_of_one_strategy_belong_to_one_variant() -> None:
    _, rule = product()
    assert fits(rule, (0, 3), MESH)
    assert not fits(rule, (1, 3), MESH), "the variant does not know k"
    assert fits(rule, (3, linear_choice(0)), MESH)
    assert not fits(rule, (3, linear_choice(1)), MESH), "the variant is not linear in the second operand"


def test_specs_are_those_of_the_variant() -> None:
    _, rule = product()
    specs = [str(operand_spec(rule, (0, 3), MESH, operand)) for operand in (0, 1)]
    assert specs == ["S(0) R", "R S(0)"]
    assert str(result_spec(rule, (0, 3), MESH, 0)) == "S(0) R"
    assert describe(rule, (0, 3), MESH) == "i on dp, w on tp"


def test_the_exchange_of_a_variant_is_priced() -> None:
    call, rule = product()
    tables = StrategyTables(CostModel(Cluster.preset("cpu"), MESH))
    assert tables.exchanges(rule, (WHOLE, 3)) == [("all_gather", 1, call.operands[1].bytes // 4)]
    assert tables.exchanges(rule, (WHOLE, 2)) == []


def test_variants_are_cut_like_the_rule() -> None:
    _, rule = product()
    refined = refine(rule, {0: (2,)})
    names = [[factor.name for factor in each.factors] for each in (refined, *refined.variants)]
    assert names == [["i.0", "i.1", "k", "j"], ["i.0", "i.1", "j", "w", "kept"]]


def test_strategies_of_variants_are_checked() -> None:
    """Sound as it is, and found out when the variant leaves its gather out."""
    call, rule = product()
    operands = [normal(8, 16), normal(16, 12)]
    silent = replace(rule.variants[0], local=lambda program: program.run(operands=[program.operands[0]] * 2))
    for each, sound in ((rule, True), (replace(rule, variants=(silent,)), False)):
        mesh = MeshShape.of({"x": 2})
        failed = set()
        for refined, choices in strategies(each, mesh):
            try:
                (shards,) = run_all_ranks(call, refined, choices, mesh, operands)
                problem = compare(shards or {}, result_spec(refined, choices, mesh, 0), mesh, operands[0] @ operands[1])
            except RuntimeError as error:
                problem = str(error)
            if problem is not None:
                failed.add(describe(refined, choices, mesh))
        assert ("w on x" in failed) is not sound
        assert sound is (failed == set())


def test_loops_of_one_name_have_one_size() -> None:
    call, rule = product()
    wrong = replace(rule.variants[0], factors=tuple(replace(f, name="i") for f in rule.variants[0].factors))
    with pytest.raises(RuleError, match="loops that differ need names that differ"):
        replace(rule, variants=(wrong,)).check(call)


def test_the_planner_takes_the_cheapest_variant() -> None:
    @torch.library.custom_op("variantstest::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_fake(torch.empty_like)

    def whole_or_by_rows(call: OpCall) -> Rule:
        return replace(bind("i! k! -> i! k!", call), variants=(bind("rows k! -> rows k!", call),))

    register_rule("variantstest::cube", whole_or_by_rows)

    class Cube(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cube(x.relu()).sum()

    plan = autoshard.plan(Cube(), {"tp": 4}, (torch.empty(4096, 4096),), cluster="cpu")
    (chosen,) = (decision.strategy for decision in plan.choices if decision.operator == "variantstest.cube")
    assert chosen == "rows on tp"
