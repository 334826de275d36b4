"""Problems of three mesh axes and more: all axes at once where that is possible, or else some at a time, in turn."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from functools import cached_property

from autoshard.errors import BudgetError, PlanError
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.strategy import axis_choices
from autoshard.planner.lazy_costs import LazyCosts
from autoshard.planner.lazy_solver import solve_lazily
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.solve_request import BlockSolution, SolveRequest
from autoshard.planner.solving import CLOSE, SolveOptions, is_large
from autoshard.planner.tiling import Tiling
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder

_MOST_STRATEGIES = 3000  # of one operator, all axes together, that a bound may list
_MOST_PAIRS = 100_000_000  # of strategies in tables of edges that are not alike, 8 bytes each, all axes together
_ROUNDS = 4  # passes over the axes, and over the pairs of axes


class MultiAxisSolver:
    """Solves the problems of a planner whose mesh has three axes or more.

    Args:
        planner: whose problems these are; it solves those in which some axes are open.
    """

    def __init__(self, planner: PlanningContext) -> None:
        self.planner = planner
        self._lazy_costs: tuple[Constraints, LazyCosts, Tiling | None] | None = None  # of the problem of all axes

    def solve(self, ask: SolveRequest) -> BlockSolution:
        """Three axes and more: all at once where that is possible, or else some while the others stay, in turn."""
        planner = self.planner
        solved = self._solve_lazily(ask)
        # Other prices of what is hidden only propose plans, which the timeline judges: they need no proof.
        enough = planner.settings.effort == "fast" or ask.discount is not None
        if solved is not None and (enough or solved.gap <= CLOSE or solved.interrupted):
            return solved
        start = solved or planner.best
        try:
            in_turn = self._solve_in_turn(ask, planner.axes, None if start is None else start.decisions)
        except (PlanError, BudgetError):
            if start is None:
                raise
            in_turn = self._solve_in_turn(ask, planner.axes, None)  # what others wished for may be forbidden here
        if solved is None:
            return replace(in_turn, lower_bound=-math.inf)
        better = in_turn if in_turn.value < solved.value else replace(solved, interrupted=in_turn.interrupted)
        return replace(better, lower_bound=solved.lower_bound)

    def _solve_lazily(self, ask: SolveRequest) -> BlockSolution | None:
        """All axes at once, at prices that no path is below until the exact ones are learned where they count.

        Small problems have exact prices at once. None where memory counts, whose prices are of more than reshards,
        where strategies are too many, and where nothing is found.
        """
        planner = self.planner
        open_ = ask.prices is None and ask.limit is None and ask.method == "auto"
        if not open_ or not self._is_listable:
            return None
        wishes = ask.builder.constraints
        if self._lazy_costs is None or self._lazy_costs[0] is not wishes:
            with planner.time_phase("problem"):
                loose = LowerBoundResharder(planner.mesh, planner.cost.collective, planner.gradient_price)
                built = ProblemBuilder(planner.rules, planner.tables, loose, wishes).build(frozenset(planner.axes))
                self._lazy_costs = wishes, LazyCosts(built), Tiling.of(built, planner.layers, free="families")
        _, lessons, tiling = self._lazy_costs
        if not is_large(lessons.built.problem):
            return planner.solve_block(ask, frozenset(planner.axes), None)
        search = SolveOptions(
            "auto", planner.deadline, proof=ask.discount is None, work_limit=ask.work, report=planner.report
        )
        with planner.time_phase("solve"):
            answer, lessons = solve_lazily(lessons, planner.resharder, tiling, search, ask.discount)
            self._lazy_costs = wishes, lessons, tiling
        if not answer.assignment:
            return None
        decisions, cost = lessons.built.decode(answer.assignment), lessons.built.problem.cost(answer.assignment)
        return BlockSolution(decisions, answer.cost, cost, answer.lower_bound, answer.method, answer.interrupted)

    @cached_property
    def _is_listable(self) -> bool:
        """Whether the strategies of all axes together are few, and their pairs along edges, equal ones once."""
        planner, rules = self.planner, self.planner.rules.rules
        distinct = {id(rule): rule for rule in rules.values()}
        counts = {
            key: math.prod(len(axis_choices(rule, size)) for size in planner.mesh.sizes)
            for key, rule in distinct.items()
        }
        makers = {
            (id(rules[maker]), id(rules[node]), operand)
            for node in planner.rules.operators
            for operand, value in enumerate(planner.rules.operands[node])
            if (maker := value.node) in rules
        }
        pairs = sum(counts[maker] * counts[reader] for maker, reader, _ in makers)
        return max(counts.values(), default=0) <= _MOST_STRATEGIES and pairs <= _MOST_PAIRS

    def _solve_in_turn(self, ask: SolveRequest, axes: list[int], start: Decisions | None) -> BlockSolution:
        """Three axes and more: some are open while the others stay, until nothing improves.

        Without a start, one axis after the other, each solved exactly, is quick and near; then two at a time mend what
        only two axes can change together.
        """
        planner = self.planner
        order = sorted(axes, key=lambda axis: -planner.mesh.sizes[axis])
        widths = (1, 2) if start is None else (2,)
        best: BlockSolution | None = None
        for width in widths:
            blocks = [frozenset(block) for block in itertools.combinations(order, width)]
            idle = 0
            rounds = 1 if planner.settings.effort == "fast" else _ROUNDS
            for block in itertools.islice(itertools.cycle(blocks), rounds * len(blocks)):
                if best is not None and (
                    idle == len(blocks) or best.interrupted or time.monotonic() > planner.deadline
                ):
                    break
                better = planner.solve_block(ask, block, start if best is None else best.decisions)
                idle += 1
                if best is None or better.value < best.value * (1 - 1e-9):
                    best, idle = better, 1
                elif better.interrupted:
                    best = replace(best, interrupted=True)
        assert best is not None
        return best
