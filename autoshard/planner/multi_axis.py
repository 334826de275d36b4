"""Problems of three mesh axes and more: all axes at once if that is possible, or else some at a time, in turn."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cached_property

from autoshard.errors import BudgetError, PlanError
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.strategy import axis_choices
from autoshard.planner.lazy_costs import LazyCosts
from autoshard.planner.lazy_solver import LazySolver
from autoshard.planner.planning_context import BlockSolution, PlanningContext, SolveRequest
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.solving import CLOSE, SolveOptions, is_large
from autoshard.planner.tiling import Tiling
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder

_MOST_STRATEGIES = 3000  # strategies of one operator over all axes that a bound may list
MOST_PAIRS = 100_000_000  # pairs of strategies in tables of different edges over all axes, 8 bytes each
_ROUNDS = 4  # passes over the axes, and over the pairs of axes


class MultiAxisSolver:
    """Solves the problems of a planner whose mesh has three axes or more.

    Args:
        planner: the planner; it solves problems in which some axes are open.
    """

    def __init__(self, planner: PlanningContext) -> None:
        self.planner = planner
        # Of the constraints that were solved last: exact prices learned for them serve their next problem.
        self._lazy: tuple[Constraints, LazyCosts, Tiling | None] | None = None

    def solve(self, request: SolveRequest) -> BlockSolution:
        """Return the best decisions for all axes."""
        planner = self.planner
        solved = self._solve_lazily(request)
        # A plan at a discount is a proposal that the timeline judges, and needs no proof.
        enough = planner.settings.effort == "fast" or request.discount is not None
        if solved is not None and (enough or solved.gap <= CLOSE or solved.interrupted):
            return solved
        start = solved or planner.best
        try:
            in_turn = self._solve_in_turn(request, None if start is None else start.decisions)
        except (PlanError, BudgetError):
            if start is None:
                raise
            # Decisions under other constraints may be forbidden under these.
            in_turn = self._solve_in_turn(request, None)
        if solved is None:
            return replace(in_turn, lower_bound=-math.inf)
        better = in_turn if in_turn.value < solved.value else replace(solved, interrupted=in_turn.interrupted)
        return replace(better, lower_bound=solved.lower_bound)

    def _solve_lazily(self, request: SolveRequest) -> BlockSolution | None:
        """Solve all axes at once, with lower bounds as prices and exact prices where solutions use them.

        Small problems have exact prices at once. The result is None where memory counts, since its prices are not only
        of reshards; where there are too many strategies; and where no assignment is found.
        """
        planner = self.planner
        plain = request.prices is None and request.limit is None and request.method == "auto"
        if not plain or not self._is_listable:
            return None
        axes, constraints = frozenset(planner.axes), request.builder.constraints
        if self._lazy is None or self._lazy[0] is not constraints:
            with planner.time_phase("problem"):
                lower_bounds = LowerBoundResharder(planner.mesh, planner.cost.collective, planner.gradient_price)
                built = ProblemBuilder(planner.rules, planner.tables, lower_bounds, constraints).build(axes)
                self._lazy = constraints, LazyCosts(built), Tiling.of(built, planner.layers, free="families")
        _, lazy_costs, tiling = self._lazy
        # To find all exact prices of a small problem is quicker than to learn the used ones.
        if not is_large(lazy_costs.built.problem):
            return planner.solve_block(request, axes, None)
        options = SolveOptions(
            "auto", planner.deadline, proof=request.discount is None, work_limit=request.work, report=planner.report
        )
        with planner.time_phase("solve"):
            solver = LazySolver(lazy_costs, planner.resharder, tiling, options, request.discount)
            result = solver.run()
            self._lazy = constraints, solver.lazy_costs, tiling
        if not result.assignment:
            return None
        built = solver.lazy_costs.built
        decisions, cost = built.decode(result.assignment), built.problem.cost(result.assignment)
        return BlockSolution(decisions, result.cost, cost, result.lower_bound, result.method, result.interrupted)

    @cached_property
    def _is_listable(self) -> bool:
        """True if operators have few strategies over all axes, and their edges few pairs, with equal edges once."""
        planner, rules = self.planner, self.planner.rules.rules
        counts = {
            id(rule): math.prod(len(axis_choices(rule, size)) for size in planner.mesh.sizes)
            for rule in {id(rule): rule for rule in rules.values()}.values()
        }
        edges = {
            (id(rules[value.node]), id(rules[node]), operand)
            for node in planner.rules.operators
            for operand, value in enumerate(planner.rules.operands[node])
            if value.node in rules
        }
        pairs = sum(counts[producer] * counts[reader] for producer, reader, _ in edges)
        return max(counts.values(), default=0) <= _MOST_STRATEGIES and pairs <= MOST_PAIRS

    def _solve_in_turn(self, request: SolveRequest, start: Decisions | None) -> BlockSolution:
        """Open some axes while the others stay, in turn, until no block improves the solution."""
        planner = self.planner
        order = sorted(planner.axes, key=lambda axis: -planner.mesh.sizes[axis])
        # Without a start, one axis after the other, each solved exactly, is quick and comes near. Pairs of axes then
        # make the changes that only two axes can make together.
        widths = (1, 2) if start is None else (2,)
        rounds = 1 if planner.settings.effort == "fast" else _ROUNDS
        best: BlockSolution | None = None
        for width in widths:
            blocks = [frozenset(block) for block in itertools.combinations(order, width)]
            idle = 0
            for block in itertools.islice(itertools.cycle(blocks), rounds * len(blocks)):
                if best is not None and (idle == len(blocks) or best.interrupted or planner.is_past_deadline):
                    break
                solved = planner.solve_block(request, block, start if best is None else best.decisions)
                idle += 1
                if best is None or solved.value < best.value * (1 - 1e-9):
                    best, idle = solved, 1
                elif solved.interrupted:
                    best = replace(best, interrupted=True)
        assert best is not None
        return best
