"""Which part of a model runs on which stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Literal

from autoshard.errors import BudgetError, PlanError
from autoshard.pipeline.assign.stage_order import balance_order, cut_order, is_linear, memory_order
from autoshard.pipeline.assign.stage_problem import Assignment, AssignmentTotals, StageDevice, StageProblem, as_problem
from autoshard.pipeline.assign.stage_program import StageProgram
from autoshard.pipeline.graph.coarsen import coarsen
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.whole_layers import whole_layers

__all__ = ["StageDevice", "Stages", "as_stages", "assign_layers", "assign_stages"]

Method = Literal["auto", "ilp", "order"]

_GRAIN = 0.5
"""Seconds of merged nodes at most, in times of what the tolerance allows one stage."""

_CLOSE = 1e-6
"""Relative difference below which objectives are equal: solvers work with such tolerances."""


@dataclass(frozen=True, slots=True)
class Stages:
    """An assignment of the nodes of a forward graph to the stages of a pipeline.

    Attributes:
        stage_of: the stage of every node of the graph, by name.
        seconds: of every stage: forward, backward and recomputation of one microbatch, on its device.
        at_rest: bytes of every stage: parameters with gradients and optimizer state, and buffers. A parameter that two
            stages read is on both.
        saved: bytes that one microbatch in flight keeps from forward to backward on every stage, received ones
            included.
        memory: bytes of every stage: at rest, and saved by the microbatches in flight.
        forward_bytes: over every boundary per microbatch, the first between stages 0 and 1.
        backward_bytes: of gradients, over the same boundaries.
        recomputed: values by the name of their node, and the stages where they are made once more, with all that they
            are made of, instead of being received.
        objective: seconds per microbatch in which values and gradients cross boundaries, and in which values are
            recomputed.
        bound: no assignment of the merged nodes (see `coarsen`) within the tolerance has a smaller objective; 0 where
            none is known.
        imbalance: by how much of its share of the work, in proportion to speed, the stage that differs most does; what
            a stage recomputes counts where it has more than its share, not where it has less. Of whole layers a stage
            may have less, which is not counted.
        tolerance: what the imbalance was allowed to be: more than what was asked for where that is not possible.
        method: `"order"`, by the exact dynamic programme; `"layers"`, by the same over whole layers; `"ilp"`; or
            `"marks"`, where `forward` says what is a stage.
    """

    stage_of: Mapping[str, int]
    seconds: tuple[float, ...]
    at_rest: tuple[int, ...]
    saved: tuple[int, ...]
    memory: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    recomputed: Mapping[str, tuple[int, ...]]
    objective: float
    bound: float
    imbalance: float
    tolerance: float
    method: str

    @property
    def gap(self) -> float:
        """By how much of the objective the bound is below it."""
        return (self.objective - self.bound) / self.objective if self.objective > 0 else 0.0


def assign_stages(
    graph: StageGraph,
    devices: Sequence[StageDevice],
    in_flight: Sequence[int],
    *,
    tolerance: float = 0.1,
    time_limit: float = 30.0,
    method: Method = "auto",
) -> Stages:
    """Assign every node of a forward graph to a stage of a pipeline.

    Args:
        graph: the nodes and values of one microbatch.
        devices: what every stage runs on; their number is the number of stages.
        in_flight: for every stage, the microbatches whose saved tensors it holds at once, as its schedule has it.
        tolerance: by how much of its share of all seconds, in proportion to its speed, a stage may differ from it.
        time_limit: seconds for the integer programs; the answer is then the best that was found, with its bound.
        method: `"auto"`: an exact dynamic programme where the graph is linear, else an integer program that starts
            from what that programme finds on the order of the nodes; `"ilp"`, the integer program in any case;
            `"order"`, the dynamic programme in any case, whose stages are stretches of the order.

    Returns:
        The assignment with the smallest objective, such that no stage is empty, none differs from its share by more
        than the tolerance, and none exceeds its memory; where stretches of the order reach that objective, the best
        balanced of these. Where nothing is within the tolerance, it is widened to the balance of the best balanced
        stretches.

    Raises:
        PlanError: the graph has fewer nodes than there are stages.
        BudgetError: no assignment that was found keeps the memory of the devices, whatever the balance.
        ValueError: `devices` and `in_flight` do not fit each other, or `tolerance` is negative.

    Source: Rhino 5.1 and 5.2; stages of unequal devices: Whale 3.3.2.
    """
    problem = as_problem(graph, devices, in_flight, tolerance)
    if len(graph.nodes) < problem.stages:
        raise PlanError(
            f"{problem.stages} pipeline stages were asked for, and the model has {len(graph.nodes)} operators that can "
            "be parted: each stage needs one at least. Ask for fewer stages."
        )
    deadline = monotonic() + time_limit
    coarse = replace(problem, graph=coarsen(graph, _grain(problem)))
    found = None
    if len(coarse.graph.nodes) >= problem.stages:
        found = _search(coarse, method, deadline)
    if found is None and len(coarse.graph.nodes) < len(graph.nodes):
        coarse = problem  # what does not fit in merged nodes may fit in parts of them
        found = _search(problem, method, deadline)
    if found is None:
        known = _best_balanced(problem, deadline)
        imbalance = problem.imbalance(problem.totals(known))
        coarse = replace(problem, tolerance=max(tolerance, imbalance * (1 + _CLOSE) + _CLOSE))
        found = _search(coarse, method, deadline, known)
    assert found is not None, "the known assignment is within the widened tolerance"
    return as_stages(coarse, found.assignment, found.bound, found.method)


def assign_layers(
    graph: StageGraph,
    devices: Sequence[StageDevice],
    in_flight: Sequence[int],
    *,
    tolerance: float = 0.1,
    keeping: bool = True,
) -> Stages | None:
    """Stages of whole layers, where they are as good as any (`whole_layers`): far quicker found, and alike.

    Args:
        graph, devices, in_flight, tolerance: as for `assign_stages`.
        keeping: whether what microbatches in flight save counts; else it is to be computed again.

    Returns:
        The assignment; None where the model has not many equal layers, or other stages are better.
    """
    problem = as_problem(graph, devices, in_flight, tolerance)
    found = whole_layers(problem, _grain(problem), keeping=keeping)
    return None if found is None else as_stages(*found, 0.0, "layers")


def _grain(problem: StageProblem) -> float:
    return _GRAIN * min(problem.tolerance, 1.0) / problem.stages


@dataclass(frozen=True, slots=True)
class _AssignmentResult:
    assignment: Assignment
    bound: float
    method: str


def _search(
    problem: StageProblem, method: Method, deadline: float, known: Assignment | None = None
) -> _AssignmentResult | None:
    """The best assignment within the tolerance, or None if none was found; `known` is one that is."""
    candidates = [
        one for one in (cut_order(problem), known) if one is not None and problem.is_feasible(problem.totals(one))
    ]
    start = _best_of(problem, candidates)
    if method == "order" or (method == "auto" and is_linear(problem)):
        if start is None:
            return None
        exact = problem.totals(start).objective if is_linear(problem) else 0.0
        return _AssignmentResult(start, exact, "order")
    answer, bound, _ = StageProgram(problem).solve(time_limit=deadline - monotonic(), start=start)
    if answer is not None and problem.is_feasible(problem.totals(answer)):
        start = _best_of(problem, [answer] if start is None else [start, answer])
    if start is None:
        return None
    return _AssignmentResult(start, min(max(bound, 0.0), problem.totals(start).objective), "ilp")


def _best_of(problem: StageProblem, candidates: Sequence[Assignment]) -> Assignment | None:
    """The one with the smallest objective; the first of those that are as good as equal, which is balanced best."""
    best = None
    least = float("inf")
    for one in candidates:
        objective = problem.totals(one).objective
        if best is None or objective < least * (1 - _CLOSE):
            best, least = one, objective
    return best


def _best_balanced(problem: StageProblem, deadline: float) -> Assignment:
    """The best balanced stretches of the order that keep memory, or else any assignment that does."""
    found = balance_order(problem)
    if found is not None:
        return found
    start = memory_order(problem)
    time_limit = max((deadline - monotonic()) / 2, 1.0)
    found, _, proved = StageProgram(problem, "memory").solve(time_limit=time_limit, start=start)
    nearest = start if found is None else found
    if not problem.fits_memory(problem.totals(nearest)):
        raise _budget_error(problem, nearest, proved)
    return nearest


def _budget_error(problem: StageProblem, nearest: Assignment, proved: bool) -> BudgetError:
    """The error that says how much memory there is, and how much would be enough."""
    account = problem.totals(nearest)
    held = problem.memory(account)
    available = ", ".join(_gib(device.memory) for device in problem.devices)
    needed = ", ".join(_gib(one) for one in held)
    rest = ", ".join(_gib(one) for one in account.at_rest)
    flights = ", ".join(str(count) for count in problem.in_flight)
    fits, the_nearest = ("fits", "the nearest") if proved else ("was found that fits", "the nearest found")
    return BudgetError(
        f"no assignment to {problem.stages} pipeline stages {fits} in {available}: {the_nearest} needs {needed} "
        f"(of which parameters, gradients and optimizer state {rest}; the rest is saved by {flights} microbatches in "
        "flight). Use more stages, smaller microbatches, a schedule with fewer of them in flight, or devices with more "
        "memory.",
        peak=max(held),
    )


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.4g} GiB"


def as_stages(problem: StageProblem, assignment: Assignment, bound: float, method: str) -> Stages:
    """An assignment with all that is told of it; `bound` and `method` as `Stages` has them."""
    account: AssignmentTotals = problem.totals(assignment)
    stage_of = {
        name: stage for node, stage in zip(problem.graph.nodes, assignment.stage, strict=True) for name in node.members
    }
    recomputed: dict[str, tuple[int, ...]] = {}
    for place, stage in sorted(account.recomputed):
        name = problem.graph.values[place].name
        recomputed[name] = (*recomputed.get(name, ()), stage)
    return Stages(
        stage_of=stage_of,
        seconds=tuple(account.seconds),
        at_rest=tuple(account.at_rest),
        saved=tuple(account.saved),
        memory=tuple(problem.memory(account)),
        forward_bytes=tuple(account.forward_bytes),
        backward_bytes=tuple(account.backward_bytes),
        recomputed=recomputed,
        objective=account.objective,
        bound=bound,
        imbalance=problem.imbalance(account),
        tolerance=problem.tolerance,
        method=method,
    )
