"""Strategies as tables: every row says the same as the rule, and prices are shares of the work."""

from __future__ import annotations

import pytest
import torch

from autoshard.cluster.cost import CostModel
from autoshard.patterns.padding import MASK_VECTOR_OPS
from autoshard.patterns.registry import rule_for
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.patterns.strategy import WHOLE, operand_spec, result_spec
from autoshard.planner.strategy_tables import SpecList, StrategyTables
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from tests.training import fast_links

aten = torch.ops.aten
MESH = MeshShape.of({"x": 2, "y": 3})


@pytest.fixture
def tables() -> StrategyTables:
    return StrategyTables(CostModel(fast_links(), MESH))


def _mm(m: int = 12, k: int = 6, n: int = 24) -> tuple[OpCall, Rule]:
    metas = [TensorMeta(shape, torch.float32) for shape in ((m, k), (k, n), (m, n))]
    call = OpCall(aten.mm.default, tuple(metas[:2]), (), (metas[2],))
    rule = rule_for(call)
    assert rule is not None
    return call, rule


def test_a_list_of_specs_stores_each_once() -> None:
    specs = [Spec.parse(text) for text in ("R R", "S(0) R", "R R", "S(0) R")]
    listed = SpecList.of(specs)
    assert listed.distinct == (specs[0], specs[1])
    assert [listed[index] for index in range(4)] == specs


def test_every_row_holds_the_specs_of_its_strategy(tables: StrategyTables) -> None:
    _, rule = _mm()
    options = tables.options(rule)
    assert len(set(options.choices)) == len(options.choices)
    assert (WHOLE, WHOLE) in options.choices
    for row, choices in enumerate(options.choices):
        for operand, specs in enumerate(options.operands):
            assert specs[row] is operand_spec(rule, choices, MESH, operand)
        assert options.results[0][row] is result_spec(rule, choices, MESH, 0)


def test_only_strategies_that_pad_little_are_listed(tables: StrategyTables) -> None:
    call, rule = _mm(m=4, k=5, n=1)
    sharded = {choices for choices in tables.options(rule).choices if any(choice >= 0 for choice in choices)}
    assert {choices[1] for choices in sharded if choices[1] >= 0} == {0, 1}  # blocks of two on three ranks
    even, uneven = (tables.compute_seconds(call, rule, choices) for choices in ((0, -1), (-1, 0)))
    assert uneven == even  # the slowest rank has two rows of four, on two ranks as on three


def test_replacing_padding_costs_what_reading_and_writing_operands_costs(tables: StrategyTables) -> None:
    """Four contracted steps on three ranks: both operands are masked; on two ranks nothing is."""
    call, rule = _mm(m=1024, k=4, n=2048)
    even, uneven = (tables.compute_seconds(call, rule, choices) for choices in ((1, -1), (-1, 1)))
    masked = sum(tables.cost.compute(0.0, 2 * 2 * 4 * size, torch.float32) for size in (1024, 2048))
    places = 2 * MASK_VECTOR_OPS * tables.cost.compute(0.0, 0.0, torch.float32)
    assert uneven - even == pytest.approx(masked + places)


def test_fixed_axes_keep_their_choice(tables: StrategyTables) -> None:
    _, rule = _mm()
    everything = tables.options(rule)
    current = next(choices for choices in everything.choices if choices[1] >= 0)
    restricted = tables.options(rule, (None, *current[1:]))
    assert set(restricted.choices) == {choices for choices in everything.choices if choices[1] == current[1]}
    assert len(restricted.choices) < len(everything.choices)


def test_tables_are_made_once_per_rule(tables: StrategyTables) -> None:
    call, rule = _mm()
    assert tables.options(rule) is tables.options(rule)
    assert tables.seconds(call, rule, tables.options(rule)) is tables.seconds(call, rule, tables.options(rule))


def test_sharing_work_saves_time(tables: StrategyTables) -> None:
    call, rule = _mm(m=1200, k=600, n=2400)
    options = tables.options(rule)
    seconds = dict(zip(options.choices, tables.seconds(call, rule, options).tolist(), strict=True))
    whole = seconds[WHOLE, WHOLE]
    for choices, cost in seconds.items():
        parts = (2 if choices[0] >= 0 else 1) * (3 if choices[1] >= 0 else 1)
        assert whole / parts * 0.99 <= cost <= whole


def test_views_cost_nothing(tables: StrategyTables) -> None:
    metas = TensorMeta((4, 6), torch.float32), TensorMeta((24,), torch.float32)
    call = OpCall(aten.view.default, (metas[0], (24,)), (), (metas[1],))
    rule = rule_for(call)
    assert rule is not None
    assert not tables.seconds(call, rule, tables.options(rule)).any()


def test_collectives_inside_a_local_program_are_priced(tables: StrategyTables) -> None:
    meta = TensorMeta((4, 48), torch.float32)
    call = OpCall(aten._softmax.default, (meta, 1, False), (), (meta,))
    rule = rule_for(call)
    assert rule is not None
    inner = [
        choices for choices in tables.options(rule).choices if tables.exchanges(rule, choices) and WHOLE in choices
    ]
    assert inner
    for choices in inner:
        ((kind, axis, amount),) = tables.exchanges(rule, choices)
        assert kind == "all_reduce"
        assert amount > 0
        cost = tables.strategy_seconds(call, rule, choices) - tables.compute_seconds(call, rule, choices)
        assert cost == pytest.approx(tables.cost.collective(kind, amount, axis))
