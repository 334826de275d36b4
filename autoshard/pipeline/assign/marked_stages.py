"""Stages that `forward` marks: one for every task graph on devices of its own (Whale 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.errors import BudgetError, HintError
from autoshard.pipeline.assign.stage_problem import Assignment, StageDevice, as_problem
from autoshard.pipeline.assign.stages import Stages, as_stages
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.units import format_bytes


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
    return as_stages(problem, assignment, bound=0.0, method="marks")


def _node_stages(graph: StageGraph, marks: Mapping[str, int]) -> list[int]:
    """Return the stage of every node."""
    marked = [_marked_stage(node.members, marks) for node in graph.nodes]
    sources: list[list[int]] = [[] for _ in graph.nodes]
    users: list[list[int]] = [[] for _ in graph.nodes]
    for value in graph.values:
        users[value.source].extend(value.users)
        for user in value.users:
            sources[user].append(value.source)
    for place in range(len(marked)):  # sources come first
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
