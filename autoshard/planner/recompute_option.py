"""The layers or operators that the option `recompute` always recomputes, whatever the memory limit."""

from __future__ import annotations

from autoshard.capture.recomputation import names_to_run_again, recomputable
from autoshard.options.options import ALWAYS_RECOMPUTE
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.strategy_tables import whole_work


def names_by_option(planner: PlanningContext) -> list[str]:
    """Return the names, for `recompute_layers`, of the layers or operators that the option always recomputes.

    With `"full"` these are all layers; with `"selective"` the operators in layers whose price depends only on their
    bytes. Those that hints keep, or that are recomputed already, are left out.
    """
    graph, recompute = planner.graph, planner.settings.recompute
    if recompute not in ALWAYS_RECOMPUTE:
        return []
    layers = recomputable(graph)
    # A plan names what it recomputes: whole layers, or else operators.
    if recompute == "full" and not graph.kept and not graph.recomputed:
        return [layer.name for layer in layers]
    again = {node for layer in layers for node in layer.rerun}
    if recompute == "selective":
        calls = planner.rules.calls
        again = {node for node in again if node not in calls or not whole_work(calls[node]).flops}
    return names_to_run_again(graph, again)
