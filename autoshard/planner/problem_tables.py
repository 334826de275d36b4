"""Tables that the problems of one graph share: lists of specs, tables of edges, and padded or summed arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch.distributed.tensor import Placement

from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.strategy import ABSENT
from autoshard.planner.boundary_specs import BoundarySpecs
from autoshard.planner.planning_problem import (
    Constraints,
    Variable,
)
from autoshard.planner.strategy_tables import EdgeTables, SpecList, StrategyTables
from autoshard.planner.task_graph_restrictions import Restrictions, restrictions
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.reshard.path import Resharder
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec


class ProblemTables:
    """Tables that the problems of one graph on one mesh share: strategies, specs, prices, and arrays.

    Equal layers share their arrays, so that the solver processes each of them once.

    Args:
        rules: the graph and its rules.
        tables: strategies and their prices.
        resharder: finds and prices reshards.
        constraints: the constraints of the plan.
    """

    def __init__(
        self,
        rules: GraphRules,
        tables: StrategyTables,
        resharder: Resharder | LowerBoundResharder,
        constraints: Constraints,
    ) -> None:
        self.rules = rules
        self.tables = tables
        self.mesh: MeshShape = tables.mesh
        self.resharder = resharder
        self.constraints = constraints
        self.edge_tables = EdgeTables(resharder)
        self._lists: dict[tuple[Spec, ...], SpecList] = {}
        self._labels: dict[int, tuple[object, np.ndarray]] = {}
        # Padded variables of operators that may be absent, by the identity of the unpadded arrays.
        self._optional: dict[tuple[int, int], tuple[object, Variable]] = {}
        self._zeros: dict[int, tuple[object, np.ndarray]] = {}
        self._sums: dict[tuple[int, ...], tuple[object, np.ndarray]] = {}  # the values keep the summands alive

    def intern_specs(self, specs: Sequence[Spec]) -> SpecList:
        """Return the unique list of these specs."""
        key = tuple(specs)
        if key not in self._lists:
            self._lists[key] = SpecList.of(specs)
        return self._lists[key]

    @cached_property
    def restrictions(self) -> Restrictions:
        """Restrictions of strategies and parameters by task graphs."""
        return restrictions(self.rules, self.constraints.task_graphs, self.constraints.pinned, self.mesh)

    @property
    def boundary_specs(self) -> BoundarySpecs:
        """Specs of tensors outside the step."""
        return BoundarySpecs(self.rules, self.tables, self.constraints, self.restrictions)

    def with_absence(self, variable: Variable) -> Variable:
        """Return the variable of an operator with one more option: not to run."""
        # Equal operators share the padded variable too.
        key = id(variable.options), id(variable.seconds)
        if key not in self._optional:
            options = (*variable.options, (ABSENT,) * self.mesh.ndim)
            results = tuple(
                SpecList.of([specs[option] for option in range(len(variable.options))] + [specs[0]])
                for specs in variable.results
            )
            padded = Variable("operator", "", options, self.with_zero(variable.seconds), results)
            self._optional[key] = variable, padded
        return replace(self._optional[key][1], key=variable.key)

    def with_zero(self, values: np.ndarray) -> np.ndarray:
        """Return the values of an operator's options, with zero appended for its absence; cached."""
        if id(values) not in self._zeros:
            self._zeros[id(values)] = values, np.append(values, 0.0)
        return self._zeros[id(values)][1]

    def sum_of(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum of some values of an operator's options; cached."""
        key = tuple(map(id, parts))
        if key not in self._sums:
            self._sums[key] = parts, np.sum(parts, axis=0)
        return self._sums[key][1]

    def labels(self, variable: Variable) -> np.ndarray:
        """Return one label of the choice or placement per option and mesh axis; equal variables share them."""
        is_operator = variable.kind == "operator"
        holder: object = variable.options if is_operator else variable.results[0]
        if id(holder) not in self._labels:
            rows = variable.options if is_operator else _placement_ids(variable.results[0])
            labels = np.array(rows, dtype=np.int64).reshape(len(rows), self.mesh.ndim)
            self._labels[id(holder)] = (holder, labels)
        return self._labels[id(holder)][1]


def _placement_ids(specs: SpecList) -> list[list[int]]:
    """Return placements as numbers, for every entry of the list and mesh axis."""
    labels: dict[Placement, int] = {}
    rows = [[labels.setdefault(placement, len(labels)) for placement in spec] for spec in specs.distinct]
    return [rows[place] for place in specs.index]
