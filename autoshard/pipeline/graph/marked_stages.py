"""Stages as `forward` marks them: one for every task graph on devices of its own (Whale 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.errors import BudgetError, HintError
from autoshard.pipeline.assign.stage_problem import Assignment, StageDevice, StageProblem, as_problem
from autoshard.pipeline.assign.stages import Stages, as_stages
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.units import format_bytes


def marked_stages(
    graph: StageGraph, devices: Sequence[StageDevice], in_flight: Sequence[int], marks: Mapping[str, int]
) -> Stages:
    """The stages that marks ask for.

    What has no mark runs where the last of what it reads is made; what reads inputs, parameters and constants alone,
    where it is first read.

    Args:
        graph, devices, in_flight: as for `assign_stages`.
        marks: the stage of marked nodes of the graph, by name.

    Raises:
        HintError: marks contradict the way of the data: an earlier stage would read of a later one, or what can't be
            parted has marks of several stages.
        BudgetError: the stages do not fit the memory of their devices.

    Source: Whale 3.1.2, Example 1, and 3.2.2: "operations defined under certain parallel primitive annotation compose a
    TaskGraph".
    """
    problem = as_problem(graph, devices, in_flight, 0.0)
    assignment = _with_recomputation(problem, _node_stages(graph, marks))
    account = problem.totals(assignment)
    if not problem.fits_memory(account):
        held = problem.memory(account)
        raise BudgetError(
            f"the task graphs that forward marks as {problem.stages} pipeline stages need "
            f"{', '.join(map(format_bytes, held))}, and their devices have "
            f"{', '.join(format_bytes(device.memory) for device in devices)}. Move the marks, use smaller "
            "microbatches, or leave the marks out, and stages are balanced within the memory there is.",
            peak=max(held),
        )
    return as_stages(problem, assignment, bound=0.0, method="marks")


def _node_stages(graph: StageGraph, marks: Mapping[str, int]) -> list[int]:
    """The stage of every node."""
    found = [_marked_stage(node.members, marks) for node in graph.nodes]
    sources: list[list[int]] = [[] for _ in graph.nodes]
    users: list[list[int]] = [[] for _ in graph.nodes]
    for value in graph.values:
        users[value.source].extend(value.users)
        for user in value.users:
            sources[user].append(value.source)
    for place in range(len(found)):  # sources come first
        if found[place] is None:
            found[place] = max((stage for one in sources[place] if (stage := found[one]) is not None), default=None)
    for place in reversed(range(len(found))):
        if found[place] is None:
            found[place] = min((stage for one in users[place] if (stage := found[one]) is not None), default=0)
    stages = [stage or 0 for stage in found]
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
    """The stage of operators that can't be parted."""
    marked = {marks[name]: name for name in members if name in marks}
    if len(marked) > 1:
        (first, one), (second, other) = sorted(marked.items())[:2]
        raise HintError(
            f"operators {one} and {other} are marked for pipeline stages {first} and {second} and can't be parted: "
            "both touch what is changed in place, such as a buffer. Put them in one with block."
        )
    return next(iter(marked), None)


def _with_recomputation(problem: StageProblem, stages: Sequence[int]) -> Assignment:
    """The assignment in which what can be made once more is, where it is cheaper than to receive it."""
    again = {
        (place, stage)
        for place, value in enumerate(problem.graph.values)
        for stage in range(1, problem.stages)
        if problem.recompute(value, stage) < problem.transfer(value, stage)
    }
    return Assignment(tuple(stages), frozenset(again))
