"""Strategies: the choices that a rule offers, and the specs that follow from them.

What arrays say of all strategies is what is said of each.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import call_of
from autoshard.patterns.rule import Rule, refine
from autoshard.patterns.strategy import (
    WHOLE,
    axis_choices,
    describe,
    fits,
    fitting_choices,
    is_evenly_split,
    is_plain,
    linear_choice,
    local_shape,
    local_size,
    local_sizes,
    operand_spec,
    partial_kind,
    result_spec,
    uneven_axis,
    work_split,
)
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_shape as layout_shape
from tests.planner.steps import joint_graph, planner_of

aten = torch.ops.aten
LEFT, RIGHT = torch.randn(4, 12), torch.randn(12, 24)
MM = bind("i k, k j -> i j", call_of(aten.mm.default, (LEFT, RIGHT), {}, LEFT @ RIGHT), linear="0, 1")
ONE = MeshShape.of({"x": 2})
TWO = MeshShape.of({"x": 2, "y": 3})
ROW, INNER, COLUMN = 0, 1, 2


def _specs(rule: Rule, choices: tuple[int, ...], mesh: MeshShape) -> list[str]:
    operands = [str(operand_spec(rule, choices, mesh, index)) for index in range(len(rule.operands))]
    return operands + [str(result_spec(rule, choices, mesh, index)) for index in range(len(rule.results))]


@pytest.mark.parametrize(
    ("choice", "specs"),
    [
        (WHOLE, ["R", "R", "R"]),
        (ROW, ["S(0)", "R", "S(0)"]),
        (INNER, ["S(1)", "S(0)", "P(sum)"]),
        (COLUMN, ["R", "S(1)", "S(1)"]),
        (linear_choice(0), ["P(sum)", "R", "P(sum)"]),
        (linear_choice(1), ["R", "P(sum)", "P(sum)"]),
    ],
)
def test_choices_of_one_axis(choice: int, specs: list[str]) -> None:
    assert choice in axis_choices(MM, 2)
    assert _specs(MM, (choice,), ONE) == specs


def test_an_axis_that_would_pad_a_factor_too_much_does_not_shard_it() -> None:
    """Rows are 4, the inner dim 12, columns 24."""
    assert axis_choices(MM, 3) == (WHOLE, ROW, INNER, COLUMN, linear_choice(0), linear_choice(1))
    assert axis_choices(MM, 9) == (WHOLE, INNER, COLUMN, linear_choice(0), linear_choice(1))
    assert axis_choices(MM, 1) == (WHOLE,)
    assert fits(MM, (INNER, INNER), TWO)
    assert fits(MM, (ROW, ROW), TWO)  # two of two rows each, in blocks of one for three ranks
    assert not fits(MM, (ROW, ROW), MeshShape.of({"x": 3, "y": 2}))  # only the last axis may pad
    assert not fits(MM, (ROW, ROW), MeshShape.of({"x": 4, "y": 2}))  # nothing is left to split


def test_what_can_not_be_padded_is_split_evenly_only() -> None:
    whole = replace(MM, factors=tuple(replace(factor, uneven=False) for factor in MM.factors))
    assert ROW not in axis_choices(whole, 3)
    assert not fits(whole, (ROW, WHOLE), MeshShape.of({"x": 3, "y": 2}))


def test_no_part_of_a_factor_is_padded_where_the_axis_divides_another() -> None:
    """Twelve as 3 x 4: two ranks split the four, until another axis has taken all of them."""
    rule = refine(MM, {INNER: (3,)})
    outer, inner = rule.indices("k")
    assert fits(rule, (inner,), ONE)
    assert not fits(rule, (outer,), ONE)
    assert fits(rule, (inner, outer), MeshShape.of({"x": 4, "y": 2}))


def test_padding_of_two_axes_together_makes_no_more_than_twice_as_much() -> None:
    """4 rows on 3 ranks become one and a half times as many; 12 steps on 8 ranks four thirds, on 9 one and a half."""
    assert fits(MM, (ROW, INNER), MeshShape.of({"x": 3, "y": 8}))
    assert fits(MM, (WHOLE, INNER), MeshShape.of({"x": 3, "y": 9}))
    assert not fits(MM, (ROW, INNER), MeshShape.of({"x": 3, "y": 9}))


def test_padded_shards_are_blocks_of_whole_steps() -> None:
    rule = refine(MM, {COLUMN: (3,)})  # 24 columns as 3 x 8
    outer, inner = COLUMN, COLUMN + 1
    assert _specs(rule, (outer,), ONE) == ["R", "S(1,b=16)", "S(1,b=16)"]
    assert _specs(refine(MM, {COLUMN: (8,)}), (inner,), ONE) == ["R", "S(1,f=8,b=2)", "S(1,f=8,b=2)"]
    assert _specs(rule, (outer, inner), MeshShape.of({"x": 2, "y": 4}))[1] == "S(1,b=16) S(1,f=2)"
    assert _specs(rule, (inner, outer), MeshShape.of({"x": 4, "y": 2}))[1] == "S(1,f=3) S(1,b=4)"
    assert _specs(MM, (ROW,), MeshShape.of({"x": 3}))[0] == "S(0)"  # torch can say that
    assert local_shape(rule, rule.operands[1], (outer,), ONE, (12, 24)) == (12, 16)
    assert work_split(rule, (outer,), ONE) == 1.5


def test_a_dim_is_padded_once() -> None:
    flat = torch.randn(15, 4)
    rule = bind("(a b) c -> a b c", call_of(aten.view.default, (flat, [3, 5, 4]), {}, flat.view(3, 5, 4)))
    assert fits(rule, (0, 2), MeshShape.of({"x": 2, "y": 3}))
    assert not fits(rule, (0, 1), MeshShape.of({"x": 2, "y": 2}))


def test_a_stretch_is_padded_by_an_axis_of_its_own() -> None:
    """A local program counts positions from a rank's number times the length of its stretch."""
    rule = bind("i^ j -> i^ j", call_of(aten.clone.default, (LEFT,), {}, LEFT))
    assert fits(rule, (0, WHOLE), MeshShape.of({"x": 3, "y": 2}))
    assert not fits(rule, (0, 0), TWO)


def test_two_axes_on_one_factor_split_in_mesh_order() -> None:
    assert _specs(MM, (COLUMN, COLUMN), TWO) == ["R R", "S(1) S(1)", "S(1) S(1)"]
    assert work_split(MM, (COLUMN, COLUMN), TWO) == 6
    assert work_split(MM, (COLUMN, linear_choice(0)), TWO) == 2


def test_an_inner_part_is_a_strided_shard() -> None:
    refined = refine(MM, {COLUMN: (4,)})
    outer, inner = refined.indices("j")
    assert _specs(refined, (inner, WHOLE), TWO)[1] == "S(1,f=4) R"
    # The outer part belongs to a later axis, so it still stands whole when the earlier axis splits.
    assert _specs(refined, (inner, WHOLE), MeshShape.of({"x": 3, "y": 2}))[1] == "S(1,f=4) R"
    mesh = MeshShape.of({"x": 3, "y": 2})
    assert str(operand_spec(refined, (inner, outer), mesh, 1)) == "S(1,f=4) S(1)"
    assert str(operand_spec(refined, (outer, inner), MeshShape.of({"x": 2, "y": 3}), 1)) == "S(1) S(1,f=2)"


def test_local_shapes_agree_with_the_specs() -> None:
    refined = refine(MM, {COLUMN: (4,)})
    for first in axis_choices(refined, 2):
        for second in axis_choices(refined, 3):
            choices = (first, second)
            if fits(refined, choices, TWO):
                spec = operand_spec(refined, choices, TWO, 1)
                own = local_shape(refined, refined.operands[1], choices, TWO, (12, 24))
                assert own == layout_shape((12, 24), spec, TWO)


def test_a_factor_that_only_the_result_has_leaves_nothing_partial() -> None:
    row = torch.randn(6)
    expanded = bind("j -> i j", call_of(aten.expand.default, (row, [4, 6]), {}, row.expand(4, 6)))
    assert partial_kind(expanded, expanded.indices("i")[0], 0) is None
    assert _specs(expanded, (expanded.indices("i")[0],), ONE) == ["R", "S(0)"]


def test_a_result_is_not_partial_in_two_ways() -> None:
    largest = bind(
        "i k -> i", call_of(aten.amax.default, (LEFT, [1]), {}, LEFT.amax(1)), linear="0", reduce={"k": "max"}
    )
    mesh = MeshShape.of({"x": 2, "y": 2})
    assert fits(largest, (1, 1), mesh)
    assert not fits(largest, (1, linear_choice(0)), mesh)


def test_describe() -> None:
    assert describe(MM, (ROW, INNER), TWO) == "i on x, k on y"
    assert describe(MM, (WHOLE, WHOLE), TWO) == "whole"
    assert describe(MM, (linear_choice(0), WHOLE), TWO) == "partial sum passes on x"


MESHES = ({"a": 2, "b": 2, "c": 4}, {"a": 3, "b": 2})
MODELS = ("hf_llama", "hf_bert")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_strategies_at_once_are_those_of_each(model: str, sizes: dict[str, int]) -> None:
    mesh = MeshShape.of(sizes)
    plain = uneven = 0
    for rule in {id(rule): rule for rule in GraphRules(joint_graph(model), mesh).rules.values()}.values():
        per_axis = [axis_choices(rule, size) for size in mesh.sizes]
        together = tuple(choices for choices in itertools.product(*per_axis) if fits(rule, choices, mesh))
        assert fitting_choices(rule, per_axis, mesh) == together
        if not is_plain(rule):
            continue
        table = np.array(together)
        even, local = is_evenly_split(rule, table, mesh), local_sizes(rule, table, mesh)
        for choices, whole, steps in zip(together, even, local, strict=True):
            factors = range(len(rule.factors))
            assert steps.tolist() == [local_size(rule, choices, mesh, factor) for factor in factors]
            assert whole == all(uneven_axis(rule, choices, mesh, factor) is None for factor in factors)
        plain, uneven = plain + len(table), uneven + int(np.count_nonzero(~even))
    assert plain
    assert uneven or sizes == MESHES[0]


@pytest.mark.parametrize("model", MODELS)
def test_prices_of_all_strategies_are_those_of_each(model: str) -> None:
    planner = planner_of(joint_graph(model), MESHES[1])
    tables = StrategyTables(planner.cost)
    for node in planner.rules.operators:
        call, rule, zeros = planner.rules.calls[node], planner.rules.rules[node], planner.rules.zeros[node]
        options = tables.options(rule)
        each = [planner.tables.strategy_seconds(call, rule, choices, zeros) for choices in options.choices]
        np.testing.assert_allclose(tables.seconds(call, rule, options, zeros), each, rtol=1e-12)
