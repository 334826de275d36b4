"""The assignment of operators to the stages of a pipeline: balanced, in whole layers, or as `forward` marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic

from autoshard.errors import BudgetError, HintError, PlanError
from autoshard.pipeline.graph.stage_graph import StageGraph, coarsen
from autoshard.pipeline.graph.stage_problem import Assignment, AssignmentTotals, StageDevice, StageProblem, as_problem
from autoshard.pipeline.graph.stage_solvers import StageProgram, cut_order, is_linear
from autoshard.units import format_bytes

# Seconds of a merged node at most, as a share of the deviation that the tolerance allows one stage: a boundary then
# misses balance by at most half of what is allowed on either side.
_GRAIN = 0.5

# Relative difference below which objectives are equal: solvers work with such tolerances, and sums are rounded.
_CLOSE = 1e-6

# Stages are made of whole layers where there are at least so many equal layers per stage: where there are fewer, one
# layer more or less is far from balance.
_LAYERS_PER_STAGE = 2

# Seconds for the integer programs of one assignment, which then give the best one so far.
_TIME_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Stages:
    """An assignment of the nodes of a forward graph to the stages of a pipeline.

    Attributes:
        stage_of: the stage of every node of the graph, by name.
        recomputed: by the name of a value's node, the stages that compute the value and its recomputable sources anew
            instead of receiving it.
        totals: seconds and bytes of every stage and boundary. A parameter that two stages read is on both.
        tolerance: limit of the imbalance; larger than the requested one where that can't be met.
    """

    stage_of: Mapping[str, int]
    recomputed: Mapping[str, tuple[int, ...]]
    totals: AssignmentTotals
    tolerance: float


def assign_stages(
    graph: StageGraph,
    devices: Sequence[StageDevice],
    in_flight: Sequence[int],
    *,
    tolerance: float = 0.1,
    in_order: bool = False,
) -> Stages:
    """Assign every node of a forward graph to a stage of a pipeline.

    Args:
        graph: the nodes and values of one microbatch.
        devices: of every stage; their number is the number of stages.
        in_flight: for every stage, the microbatches whose saved tensors it holds at once.
        tolerance: allowed deviation of a stage from its share of all seconds (in proportion to its speed), as a part of
            the share.
        in_order: True for stages that are stretches of the order of the nodes, by a dynamic program that takes little
            time. It is exact where the graph is linear; elsewhere an integer program starts from its result.

    Returns:
        The assignment with the smallest objective among those within tolerance and memory without empty stages; where
        stretches of the order reach that objective, the best balanced of these. Where nothing is within the tolerance,
        it is widened to the balance of the best balanced stretches.

    Raises:
        PlanError: the graph has fewer nodes than there are stages.
        BudgetError: no known assignment keeps the memory of the devices, whatever the balance.
        ValueError: `devices` and `in_flight` do not fit each other, or `tolerance` is negative.

    Source: Rhino 5.1 and 5.2; stages of unequal devices: Whale 3.3.2.
    """
    problem = as_problem(graph, devices, in_flight, tolerance)
    if len(graph.nodes) < problem.stages:
        raise PlanError(
            f"{problem.stages} pipeline stages were asked for, and the model has {len(graph.nodes)} operators that can "
            "be parted: each stage needs one at least. Ask for fewer stages."
        )
    deadline = monotonic() + _TIME_LIMIT
    coarse = replace(problem, graph=coarsen(graph, _grain(problem)))
    result = None
    if len(coarse.graph.nodes) >= problem.stages:
        result = _search(coarse, in_order, deadline)
    if result is None and len(coarse.graph.nodes) < len(graph.nodes):
        # What does not fit in merged nodes may fit in parts of them.
        coarse = problem
        result = _search(problem, in_order, deadline)
    if result is None:
        known = _best_balanced(problem, deadline)
        imbalance = problem.imbalance(problem.totals(known))
        # A little wider than the known assignment needs, so that rounding does not exclude it.
        coarse = replace(problem, tolerance=max(tolerance, imbalance * (1 + _CLOSE) + _CLOSE))
        result = _search(coarse, in_order, deadline, known)
    assert result is not None, "the known assignment is within the widened tolerance"
    return _as_stages(coarse, result)


def assign_layers(
    graph: StageGraph,
    devices: Sequence[StageDevice],
    in_flight: Sequence[int],
    *,
    tolerance: float = 0.1,
    keeping: bool = True,
) -> Stages | None:
    """Assign whole layers to stages, where the model has many equal ones and such stages are as good as others.

    A few layers more or less on a stage are as balanced as layers cut in two, where layers are many, and stages of as
    many whole layers are alike, so that one plan serves all. No stage has more than its share by more than the
    tolerance, but it may have less: 126 layers are fourteen stages of eight and two of seven.

    Args:
        graph, devices, in_flight, tolerance: as for `assign_stages`; nodes of the graph know their layers.
        keeping: True if the saved tensors of microbatches in flight count; else they will be recomputed.

    Returns:
        The assignment; None if the model has not many equal layers, if no such stages keep balance and memory, or if
        other stages have a smaller objective.
    """
    problem = as_problem(graph, devices, in_flight, tolerance)
    # Merged pairs stay together whatever the grain, so no layer is cut.
    members: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if node.layer:
            members.setdefault(node.layer, []).append(place)
    layered = graph.merge_pairs([pair for places in members.values() for pair in pairwise(places)])
    # Layers are equal if they have as many nodes and as many seconds; rounding hides the order of the sums.
    sizes = Counter((len(node.members), round(node.seconds / problem.share, 6)) for node in layered.nodes if node.layer)
    if not sizes or max(sizes.values()) < _LAYERS_PER_STAGE * problem.stages:
        return None
    # The same search over parts of layers: whole layers must not cost more than the best that it finds.
    counted = problem.in_flight if keeping else (0,) * problem.stages
    whole = replace(problem, graph=coarsen(layered, _grain(problem)), less=True, in_flight=counted)
    finer = replace(problem, graph=coarsen(graph, _grain(problem)), in_flight=counted)
    assignment, rival = cut_order(whole), cut_order(finer)
    if assignment is None or not whole.is_feasible(whole.totals(assignment)):
        return None
    if rival is not None and finer.totals(rival).objective * (1 + _CLOSE) < whole.totals(assignment).objective:
        return None
    return _as_stages(whole, assignment)


def _grain(problem: StageProblem) -> float:
    return _GRAIN * min(problem.tolerance, 1.0) / problem.stages


def _search(
    problem: StageProblem, in_order: bool, deadline: float, known: Assignment | None = None
) -> Assignment | None:
    """Return the best assignment within the tolerance, or None if none was found; `known` is within it."""
    candidates = [
        candidate
        for candidate in (cut_order(problem), known)
        if candidate is not None and problem.is_feasible(problem.totals(candidate))
    ]
    if not in_order and not is_linear(problem):
        start = _best_of(problem, candidates)
        answer, _ = StageProgram(problem).solve(time_limit=deadline - monotonic(), start=start)
        # Solvers keep rows within a tolerance only, so their answers are checked too.
        if answer is not None and problem.is_feasible(problem.totals(answer)):
            candidates.append(answer)
    return _best_of(problem, candidates)


def _best_of(problem: StageProblem, candidates: Sequence[Assignment]) -> Assignment | None:
    """Return the assignment with the smallest objective; of nearly equal ones the first, which is balanced best."""
    best = None
    least = float("inf")
    for candidate in candidates:
        objective = problem.totals(candidate).objective
        if best is None or objective < least * (1 - _CLOSE):
            best, least = candidate, objective
    return best


def _best_balanced(problem: StageProblem, deadline: float) -> Assignment:
    """Return the best balanced stretches of the order that keep memory, or else any assignment that does."""
    balanced = cut_order(problem, "balance")
    if balanced is not None:
        return balanced
    start = cut_order(problem, "memory")
    assert start is not None, "there are as many nodes as stages"
    # Half of the time is left for the search within the widened tolerance.
    time_limit = max((deadline - monotonic()) / 2, 1.0)
    leanest, proved = StageProgram(problem, "memory").solve(time_limit=time_limit, start=start)
    nearest = start if leanest is None else leanest
    if not problem.fits_memory(problem.totals(nearest)):
        raise _budget_error(problem, nearest, proved)
    return nearest


def _budget_error(problem: StageProblem, nearest: Assignment, proved: bool) -> BudgetError:
    """Return the error with the available memory and the memory that would be enough."""
    totals = problem.totals(nearest)
    held = problem.memory(totals)
    available = ", ".join(format_bytes(device.memory) for device in problem.devices)
    needed = ", ".join(map(format_bytes, held))
    rest = ", ".join(map(format_bytes, totals.at_rest))
    flights = ", ".join(str(count) for count in problem.in_flight)
    fits, the_nearest = ("fits", "the nearest") if proved else ("was found that fits", "the nearest found")
    return BudgetError(
        f"no assignment to {problem.stages} pipeline stages {fits} in {available}: {the_nearest} needs {needed} "
        f"(of which parameters, gradients and optimizer state {rest}; the rest is saved by {flights} microbatches in "
        "flight). Use more stages, smaller microbatches, a schedule with fewer of them in flight, or devices with more "
        "memory.",
        peak=max(held),
    )


def _as_stages(problem: StageProblem, assignment: Assignment) -> Stages:
    """Return an assignment by names of nodes, with its totals."""
    totals = problem.totals(assignment)
    stage_of = {
        name: stage for node, stage in zip(problem.graph.nodes, assignment.stage, strict=True) for name in node.members
    }
    recomputed: dict[str, tuple[int, ...]] = {}
    # Those of the totals are the needed ones: an assignment may allow more.
    for place, stage in sorted(totals.recomputed):
        name = problem.graph.values[place].name
        recomputed[name] = (*recomputed.get(name, ()), stage)
    return Stages(stage_of, recomputed, totals, problem.tolerance)


def marked_stages(
    graph: StageGraph, devices: Sequence[StageDevice], in_flight: Sequence[int], marks: Mapping[str, int]
) -> Stages:
    """Assign operators to the stages that marks ask for.

    An operator without a mark runs on the last stage of its sources; one that reads inputs, parameters and constants
    alone runs on the first stage that reads it.

    Args:
        graph, devices, in_flight: as for `assign_stages`.
        marks: the stage of marked nodes of the graph, by name.

    Raises:
        HintError: marks contradict the order of the data: an earlier stage would read from a later one, or operators
            that must stay together have marks of several stages.
        BudgetError: the stages do not fit the memory of their devices.

    Source: Whale 3.1.2, Example 1, and 3.2.2: "operations defined under certain parallel primitive annotation compose a
    TaskGraph".
    """
    problem = as_problem(graph, devices, in_flight, 0.0)
    assignment = Assignment(tuple(_node_stages(graph, marks)), problem.cheaper_recomputations())
    totals = problem.totals(assignment)
    if not problem.fits_memory(totals):
        held = problem.memory(totals)
        raise BudgetError(
            f"the task graphs that forward marks as {problem.stages} pipeline stages need "
            f"{', '.join(map(format_bytes, held))}, and their devices have "
            f"{', '.join(format_bytes(device.memory) for device in devices)}. Move the marks, use smaller "
            "microbatches, or leave the marks out, and stages are balanced within the memory there is.",
            peak=max(held),
        )
    return _as_stages(problem, assignment)


def _node_stages(graph: StageGraph, marks: Mapping[str, int]) -> list[int]:
    """Return the stage of every node."""
    marked = [_marked_stage(node.members, marks) for node in graph.nodes]
    sources: list[list[int]] = [[] for _ in graph.nodes]
    users: list[list[int]] = [[] for _ in graph.nodes]
    for value in graph.values:
        users[value.source].extend(value.users)
        for user in value.users:
            sources[user].append(value.source)
    # Sources come first in the order, so one pass carries marks forward, and one back fills what reads nothing marked.
    for place in range(len(marked)):
        if marked[place] is None:
            known = [stage for source in sources[place] if (stage := marked[source]) is not None]
            marked[place] = max(known, default=None)
    for place in reversed(range(len(marked))):
        if marked[place] is None:
            marked[place] = min((stage for user in users[place] if (stage := marked[user]) is not None), default=0)
    stages = [stage or 0 for stage in marked]
    for place, stage in enumerate(stages):
        for user in users[place]:
            if stages[user] < stage:
                raise HintError(
                    f"operator {graph.nodes[user].name} is marked for pipeline stage {stages[user]} and reads "
                    f"{graph.nodes[place].name} of stage {stage}: task graphs that are stages run one after another. "
                    "Leave with blocks of autoshard.replicate and autoshard.split before the next one is entered."
                )
    return stages


def _marked_stage(members: Sequence[str], marks: Mapping[str, int]) -> int | None:
    """Return the mark of operators that must stay together, if they have one."""
    stages = {marks[name]: name for name in members if name in marks}
    if len(stages) > 1:
        (first, first_name), (second, second_name) = sorted(stages.items())[:2]
        raise HintError(
            f"operators {first_name} and {second_name} are marked for pipeline stages {first} and {second} and can't "
            "be parted: both touch what is changed in place, such as a buffer. Put them in one with block."
        )
    return next(iter(stages), None)
