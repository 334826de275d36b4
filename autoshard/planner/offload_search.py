"""Plans that move tensors to the host: the fastest of them under a memory limit, and the room that the host has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.capture.recomputation import recomputable, recompute_layers
from autoshard.errors import BudgetError
from autoshard.planner.budget_search import ShortfallError
from autoshard.planner.planner import Planner
from autoshard.planner.planning_context import CandidatePlan
from autoshard.planner.rerun_context import RerunContext
from autoshard.planner.rerun_search import RerunSearch
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.units import format_bytes

# Prices of a second of copies, in seconds of the step. Compute hides most of them, up to what the link carries beside
# it, which no sum knows: the replay judges the plans that both prices lead to.
_COPY_PRICES = (0.1, 0.2)


def fastest_with_moves(planner: Planner, plan_without: Callable[[], ShardingPlan]) -> ShardingPlan:
    """Return the fastest plan that keeps the limit, in which values are moved to the host if the settings allow.

    Args:
        planner: the planner of the graph.
        plan_without: returns the plan that moves nothing but what hints name.

    Raises:
        BudgetError: no plan that was found fits the memory limit.
    """
    limit = planner.settings.memory_limit
    if planner.settings.offload == "none" or limit is None:
        return plan_without()
    shortfall: ShortfallError | None = None
    best: ShardingPlan | None = None
    try:
        best = plan_without()
    except ShortfallError as error:
        shortfall = error
    unlimited = planner.unlimited or planner.solve(planner.constraints)
    if best is not None and planner.fastest(unlimited).memory.peak <= limit:
        return best
    for price in _COPY_PRICES:
        try:
            plan, _ = _search(planner, limit, unlimited, price)
        except KeyboardInterrupt:
            if best is None:
                raise
            planner.warn_of_interruption(best.cost)
            break
        if plan is not None and (best is None or plan.step_seconds < best.step_seconds):
            found = replace(plan, lower_bound=min(unlimited.lower_bound, plan.cost))
            best = plan.estimate.context.describe(found)
    if best is not None:
        return best
    assert shortfall is not None
    return _leanest(planner, limit, unlimited, shortfall)


def _leanest(planner: Planner, limit: int, unlimited: CandidatePlan, shortfall: ShortfallError) -> ShardingPlan:
    """Return the plan with the smallest peak, which does not depend on the limit; raise the error if it does not fit.

    A limit that an error names is one within which a plan is found.
    """
    met = [_search(planner, 1, unlimited, price)[1] for price in _COPY_PRICES]
    leanest = min(met, key=lambda plan: plan.memory.peak)
    if leanest.memory.peak > limit:
        raise shortfall.with_least(leanest.memory)
    found = replace(leanest, lower_bound=min(unlimited.lower_bound, leanest.cost))
    return leanest.estimate.context.describe(found)


def _search(
    planner: Planner, limit: int, unlimited: CandidatePlan, price: float
) -> tuple[CandidatePlan | None, CandidatePlan]:
    """Return the fastest plan met within the limit at a price of copies, if any, and the leanest one."""
    recompute = planner.settings.recompute
    if recompute == "full":
        graph = recompute_layers(planner.graph, [layer.name for layer in recomputable(planner.graph)])
        again = Planner(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
        again.deadline, again.timings = planner.deadline, planner.timings
        planner, unlimited = again, again.solve(again.constraints)
    context = RerunContext(planner, recompute in ("auto", "selective"), price)
    search = RerunSearch(context, limit, [unlimited, planner.fastest(unlimited)])
    return search.run(), search.leanest


def check_host(moved: int, planner: Planner) -> None:
    """Raise a `BudgetError` if the host has less room for one device than the bytes that a plan moves there."""
    room = planner.settings.host_memory
    if room is not None and moved > room:
        raise BudgetError(
            f"the plan moves {format_bytes(moved)} of every device to its host, which has {format_bytes(room)} for it "
            "(host_memory, or that of the cluster). Move less: take autoshard.offload() from some modules, use more "
            "devices, or raise host_memory."
        )
