"""Stages of whole layers: what a model of many equal layers is cut into."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from autoshard.pipeline.assign.stage_order import cut_order
from autoshard.pipeline.assign.stage_problem import Assignment, StageProblem
from autoshard.pipeline.graph.coarsen import coarsen
from autoshard.pipeline.graph.stage_graph import StageGraph

_PER_STAGE = 2
"""Equal layers per stage, at least, of which stages are made whole."""

_CLOSE = 1e-6
"""Relative difference below which seconds are equal: the same sums, added up in another order."""


def whole_layers(
    problem: StageProblem, grain: float, *, keeping: bool = True
) -> tuple[StageProblem, Assignment] | None:
    """Stages that part no layer, where the model has many equal ones and such stages do as well as others.

    A few layers more or less on a stage are as balanced as layers cut in two, where layers are many; and stages of as
    many whole layers are alike, so that what is worked out for one serves all. No stage has more than its share by more
    than the tolerance. One may have less by more: 126 layers are fourteen stages of eight and two of seven.

    Args:
        problem: on a graph whose nodes know their layers.
        grain: of the nodes that lie in no layer, and of finer ones, as for `coarsen`.
        keeping: whether what microbatches in flight save counts; else it is to be computed again.

    Returns:
        The problem of whole layers, and the best stretches of them; None where the model has not many equal layers,
        where no such stretches keep balance and memory, and where less crosses between stretches of finer nodes.
    """
    layered = _merge_layers(problem.graph)
    sizes = Counter((len(node.members), round(node.seconds / problem.share, 6)) for node in layered.nodes if node.layer)
    if not sizes or max(sizes.values()) < _PER_STAGE * problem.stages:
        return None
    counted = problem.in_flight if keeping else (0,) * problem.stages
    whole = replace(problem, graph=coarsen(layered, grain), less=True, in_flight=counted)
    finer = replace(problem, graph=coarsen(problem.graph, grain), in_flight=counted)
    found, other = cut_order(whole), cut_order(finer)
    if found is None or not whole.is_feasible(whole.totals(found)):
        return None
    if other is not None and finer.totals(other).objective * (1 + _CLOSE) < whole.totals(found).objective:
        return None
    return replace(whole, in_flight=problem.in_flight), found


def _merge_layers(graph: StageGraph) -> StageGraph:
    """The graph with one node for every layer."""
    members: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if node.layer:
            members.setdefault(node.layer, []).append(place)
    return graph.merge_pairs([pair for places in members.values() for pair in pairwise(places)])
