"""Builds the problems of a joint graph for any prices and constraints, with some mesh axes fixed (Rhino 4.2)."""

from __future__ import annotations

import copy
from functools import cached_property

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner.planning_problem import (
    BuiltProblem,
    Constraints,
    OverlapDiscount,
)
from autoshard.planner.problem_pass import ProblemPass
from autoshard.planner.problem_tables import ProblemTables
from autoshard.planner.regather import Reuse


class ProblemBuilder(ProblemTables):
    """Builds the problem of one graph on one mesh, with some mesh axes fixed or none; arguments as for the tables."""

    _last: tuple[frozenset[int], Decisions | None, Reuse, BuiltProblem] | None = None

    @cached_property
    def _plain(self) -> dict[tuple[frozenset[int], Reuse], BuiltProblem]:
        return {}

    def forget(self) -> None:
        """Drop the problems that were built; keep the tables."""
        self._plain, self._last = {}, None

    def with_constraints(self, constraints: Constraints) -> ProblemBuilder:
        """Return a builder for other constraints that shares the tables; itself for its own constraints."""
        if constraints is self.constraints:
            return self
        builder = copy.copy(self)
        builder.constraints, builder._plain, builder._last = constraints, {}, None
        return builder

    def for_graph(self, rules: GraphRules, constraints: Constraints) -> ProblemBuilder:
        """Return a builder for another graph on the same mesh, at the same prices, that shares the tables."""
        builder = ProblemBuilder(rules, self.tables, self.resharder, constraints)
        # The keys of tables are identities of spec lists, so the lists are shared too.
        builder.edge_tables, builder._lists, builder._labels = self.edge_tables, self._lists, self._labels
        builder._optional, builder._zeros, builder._sums = self._optional, self._zeros, self._sums
        return builder

    def build(
        self,
        free: frozenset[int],
        current: Decisions | None = None,
        prices: np.ndarray | None = None,
        discount: OverlapDiscount | None = None,
        reuse: Reuse = "none",
    ) -> BuiltProblem:
        """Return the problem in which some mesh axes are free.

        On the other axes everything is as in `current`, or replicated if that is None.

        Args:
            free: indices of the free axes.
            current: the current decisions.
            prices: seconds per byte of memory at every moment of the step: one moment per operator, and one after
                the last. The memory of options and copies is then part of their seconds.
            discount: the price of collectives of a kind that compute hides; by default all their seconds count.
            reuse: the copies of the forward half that the backward half may gather again (see `planner.regather`).
                With `"none"`, keeping them is best, since memory does not count; the problem then has no memory, so
                neither prices of it nor a limit.
        """
        assert prices is None or reuse != "none", "the memory of copies is unknown where memory does not count"
        built = self._build_unpriced(free, current, reuse)
        if discount is not None:
            built = built.with_discount(discount)
        return built if prices is None else built.with_memory_prices(prices)

    def _build_unpriced(self, free: frozenset[int], current: Decisions | None, reuse: Reuse) -> BuiltProblem:
        # Problems without current decisions are solved for many prices; others change from block to block.
        if current is None:
            if (free, reuse) not in self._plain:
                self._plain[free, reuse] = ProblemPass(self, free, None, reuse).run()
            return self._plain[free, reuse]
        if self._last is None or self._last[0] != free or self._last[1] is not current or self._last[2] != reuse:
            self._last = (free, current, reuse, ProblemPass(self, free, current, reuse).run())
        return self._last[3]
