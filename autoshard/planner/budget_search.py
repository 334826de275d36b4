"""Common parts of searches within a memory limit; plans with memory rows in the problem; the error if none fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from torch.distributed.tensor import Replicate

from autoshard.capture.joint import JointGraph
from autoshard.capture.offloading import offload_values, values_of_modules
from autoshard.capture.recomputation import captured_step, graph_of_plan, recomputable, recompute_layers
from autoshard.errors import AutoshardError, BudgetError
from autoshard.memory.footprint import Memory
from autoshard.operators.large_losses.loss_in_pieces import returns_large_logits
from autoshard.options.target import Settings
from autoshard.patterns.graph_rules import Value
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.recompute_option import names_by_option
from autoshard.plans.plan_summary import memory_parts
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import is_placeable
from autoshard.specs.spec import Spec
from autoshard.units import format_bytes

Plan = TypeVar("Plan")

_MAX_CORRECTIONS = 7  # times that the memory rows of the integer program are tightened

MEMORY_ONLY = 1e3
"""The price of all memory of a plan, in costs of a step, where only memory counts."""

# A moment with a tenth less than the peak has exp(-3), a twentieth, of its weight.
_SHARPNESS = 30.0
_NEGLIGIBLE_SHARE = 1e-2  # of all bytes


def solve_with_memory_rows(planner: PlanningContext, limit: int) -> CandidatePlan | None:
    """Return the fastest plan found with rows of memory in the problem (Rhino 4.2); None if no plan fits."""
    # The rows ignore copies made by reshards: lower their limit by the excess in the account.
    rows = float(limit)
    for _ in range(_MAX_CORRECTIONS):
        try:
            plan = planner.solve(planner.constraints, method="ilp", limit=rows)
        except BudgetError:
            return None
        if plan.memory.peak <= limit:
            return replace(plan, method=f"{plan.method}, memory bounded")
        # At least a hundredth, so that a few corrections are enough.
        rows -= max(plan.memory.peak - limit, 0.01 * limit)
        if rows <= 0 or planner.budget.is_over:
            return None
    return None


class Remedy(NamedTuple):
    """A change that reduces the peak.

    Attributes:
        change: what to do.
        what: the subject that needs the bytes of `peak`, with the verb.
        peak: the peak with the change; None if it was not tried.
    """

    change: str
    what: str = ""
    peak: float | None = None


class ShortfallError(BudgetError):
    """No plan of one graph fits a limit; remedies are not yet known, since finding them takes long.

    Args:
        limit: the memory limit in bytes per device.
        leanest: the plan with the smallest peak.
        late: True if the search ended at its time limit.
    """

    def __init__(self, limit: int, leanest: CandidatePlan, late: bool) -> None:
        planner = leanest.estimate.context
        assert isinstance(planner, PlanningContext)
        self._planner, self._limit, self._leanest, self._late = planner, limit, leanest, late
        self._least = leanest.memory
        super().__init__(self._message(()), self._least.peak)

    def with_remedies(self) -> BudgetError:
        """Return the error with remedies, each tried once; sufficient ones come first."""
        # If time is up, there is none for remedies.
        remedies = () if self._late else sorted(self._find_remedies(), key=self._may_be_short)
        return BudgetError(self._message([self._text_of(each) for each in remedies]), self._least.peak)

    def _may_be_short(self, remedy: Remedy) -> bool:
        return remedy.peak is None or remedy.peak > self._limit

    def _text_of(self, remedy: Remedy) -> str:
        if remedy.peak is None:
            return remedy.change
        # A quick try does not prove that it is insufficient.
        short = " or less; that is more than the limit" if remedy.peak > self._limit else ""
        return f"{remedy.change} ({remedy.what} {format_bytes(remedy.peak)}{short})"

    def _message(self, remedies: Sequence[str]) -> str:
        planner, least = self._planner, self._least
        parts = ", ".join(f"{name} {format_bytes(held)}" for name, held in memory_parts(least).items())
        where = f"in the {least.phase}{f' of {least.module}' if least.module else ''}" if least.phase else ""
        # The optimizer's memory does not depend on the batch.
        batch = [] if least.phase == "optimizer" else ["make the batch smaller"]
        *listed, last = [f"Raise memory_limit to {least.peak} bytes", *remedies, *batch]
        advice = f"{', '.join(listed)}, or {last}" if listed else last
        shortened = (
            f" The search ended at time_limit={planner.settings.time_limit:g} s: a longer one may find a smaller peak."
            if self._late
            else ""
        )
        return (
            f"no plan fits in {format_bytes(self._limit)} per device on mesh {planner.mesh}: the smallest peak found "
            f"is {format_bytes(least.peak)}, {where} ({parts}). {advice}.{shortened}"
        )

    def _find_remedies(self) -> Iterator[Remedy]:
        """Return the changes that reduce the peak."""
        planner, leanest, least = self._planner, self._leanest, self._least.peak
        room = planner.settings.host_memory
        # Try remedies with memory priced at the peak of the leanest plan: a whole search for each would take long.
        prices = memory_prices(peak_weights(leanest.held_bytes), MEMORY_ONLY, leanest.cost, least)
        forced = drop_negligible(forceable_parameters(planner.graph, planner.constraints))
        constraints = replace(planner.constraints, forced=frozenset(forced))
        parameters = [source.name for source in planner.graph.parameters]
        pinned = [name for name in parameters if name in constraints.pinned]
        if pinned and not constraints.placed:
            free = {name: pins for name, pins in constraints.pinned.items() if name not in pinned}
            unpinned = replace(constraints, pinned=free, forced=frozenset(parameters))
            peak = _peak_of(_smallest_memory(planner, unpinned, prices))
            if peak < least:
                others = f" and {len(pinned) - 1} more" if len(pinned) > 1 else ""
                yield Remedy("drop the hints", f"without that on {pinned[0]}{others}, a plan needs", peak)
        scalars = (node.meta["val"].ndim == 0 for node in planner.graph.tensor_outputs.values())
        if not (constraints.planned_outputs or constraints.outputs or constraints.row_axes or all(scalars)):
            peak = _peak_of(_smallest_memory(planner, replace(constraints, planned_outputs=True), prices))
            if peak < least:
                yield Remedy("leave outputs in shards", 'output_placements="planned" needs', peak)
        if returns_large_logits(planner.graph.graph, planner.graph.tensor_outputs.values(), planner.mesh.size):
            yield Remedy(
                'leave out logits that are not read (unread_outputs=("logits",): the loss is then computed in pieces)'
            )
        if planner.graph.kept:
            graph = _without_kept_values(planner)
            peak = _peak_of(_changed_memory(planner, graph, constraints))
            if peak < least:
                asked = [*dict.fromkeys(planner.graph.kept.values())]
                more = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
                yield Remedy(f"drop {asked[0]}{more}", "without that, a plan needs", peak)
        if planner.settings.recompute == "none":
            layers = recomputable(planner.graph)
            graph = recompute_layers(planner.graph, [layer.name for layer in layers])
            peak = _peak_of(_changed_memory(planner, graph, constraints) if layers else None)
            if peak < least:
                yield Remedy("allow recomputation", 'recompute="full" needs', peak)
        if planner.settings.offload == "none" and planner.graph.gradients:
            graph = offload_values(planner.graph, _movable(planner.graph))
            peak = _peak_on_device(_changed_memory(planner, graph, constraints), room)
            if peak < least:
                yield Remedy("move tensors to the host", 'offload="auto" needs', peak)
        if planner.settings.offload_optimizer == "none" and planner.graph.gradients:
            hosted = frozenset(source.name for source in planner.graph.parameters)
            peak = _peak_on_device(_smallest_memory(planner, replace(constraints, hosted=hosted), prices), room)
            if peak < least:
                yield Remedy("keep optimizer state on the host", 'offload_optimizer="all" needs', peak)
        if planner.settings.offload == "auto" and room is not None:
            graph = offload_values(planner.graph, _movable(planner.graph))
            roomy = replace(planner.settings, host_memory=None)
            memory = _changed_memory(planner, graph, constraints, roomy)
            if memory is not None and memory.host > room and memory.peak < least:
                has = f"raise host_memory, which is {format_bytes(room)}"
                yield Remedy(has, f"with {format_bytes(memory.host)}, a plan needs", memory.peak)
        mesh = planner.mesh
        longest = max(range(mesh.ndim), key=lambda axis: mesh.sizes[axis])
        sizes = [size * 2 if axis == longest else size for axis, size in enumerate(mesh.sizes)]
        mesh = MeshShape.of(dict(zip(mesh.names, sizes, strict=True)))
        # The cluster may have a fixed number of devices, and pins may not fit the larger mesh.
        if (planner.cluster.count is not None and mesh.size > planner.cluster.count) or not _pins_fit(
            planner, constraints, mesh
        ):
            yield Remedy("add devices")
            return
        larger = type(planner)(planner.graph, mesh, planner.cluster, constraints, planner.settings)
        peak = _peak_of(_smallest_memory(larger, constraints, prices))
        yield Remedy("add devices", f"{mesh} needs", peak) if peak < least else Remedy("add devices")


def _without_kept_values(planner: PlanningContext) -> JointGraph:
    """Return a planner's graph in which everything is recomputed or moved that its settings allow."""
    graph = planner.graph
    freed = graph_of_plan(replace(captured_step(graph), kept={}), graph.recomputed, graph.offloaded)
    if planner.settings.recompute == "auto":
        freed = recompute_layers(freed, [layer.name for layer in recomputable(freed)])
    else:
        like = type(planner)(freed, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
        freed = recompute_layers(freed, names_by_option(like))
    return freed if planner.settings.offload == "none" else offload_values(freed, _movable(freed))


def _movable(graph: JointGraph) -> tuple[str, ...]:
    """Return the names of all values worth moving to the host."""
    return values_of_modules(graph, graph.graph.nodes)


def _changed_memory(
    planner: PlanningContext, graph: JointGraph, constraints: Constraints, settings: Settings | None = None
) -> Memory | None:
    """Return the memory of a changed graph, priced at the peak of its fastest plan; None if there is no plan."""
    changed = type(planner)(graph, planner.mesh, planner.cluster, planner.constraints, settings or planner.settings)
    changed.budget = planner.budget
    try:
        fastest = changed.solve(changed.constraints)
    except AutoshardError:
        return None
    prices = memory_prices(peak_weights(fastest.held_bytes), MEMORY_ONLY, fastest.cost, fastest.memory.peak)
    return min(fastest.memory, _smallest_memory(changed, constraints, prices) or fastest.memory, key=_peak_of)


def _smallest_memory(planner: PlanningContext, constraints: Constraints, prices: np.ndarray) -> Memory | None:
    """Return the memory of the plan at prices at which only memory counts; None if there is no plan."""
    try:
        return planner.solve(constraints, prices=prices).memory
    except AutoshardError:
        return None


def _peak_of(memory: Memory | None) -> float:
    return math.inf if memory is None else memory.peak


def _peak_on_device(memory: Memory | None, room: int | None) -> float:
    """Return the peak of a device; infinite if the moved bytes exceed the room of its host."""
    fits = memory is not None and (room is None or memory.host <= room)
    return _peak_of(memory) if fits else math.inf


def _pins_fit(planner: PlanningContext, constraints: Constraints, mesh: MeshShape) -> bool:
    """Return True if the pinned placements are possible on another mesh."""
    shapes = {source.name: source.node.meta["val"].shape for source in planner.graph.inputs}
    specs = {name: Spec.of(*(pin or Replicate() for pin in pins)) for name, pins in constraints.pinned.items()}
    return all(is_placeable(shapes[name], spec, mesh) for name, spec in specs.items())


def find_leanest(
    start: CandidatePlan,
    solve: Callable[[np.ndarray], CandidatePlan | None],
    rounds: int,
    min_gain: float | None = None,
    held_bytes: Callable[[CandidatePlan], np.ndarray] = lambda plan: plan.held_bytes,
) -> tuple[CandidatePlan, np.ndarray]:
    """Return the plan with the smallest peak, and the weights of moments that led to it.

    This is fictitious play between a planner and an opponent who picks the moment: every plan is the cheapest if only
    memory has a price, at the moments of the largest average memory of earlier plans.

    Args:
        start: the first plan.
        solve: returns the cheapest plan for weights of the moments; None to stop.
        rounds: most plans.
        min_gain: fraction of the peak by which a plan must be leaner than the best one to continue, if any.
        held_bytes: bytes of a plan at every moment.
    """
    best, average = start, held_bytes(start)
    weights = best_weights = peak_weights(average)
    for count in range(1, rounds + 1):
        plan = solve(weights)
        if plan is None:
            break
        # A plan that is hardly leaner is kept, and ends the search.
        gained = min_gain is None or plan.memory.peak < (1.0 - min_gain) * best.memory.peak
        if plan.memory.peak < best.memory.peak:
            best, best_weights = plan, weights
        if not gained:
            break
        # The opponent responds to the average of all plans: responding to the last one would cycle.
        average = (average * count + held_bytes(plan)) / (count + 1)
        weights = peak_weights(average)
    return best, best_weights


def forceable_parameters(graph: JointGraph, constraints: Constraints) -> dict[str, int]:
    """Return the bytes of the parameters that are not pinned on every mesh axis."""
    return {
        source.name: Value(source.node).meta.bytes
        for source in graph.parameters
        if None in constraints.pinned.get(source.name, (None,))
    }


def names_by_size(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names from the largest size to the smallest, equal sizes in the order of their names."""
    return tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))


def drop_negligible(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes without the smallest, which are less than a hundredth in total: sharding them frees little."""
    left, kept = _NEGLIGIBLE_SHARE * sum(sizes.values()), dict(sizes)
    for name in reversed(names_by_size(sizes)):
        left -= sizes[name]
        if left < 0:
            break
        del kept[name]
    return kept


def largest_names(sizes: Mapping[str, int], share: float) -> frozenset[str]:
    """Return the names of the k largest sizes; k grows geometrically from 1 at `share` 0 to all at 1.

    Source: Rhino 4.4, "Memory Constraints": "We choose the smallest k that provides a feasible solution."
    """
    # Few parameters are large, so equal factors in k are about equal steps in bytes.
    return frozenset(names_by_size(sizes)[: round(max(len(sizes), 1) ** share)])


def peak_weights(held: np.ndarray) -> np.ndarray:
    """Return weights of the moments, with sum 1, that grow with the bytes held at each."""
    weights = np.exp(_SHARPNESS * (held / held.max() - 1.0))
    return np.asarray(weights / weights.sum())


def memory_prices(weights: np.ndarray, strength: float, cost: float, peak: float) -> np.ndarray:
    """Return seconds per byte at every moment.

    Args:
        weights: of the moments, with sum 1.
        strength: cost of a plan's whole memory, in costs of a step.
        cost: of a step, in seconds.
        peak: bytes of a plan's whole memory.
    """
    return weights * strength * cost / peak


def first_that_fits(
    fastest: CandidatePlan,
    leanest: CandidatePlan,
    levels: int,
    make: Callable[[int], CandidatePlan],
    limit: int,
    tolerance: float = 0.0,
) -> CandidatePlan:
    """Return the fastest plan within a limit among those of several levels, by bisection.

    A plan at the middle of an interval is ignored unless it is between the two ends in both seconds and bytes. The
    remaining plans are one sequence for all limits with falling bytes and rising seconds, whatever `make` returns, and
    no limit gets a slower plan than its plan in this sequence.

    Args:
        fastest: a plan that does not fit.
        leanest: a plan that fits.
        levels: number of possible plans between these.
        make: makes the plan of a level, from 1, next to the fastest, to `levels`, next to the leanest.
        limit: bytes that a plan may hold.
        tolerance: relative difference of seconds of two plans below which no plan between them is made.
    """
    low, high, left, right = fastest, leanest, 0, levels + 1
    fitting = [leanest]
    while right - left > 1 and high.step_seconds > (1.0 + tolerance) * low.step_seconds:
        middle = (left + right) // 2
        plan = make(middle)
        seconds, held = plan.step_seconds, plan.memory.peak
        if held <= limit:
            fitting.append(plan)
        if seconds < low.step_seconds or held >= low.memory.peak:
            left = middle  # outside of the interval at the fast end: ignored for every limit
        elif seconds > high.step_seconds or held <= high.memory.peak:
            right = middle  # outside it at the lean end
        elif held <= limit:
            high, right = plan, middle
        else:
            low, left = plan, middle
    # An ignored plan is used if it fits and is faster than that of the sequence.
    return min((high, *fitting), key=lambda plan: plan.step_seconds)
