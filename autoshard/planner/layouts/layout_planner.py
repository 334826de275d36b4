"""Plans of standard layouts of a captured call, and a plan that is never slower than the best of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from autoshard.capture.marks import assign_task_graphs, defaults_of
from autoshard.capture.recomputation import forms_of, recomputable
from autoshard.errors import AutoshardError, BudgetError
from autoshard.options.target import Target
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.layouts.standard_layouts import Hints, StandardLayout, StandardLayouts
from autoshard.planner.planner import Planner
from autoshard.planner.planning import (
    CapturedCall,
    freeze_older_objects,
    planner_for,
    recomputing_planner,
    run_planner,
    with_provenance,
)
from autoshard.planner.recompute_option import names_by_option
from autoshard.planner.regather import regather_parameters
from autoshard.plans.sharding_plan import ShardingPlan


def plan_no_slower_than_layouts(call: CapturedCall, planner: Planner, target: Target) -> ShardingPlan:
    """Return the plan of a planner, or the fastest standard layout that fits if the time limit ended the search.

    So even on a busy machine, where the search does less, the plan is as good as the standard layouts.

    Args:
        call: the call that is planned.
        planner: its planner.
        target: the target of the planner.

    Raises:
        BudgetError: no plan that was found fits the memory limit, nor does a standard layout.
    """
    try:
        plan = run_planner(planner, call.seconds, target, explained=call.is_explained)
    except BudgetError:
        layout = _fastest_layout(call, planner, target)
        if layout is None:
            raise
        return layout
    layout = _fastest_layout(call, planner, target) if plan.ended_early else None
    if layout is None or layout.step_seconds >= plan.step_seconds:
        return plan
    return replace(layout, lower_bound=plan.lower_bound)


def _fastest_layout(call: CapturedCall, planner: Planner, target: Target) -> ShardingPlan | None:
    """Return the plan of the fastest standard layout that fits, if the search ended early and layouts are possible."""
    # Layouts are complete sets of hints, for a first call, on equal devices.
    if not planner.budget.is_over or target.hints or target.shares or call.placed is not None:
        return None
    limit = target.settings.memory_limit
    plans = [plan for plan in LayoutPlanner(call, target).plans() if limit is None or plan.memory.peak <= limit]
    if not plans:
        return None
    best = min(plans, key=lambda plan: plan.step_seconds)
    said = (
        f"{best.method}, ended by time_limit={target.settings.time_limit:g} s: a longer search may find a faster plan"
    )
    return replace(best, method=said, hints={})


class LayoutPlanner:
    """Plans layouts of one captured call, under hints.

    Args:
        call: a call of a module.
        target: the options; their memory limit is that of all layouts.
    """

    def __init__(self, call: CapturedCall, target: Target) -> None:
        self.module = call.planner_cache.module
        self.call = call
        self.target = target
        # All layouts share the tables of operators and tensors of the first planner.
        self.first = call.planner_of(target)
        self.standard = StandardLayouts(self.first.rules, call.mesh)

    def plans(self) -> Iterator[ShardingPlan]:
        """Make the plans of all standard layouts that the model and the mesh allow."""
        for name in self.standard.names:
            with contextlib.suppress(AutoshardError):
                yield self.plan(self.standard.make(name))

    def plan_hints(self, hints: Hints) -> ShardingPlan:
        """Return the plan under some hints.

        Raises:
            AutoshardError: as for `autoshard.plan`.
        """
        target = replace(self.target, hints=hints)
        with self._planner(target) as planner:
            return run_planner(planner, self.call.seconds, target, explained=False)

    @freeze_older_objects()
    def plan(self, layout: StandardLayout) -> ShardingPlan:
        """Return the plan of a standard layout, with all layers recomputed if it only fits so.

        Raises:
            HintError: the layout does not fit the model.
        """
        # There is next to nothing to choose: take the first solution; memory follows from the layout.
        settings = replace(self.target.settings, effort="fast", memory_limit=None)
        target = replace(self.target, hints=layout.hints, settings=settings)
        recompute, limit = self.target.settings.recompute, self.target.settings.memory_limit
        with self._planner(target) as planner:
            candidate = self._solve(planner, layout)
            names = names_by_option(planner)
            if recompute == "auto" and limit is not None and candidate.memory.peak > limit:
                names = [layer.name for layer in recomputable(planner.graph)]
            if names:
                planner = recomputing_planner(planner, names)
                candidate = self._solve(planner, layout)
            return with_provenance(planner.describe(candidate), planner, self.call.seconds, self.target)

    def _solve(self, planner: Planner, layout: StandardLayout) -> CandidatePlan:
        candidate = planner.solve(planner.constraints)
        if not layout.regathers:
            return candidate
        decisions = regather_parameters(planner.rules, candidate.decisions)
        # Only reshards differ, of the parameters that are gathered again.
        once, twice = (
            sum(reshard.path.seconds for reshard in planner.account(each).reshards)
            for each in (candidate.decisions, decisions)
        )
        return planner.evaluate(decisions, candidate.cost - once + twice, candidate.lower_bound, candidate.method)

    @contextlib.contextmanager
    def _planner(self, target: Target) -> Iterator[Planner]:
        """Context with the planner of a layout, whose hints temporarily mark the operators of the graph."""
        graph = self.call.graph
        try:
            yield planner_for(self.module, graph, self.call.mesh, target, like=self.first)
        finally:
            for form in forms_of(graph):
                assign_task_graphs(form.graph, defaults_of(self.module))
