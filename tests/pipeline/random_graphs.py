"""Small random stage graphs, and every assignment of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from autoshard.pipeline.graph.stage_problem import Assignment, StageDevice, StageProblem
from autoshard.pipeline.graph.stages import Stages


def node(place: int, seconds: float, saved: int = 0, at_rest: Sequence[str] = ()) -> StageNode:
    """A node that takes a third of its seconds forward."""
    return StageNode(f"n{place}", seconds / 3, 2 * seconds / 3, saved, tuple(at_rest), (f"n{place}",))


def chain(seconds: Sequence[float], sizes: Sequence[int], saved: int = 0) -> StageGraph:
    """Nodes one behind the other, with what the one gives the next."""
    nodes = tuple(node(place, one, saved) for place, one in enumerate(seconds))
    values = tuple(StageValue(f"n{place}", place, (place + 1,), size, size) for place, size in enumerate(sizes))
    return StageGraph(nodes, values, {})


def imbalance(graph: StageGraph, devices: Sequence[StageDevice], stages: Stages, less: bool = False) -> float:
    """The largest deviation of an assigned stage from its share."""
    problem = StageProblem(graph, tuple(devices), (1,) * len(devices), stages.tolerance, less)
    return problem.imbalance(stages.totals)


def held_bytes(
    graph: StageGraph, devices: Sequence[StageDevice], in_flight: Sequence[int], stages: Stages
) -> list[int]:
    """The bytes of every assigned stage, with the microbatches in flight."""
    return StageProblem(graph, tuple(devices), tuple(in_flight), stages.tolerance).memory(stages.totals)


@st.composite
def chains(draw: st.DrawFn) -> StageGraph:
    """A chain of up to seven nodes of equal or unequal seconds."""
    count = draw(st.integers(2, 7))
    seconds = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(1, 5), min_size=count - 1, max_size=count - 1))
    return chain(seconds, sizes, saved=draw(st.integers(0, 2)))


@st.composite
def graphs(draw: st.DrawFn, largest: int = 7) -> StageGraph:
    """A graph of up to seven nodes: tensors read by several, outputs, tied parameters, values made once more."""
    count = draw(st.integers(2, largest))
    names = draw(st.lists(st.sampled_from(["", "a", "b"]), min_size=count, max_size=count))
    seconds = [*draw(st.lists(st.integers(0, 4), min_size=count - 1, max_size=count - 1)), 1]
    nodes = tuple(
        node(place, one, draw(st.integers(0, 2)), [name] if name else [])
        for place, (one, name) in enumerate(zip(seconds, names, strict=True))
    )
    values = []
    for place in range(count - 1):
        users = draw(st.sets(st.integers(place + 1, count - 1), max_size=3))
        output = draw(st.integers(0, 9)) == 0
        recompute = draw(st.sampled_from([None, None, None, 0.5, 2.0]))
        if users or output:
            size, gradient = draw(st.integers(1, 5)), draw(st.booleans()) and recompute is None
            values.append(
                StageValue(f"n{place}", place, tuple(sorted(users)), size, size * gradient, recompute, output)
            )
    return StageGraph(nodes, tuple(values), {"a": 3, "b": 5})


@st.composite
def problems(draw: st.DrawFn, kind: st.SearchStrategy[StageGraph]) -> StageProblem:
    """A problem of two or three stages, with unequal devices."""
    graph = draw(kind)
    stages = draw(st.integers(2, min(3, len(graph.nodes))))
    devices = tuple(
        StageDevice(
            draw(st.sampled_from([1.0, 2.0])),
            draw(st.sampled_from([1.0, 1.0, 3.0])),
            draw(st.sampled_from([8.0, 20.0, float("inf")])),
        )
        for _ in range(stages)
    )
    in_flight = tuple(draw(st.integers(1, 2)) for _ in range(stages))
    return StageProblem(graph, devices, in_flight, draw(st.sampled_from([0.1, 0.5, 2.0])))


def assignments(graph: StageGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """Every stage of every node that never goes back along an edge and leaves no stage empty."""
    for stage in itertools.product(range(stages), repeat=len(graph.nodes)):
        if len(set(stage)) == stages and all(
            stage[value.source] <= stage[user] for value in graph.values for user in value.users
        ):
            yield stage


def routes(problem: StageProblem, stage: Sequence[int]) -> Iterator[frozenset[tuple[int, int]]]:
    """Every choice of what is made once more, and where."""
    possible = [
        (place, where)
        for place, value in enumerate(problem.graph.values)
        if value.recompute_seconds is not None
        for where in range(stage[value.source] + 1, problem.stages)
    ]
    for count in range(len(possible) + 1):
        yield from (frozenset(one) for one in itertools.combinations(possible, count))


def smallest_objective(problem: StageProblem) -> float | None:
    """The smallest objective of all assignments that keep balance and memory, each worked out by itself."""
    found = [
        objective
        for stage in assignments(problem.graph, problem.stages)
        for recomputed in routes(problem, stage)
        if (objective := evaluate_assignment(problem, Assignment(stage, recomputed))) is not None
    ]
    return min(found, default=None)


def evaluate_assignment(problem: StageProblem, assignment: Assignment) -> float | None:
    """Objective of an assignment, by going from stage to stage with all that is there; None if it keeps no limit."""
    graph, stage, last = problem.graph, assignment.stage, problem.stages - 1
    seconds = [0.0] * problem.stages
    again_seconds = [0.0] * problem.stages
    held = [0.0] * problem.stages
    objective = 0.0
    for place, one in enumerate(graph.nodes):
        seconds[stage[place]] += one.seconds
        held[stage[place]] += one.saved_bytes * problem.in_flight[stage[place]]
    for where in range(problem.stages):
        names = {name for place, one in enumerate(graph.nodes) if stage[place] == where for name in one.at_rest}
        held[where] += sum(graph.at_rest[name] for name in names)
    for place, value in enumerate(graph.values):
        reading = {stage[user] for user in value.users} | ({last} if value.output else set())
        for where in range(stage[value.source] + 1, max(reading, default=0) + 1):
            # Up to the next stage that makes it once more, somebody reads it: then it has to be here.
            again = [later for later in range(where, last + 1) if (place, later) in assignment.recomputed]
            until = next((later for later in again if later > where), last + 1)
            if not any(where <= reader < until for reader in reading):
                continue
            if (place, where) in assignment.recomputed:
                assert value.recompute_seconds is not None
                again_seconds[where] += value.recompute_seconds
                objective += value.recompute_seconds / problem.devices[where].speed
            else:
                objective += (value.bytes + value.gradient_bytes) / problem.devices[where - 1].bandwidth
                held[where] += value.bytes * problem.in_flight[where]
    total = sum(one.seconds for one in graph.nodes)
    speeds = [device.speed for device in problem.devices]
    for where, device in enumerate(problem.devices):
        share = total * device.speed / sum(speeds)
        most, least = (1 + problem.tolerance) * share + 1e-9, (1 - problem.tolerance) * share - 1e-9
        if seconds[where] + again_seconds[where] > most or seconds[where] < least or held[where] > device.memory:
            return None
    return objective
