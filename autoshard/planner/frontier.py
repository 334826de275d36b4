"""Every plan that is worth its memory: the frontier of a step's time and a device's peak (TensorOpt, section 3)."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.recompute import recomputable, recomputed
from autoshard.errors import BudgetError, PlanError
from autoshard.memory.force import by_size
from autoshard.memory.prices import peak_weights
from autoshard.patterns.decisions import Decisions
from autoshard.plan import ShardingPlan
from autoshard.planner.budget import forceable
from autoshard.planner.found import Found
from autoshard.planner.mixing import mixtures
from autoshard.planner.planner import Planner
from autoshard.planner.problem import Wishes

_ROUNDS = 8  # plans made where memory alone has a price
_DEAR = 1e3  # all the memory of a plan, in costs of a step, where memory alone counts
_SUMS = 6  # plans taken from a frontier of sums
_LADDER = (1e2, 1e1, 1.0, 1e-1, 1e-2)  # prices below that one, tried from every set of forced parameters
_ROWS_WORK = 200_000_000  # of the solver on a problem with rows of memory: about two seconds
_HALVINGS = 2  # of the number of parameters that are forced, in one gap
_POOL = 4  # plans that are mixed at a time
_MIXED = 8  # mixtures of them that are accounted for


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was found, as the planner accounts for it.

    Attributes:
        found: its decisions, cost and memory.
        wishes: of the problem that it solves.
        step: predicted seconds of the step.
    """

    found: Found
    wishes: Wishes
    step: float

    @property
    def peak(self) -> int:
        """Bytes per device at the peak."""
        return self.found.memory.peak


def frontier_plans(planner: Planner, gaps: int) -> list[ShardingPlan]:
    """The plans of a graph that are worth their memory, with layers recomputed as the planner's settings say.

    `"auto"`: the plans without recomputation, and those in which all layers are run again. Some of either may beat some
    of the others; `Frontier` leaves those out.

    Args:
        planner: without a memory limit.
        gaps: of each frontier that are looked into.
    """
    wanted = planner.settings.recompute
    layers = () if wanted == "none" else recomputable(planner.graph)
    plans = FrontierSearch(planner, gaps).run() if wanted != "full" or not layers else []
    if layers:
        graph = recomputed(planner.graph, [layer.name for layer in layers])
        other = Planner(
            graph, planner.mesh, planner.cluster, planner.wishes, planner.settings, planner.progress, like=planner
        )
        other.deadline = planner.deadline
        plans += FrontierSearch(other, gaps).run()
    return plans


class FrontierSearch:
    """Looks for plans no two of which are better than each other in the time of a step and in the peak of a device.

    Neither is a sum over operators: the time is that of a timeline on which communication hides behind compute, the
    peak is a maximum over moments. Candidates come from sums that stand for them, and the account decides.

    * The plan without a limit, its collectives hidden, is the fast end.
    * Where memory alone has a price, at the moments at which the plans so far held most, the plans are the lean end
      (fictitious play, as where a limit has to be met).
    * Between them lie the plans of the frontier of cost and memory summed at those moments (`solver.cost_frontier`);
      where there are too many strategies for it, lower prices. The largest parameters are forced to be sharded or not
      (Rhino 4.4).
    * Equal layers all flip at one price. So plans are mixed, each layer as in one or another of them: the mixtures that
      are looked at are the cost frontier (`solver.cost_frontier`) of the problem in which every operator has the
      strategies of these plans alone.
    * The widest gaps that are left are looked into: at the rate at which their two ends trade time for memory, with
      more parameters forced than at one end and fewer than at the other, with rows of memory in the problem
      (Rhino 4.2), and by mixing the plans around them.

    Rows of memory make some problems far harder than prices do: they are searched with so much work and no more. Only
    the time limit, which ends the search early, makes it depend on the machine.

    Args:
        planner: without a memory limit.
        gaps: of the frontier that are looked into.
    """

    def __init__(self, planner: Planner, gaps: int = 4) -> None:
        assert planner.settings.memory_limit is None, "a frontier has every limit"
        self.planner = planner
        self.gaps = gaps
        self.candidates: list[Candidate] = []
        self.method = "alternate" if planner.settings.method == "alternate" else "auto"
        self.sizes = forceable(planner.graph, planner.wishes)
        self.mixed: set[frozenset[int]] = set()
        self.unseen = 0.0

    def run(self) -> list[ShardingPlan]:
        """The plans, from the smallest peak to the shortest step."""
        fastest = self.planner.plan()
        decisions = Decisions.from_data(fastest.decisions)
        found = self.planner.found(decisions, fastest.cost, fastest.lower_bound, fastest.method)
        self.fastest = self._meet(found, self.planner.wishes)
        forced = self._solve(self._forcing(len(self.sizes)))
        if forced is not None:
            weights = self._leanest(forced)
            self._between(forced, weights)
        self._mix_families()
        self._refine()
        return [self._plan(candidate, fastest) for candidate in self.frontier()]

    def frontier(self) -> list[Candidate]:
        """The candidates that no other one beats, from the smallest peak to the shortest step."""
        return _undominated(self.candidates)

    def _plan(self, candidate: Candidate, fastest: ShardingPlan) -> ShardingPlan:
        if candidate is self.fastest:
            return fastest
        # What bounds the problem bounds it with less memory too.
        return self.planner.describe(replace(candidate.found, lower_bound=fastest.lower_bound))

    # Candidates

    def _leanest(self, forced: Candidate) -> np.ndarray:
        """Meets plans made for a small peak; the weights of the moments that led to the smallest."""
        average = forced.found.held
        weights = chosen = peak_weights(average)
        best = forced
        for played in range(1, _ROUNDS + 1):
            found = self._priced(forced.wishes, weights, self._unit(forced) * _DEAR)
            if found is None:
                break
            if found.peak < best.peak:
                best, chosen = found, weights
            average = (average * played + found.found.held) / (played + 1)
            weights = peak_weights(average)
        return chosen

    def _between(self, forced: Candidate, weights: np.ndarray) -> None:
        """Meets plans at lower prices, and plans with fewer parameters forced."""
        peak = peak_weights(self.fastest.found.held)
        if not self._sums(forced.wishes, weights) or not self._sums(self.planner.wishes, peak):
            for strength in _LADDER:
                self._priced(forced.wishes, weights, self._unit(forced) * strength)
            for strength in _LADDER[:-1]:
                self._priced(self.planner.wishes, peak, self._unit(self.fastest) * strength)
        count = 1
        while count < len(self.sizes):
            self._solve(self._forcing(count))
            count *= 4

    def _sums(self, wishes: Wishes, weights: np.ndarray) -> bool:
        """Meets plans from the frontier of cost and weighted memory; whether the problem is one that has it found."""
        if self._late():
            return True
        found = mixtures(self.planner, wishes, None, weights, _SUMS)
        for decisions, cost in found:
            self._meet(self.planner.found(decisions, cost, 0.0, "sums of memory"), wishes)
        return bool(found)

    def _unit(self, candidate: Candidate) -> float:
        """The price of a byte at which all the memory of a plan costs what its step does."""
        return candidate.found.cost / candidate.peak

    def _refine(self) -> None:
        """Looks into the widest gaps of the frontier, one after the other."""
        seen: set[tuple[int, int]] = set()
        for _ in range(self.gaps):
            gaps = [gap for gap in self._gaps() if (id(gap[0]), id(gap[1])) not in seen]
            if not gaps or self._late():
                return
            lean, fast = max(gaps, key=self._width)
            seen.add((id(lean), id(fast)))
            self._look_between(lean, fast)

    def _mix_families(self) -> None:
        """Mixes plans of one problem that lie all over the frontier."""
        for forced in dict.fromkeys(one.wishes.forced for one in self.candidates):
            family = _undominated([one for one in self.candidates if one.wishes.forced == forced])
            places = np.unique(np.linspace(0, len(family) - 1, _POOL).round().astype(int))
            pool = [family[place] for place in places]
            self._mix(pool, self._weights_of(pool[0], pool[-1]))

    def _weights_of(self, lean: Candidate, fast: Candidate) -> np.ndarray:
        """Weights of the moments at which either plan holds most."""
        return (peak_weights(lean.found.held) + peak_weights(fast.found.held)) / 2

    def _gaps(self) -> Iterator[tuple[Candidate, Candidate]]:
        frontier = self.frontier()
        yield from itertools.pairwise(frontier)

    def _width(self, gap: tuple[Candidate, Candidate]) -> float:
        """Area between the curve as it is known and as it may be, in shares of its ends'."""
        lean, fast = gap
        return (fast.peak / lean.peak - 1.0) * (lean.step / fast.step - 1.0)

    def _look_between(self, lean: Candidate, fast: Candidate) -> None:
        """Meets plans that may lie between two others."""
        middle = math.sqrt(lean.peak * fast.peak)
        self._by_rows(middle)
        weights = self._weights_of(lean, fast)
        rate = max(lean.found.cost - fast.found.cost, lean.step - fast.step) / (fast.peak - lean.peak)
        for forced in dict.fromkeys((lean.wishes.forced, fast.wishes.forced)):
            self._priced(replace(self.planner.wishes, forced=forced), weights, rate)
        self._force_between(lean, fast)
        near = sorted(self.frontier(), key=lambda one: abs(math.log(one.peak / middle)))
        for forced in dict.fromkeys((lean.wishes.forced, fast.wishes.forced)):
            self._mix([one for one in near if one.wishes.forced == forced][:_POOL], weights)

    def _force_between(self, lean: Candidate, fast: Candidate) -> None:
        """Meets plans with more parameters forced than for the fast end of a gap, and fewer than for the lean one."""
        middle = math.sqrt(lean.peak * fast.peak)
        low, high = len(fast.wishes.forced), len(lean.wishes.forced)
        for _ in range(_HALVINGS):
            if high - low < 2:
                return
            count = (low + high) // 2
            found = self._solve(self._forcing(count))
            low, high = (low, count) if found is not None and found.peak <= middle else (count, high)

    def _mix(self, pool: Sequence[Candidate], weights: np.ndarray) -> None:
        """Meets plans that do in every operator as one or another of some plans of one problem."""
        if len(pool) < 2 or frozenset(map(id, pool)) in self.mixed:
            return
        self.mixed.add(frozenset(map(id, pool)))
        wishes = pool[0].wishes
        for decisions, cost in mixtures(self.planner, wishes, [one.found.decisions for one in pool], weights, _MIXED):
            if self._late():
                return
            self._meet(self.planner.found(decisions, cost, 0.0, "plans mixed"), wishes)

    def _by_rows(self, peak: float) -> None:
        """Meets the plan of the problem with rows of memory (Rhino 4.2), for a peak of about so many bytes.

        The rows see less than the account does; by how much was seen the last time.
        """
        if self._late():
            return
        with contextlib.suppress(PlanError, BudgetError):
            limit = peak - self.unseen
            found = self.planner.solve(self.planner.wishes, method=self.method, limit=limit, work=_ROWS_WORK)
            self.unseen = max(0.0, found.memory.peak - limit)
            self._meet(replace(found, method=f"{found.method}, memory bounded"), self.planner.wishes)

    # Problems

    def _forcing(self, count: int) -> Wishes:
        """The wishes with so many of the largest parameters forced to be sharded."""
        return replace(self.planner.wishes, forced=frozenset(by_size(self.sizes)[:count]))

    def _priced(self, wishes: Wishes, weights: np.ndarray, price: float) -> Candidate | None:
        """The plan where a byte held at all moments costs so many seconds, moments being weighted."""
        return self._solve(wishes, weights * price)

    def _solve(self, wishes: Wishes, prices: np.ndarray | None = None) -> Candidate | None:
        """The cheapest plan under some wishes and prices; None where time is up."""
        if self._late():
            return None
        try:
            found = self.planner.solve(wishes, method=self.method, prices=prices)
        except PlanError:  # the method found nothing in the time that was left
            return None
        told = [f"{len(wishes.forced)} parameters forced to be sharded"] if wishes.forced else []
        told += ["memory priced"] if prices is not None else []
        return self._meet(replace(found, method=", ".join([found.method, *told])), wishes)

    def _meet(self, found: Found, wishes: Wishes) -> Candidate:
        """Notes a plan."""
        candidate = Candidate(found, wishes, found.step_seconds)
        self.candidates.append(candidate)
        return candidate

    def _late(self) -> bool:
        return time.monotonic() > self.planner.deadline


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats, from the smallest peak to the shortest step."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.peak, one.step)):
        if not kept or candidate.step < kept[-1].step:
            kept.append(candidate)
    return kept
