"""What arrays say of all strategies is what is said of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.strategy import axis_choices, fits, local_size, uneven_axis
from autoshard.patterns.strategy_arrays import fitting_choices, is_evenly_split, is_plain, local_sizes
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.specs.axes import MeshShape
from tests.planner.steps import joint_graph, planner_of

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
