"""The problem in which operators may be recomputed and values moved to the host, and the plans of its solutions.

Recomputation is decided together with how all operators are split. The graph of this problem has every operator that
can be recomputed twice: the second one, in the backward half, may be absent. The hub of a value in the backward half
takes the value from the forward half, kept or gathered again; from the second operator; or from the host, if the value
was moved there; or nothing reads it there. The time and memory of a solution are those of the graph in which only the
chosen operators are recomputed and only the chosen values are moved, so every prediction is that of a program that can
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import fx

from autoshard.capture.host_copies import TO_DEVICE, TO_HOST
from autoshard.capture.offloading import DEVICE_NAME, HOST_NAME, movable_values, offload_values
from autoshard.capture.recomputation import RECOMPUTES, recompute_layers, rerunnable
from autoshard.errors import PlanError
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph_rules import Value, value_of
from autoshard.patterns.strategy import ABSENT, WHOLE, Choices, offered_factors
from autoshard.planner.account import StepAccount
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.host_updates import cheapest_cover, state_options
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.regather import MOVED
from autoshard.reshard.path import NoPathError
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec


class RouteError(PlanError):
    """Decisions need a route of rows that its operators do not have if only some of them are recomputed.

    On every operator of a route (`operators/routed/routed_rows.py`), the placement of rows depends on the data: no
    reshard leads from one such placement to another.
    """


class RerunContext(Planner):
    """Solves the problem with optional recomputation and offloading of values, at prices of memory.

    Args:
        planner: the planner of the graph without them; its tables are shared.
        may_rerun: False to recompute no operators but views. Those always may be if values may be moved: then the base
            of a view may be moved.
        copy_price: the price of a second of copies, as in `Constraints`; None if no value may be moved.
        may_host: True if optimizer state may be on the host.

    Attributes:
        without: the planner.
        reruns: the second operators, by the names of the first.
        moves: the values that may be moved, by the names of their copies back.
        may_rerun: True if operators may be recomputed.
    """

    def __init__(
        self, planner: Planner, may_rerun: bool = True, copy_price: float | None = None, may_host: bool = False
    ) -> None:
        self.without = planner
        # Operators that are recomputed in the planner's graph always are.
        asked = frozenset(planner.graph.recomputed)
        again = {name: nodes for name, nodes in rerunnable(planner.graph).items() if name not in asked}
        rules = planner.rules.rules
        self.may_rerun = may_rerun and bool(again)
        names = list(again) if may_rerun else []
        self.moves: dict[str, fx.Node] = {}
        if copy_price is not None:
            names = [name for name in again if may_rerun or all(rules[n].free for n in again[name] if n in rules)]
            values = movable_values(planner.graph)
            self.moves = {DEVICE_NAME.format(name): node for name, node in values.items()}
        # If there is more to decide than strategies, plans are judged by their accounts, and many are made.
        self.proposes = bool(names) or bool(self.moves) or may_host
        graph = recompute_layers(planner.graph, names)
        constraints = replace(
            planner.constraints,
            optional_reruns=frozenset(names),
            movable=frozenset(value_of(node).name for node in self.moves.values()),
            copy_price=copy_price or 0.0,
            may_host=may_host,
        )
        super().__init__(
            graph, planner.mesh, planner.cluster, constraints, planner.settings, planner.progress, like=planner
        )
        self.budget, self.timings = planner.budget, planner.timings
        # Second operators, by the name of the first.
        again_nodes = {node.meta[RECOMPUTES]: node for node in self.rules.operators if RECOMPUTES in node.meta}
        self.reruns = {name: node for name, node in again_nodes.items() if name in constraints.optional_reruns}
        self._settled: dict[frozenset[str], Planner] = {frozenset(): planner}

    def _update_best(self, plan: CandidatePlan) -> None:
        """Keep no plan: the search keeps them, and their decisions lack the absent operators."""

    def evaluate(self, decisions: Decisions, cost: float, lower_bound: float, method: str) -> CandidatePlan:
        """Return the plan with the recomputation and offloading of these decisions of the whole problem."""
        moved = {name for name in self.moves if self._value(name).name + MOVED in decisions.hubs}
        names = self._names_to_rerun(decisions) | moved
        return self.evaluate_reruns(names, decisions, cost, lower_bound, method)

    def evaluate_reruns(
        self, names: Collection[str], decisions: Decisions, cost: float, lower_bound: float, method: str
    ) -> CandidatePlan:
        """Return the plan in which the operators of these names are recomputed, and values moved.

        Args:
            names: the names of the operators, and of the copies that bring values back; too many copies for the host
                are left out.
            decisions: decisions for the plan's graph or a larger one.
            cost, lower_bound, method: as in `CandidatePlan`.

        Raises:
            RouteError: the plan's graph can't have these decisions.
        """
        names, hosted = self._within_host(names, decisions)
        planner = self.planner_with(names)
        settled = replace(self.settle(decisions, planner), hosted=hosted)
        if self._has_routes:
            self.account_of(settled, planner)
        return planner.evaluate(settled, cost, lower_bound, method)

    @cached_property
    def _has_routes(self) -> bool:
        return any(rule.routed for rule in self.rules.rules.values())

    def account_of(self, settled: Decisions, planner: Planner) -> StepAccount:
        """Return the account of the decisions for a planner's graph.

        Raises:
            RouteError: the graph can't have these decisions.
        """
        for node, rule in planner.rules.rules.items() if self._has_routes else ():
            if max(settled.choices.get(node.name, ()), default=WHOLE) >= len(offered_factors(rule)):
                raise RouteError(f"{node.name} has no route that is split, since only some of its operators run again.")
        try:
            return planner.account(settled)
        except NoPathError as error:
            raise RouteError(
                "Nothing brings rows from how one operator of their route has them to the next."
            ) from error

    def with_least_hosted(self, plan: CandidatePlan, limit: int) -> tuple[float, Callable[[], CandidatePlan]] | None:
        """Return the approximate step seconds of a plan with no more optimizer state on the host than a limit needs,
        and a function that makes that plan; None if the limit needs more, or the plan is already so.
        """
        context, decisions = plan.estimate.context, plan.decisions
        flow = Flow(context.rules, decisions, self.mesh)
        options = state_options(flow, self.settings.optimizer, self.cost)
        hosted = [option for option in options if option.node in decisions.hosted]
        before, state = sum(option.seconds for option in hosted), sum(option.state for option in hosted)
        held = plan.held_bytes
        at_end = float(held[-1]) + state + sum(option.temporaries for option in hosted)
        cover = cheapest_cover(options, float(held[:-1].max(initial=0)) + state - limit, at_end - limit)
        if cover is None or {option.node for option in cover} == decisions.hosted:
            return None
        after = sum(option.seconds for option in cover)
        changed = replace(decisions, hosted=frozenset(option.node for option in cover))

        def make() -> CandidatePlan:
            method = f"{plan.method}, state on the host as the limit asks"
            return self.evaluate_reruns(self.names_of(plan), changed, plan.cost + after - before, 0.0, method)

        return plan.step_seconds + after - before, make

    @cached_property
    def forward_places(self) -> dict[str, int]:
        """The place in the forward half of every operator and every input of the step, by name.

        An operator of the backward half has the place of the first operator of the forward half whose gradient it, or
        what it reads, needs; a recomputed one that of its first run; an input that of its first reader. Operators that
        depend only on inputs have none.
        """
        places: dict[str, int] = {}
        last_use: dict[Value, int] = {}
        rules = self.without.rules
        # Operators of the forward half come first.
        for place, node in enumerate(rules.operators):
            if self.graph.phase(node) == "forward":
                places[node.name] = place
                if node.name in self.reruns:
                    places[self.reruns[node.name].name] = place
                last_use |= dict.fromkeys(rules.operands[node], place)
                continue
            # Values for all layers, such as rotary frequencies, come before the first layer: their last use counts.
            read = [
                last_use.get(value, places.get(value.node.name))
                for value in rules.operands[node]
                if self.graph.phase(value.node) == "backward" or value.node.op == "call_function"
            ]
            known = [each for each in read if each is not None]
            if known:
                places[node.name] = min(known)
        for name, node in self.moves.items():
            made = value_of(node).node.name
            if made in places:
                places[name] = places[HOST_NAME.format(node.name)] = places[made]
        for source in rules.graph.inputs:
            uses = rules.uses.get(Value(source.node), ())
            known = [places[use.node.name] for use in uses if use.node.name in places]
            if known:
                places[source.node.name] = min(known)
        return places

    @cached_property
    def whole_layers(self) -> CandidatePlan:
        """The cheapest plan that recomputes all operators it can."""
        planner = self.planner_with(self.reruns)
        return planner.solve(planner.constraints)

    def settle(self, decisions: Decisions, planner: Planner) -> Decisions:
        """Return the decisions for a planner's graph, from those for a larger one."""
        operators = {node.name for node in planner.rules.operators}
        values = {value.name for value in planner.rules.values()}
        hubs = decisions.hubs.items()
        settled = Decisions(
            {name: choices for name, choices in decisions.choices.items() if name in operators},
            decisions.rest,
            decisions.outputs,
            {key: spec for key, spec in hubs if key.partition("@")[0] in values and not key.endswith(MOVED)},
            decisions.hosted,
        )
        self._split_copies(settled, planner, {key: spec for key, spec in hubs if key.endswith(MOVED)})
        return settled

    def assignment_of(self, plan: CandidatePlan, built: BuiltProblem) -> list[int] | None:
        """Return the assignment of the whole problem for a plan; None if the problem has none.

        Args:
            plan: a plan of any graph with recomputed operators or moved values.
            built: the problem of this context.
        """
        rules, decisions = plan.estimate.context.rules, plan.decisions
        absent = {node.name: (ABSENT,) * self.mesh.ndim for node in self.reruns.values()}
        hubs, flow = dict(decisions.hubs), Flow(rules, decisions, self.mesh)
        for value in rules.values():
            name, uses = value.name, list(rules.uses.get(value, ()))
            phases = {rules.graph.phase(use.node) for use in uses}
            missing = [phase for phase in phases if f"{name}@{phase}" not in hubs]
            if len(phases) == 2 and name in built.values_of_both_halves and name not in hubs:
                # In a splice, a recomputed view may be of a value without a hub in the plan of that part.
                for use in reversed(uses):
                    if (phase := rules.graph.phase(use.node)) in missing:
                        hubs[f"{name}@{phase}"] = flow.consumed_spec(use.node, use.operand)
            if len(phases) != 1 or not missing:
                continue
            # In the whole problem a value may have more readers, and so a hub that it lacks here.
            spec = hubs.pop(name, None) or flow.consumed_spec(uses[0].node, uses[0].operand)
            hubs[f"{name}@{phases.pop()}" if name in built.values_of_both_halves else name] = spec
        try:
            return built.encode(replace(decisions, choices=absent | decisions.choices, hubs=hubs))
        except ValueError:
            return None

    def _split_copies(self, settled: Decisions, planner: Planner, wanted: Mapping[str, Spec]) -> None:
        """Decide how copies to the host and back, and views of the copies back, are split, where that is undecided.

        Args:
            settled: the decisions; the choices are added to them.
            planner: the planner of their graph.
            wanted: key of a moved value, with the suffix `MOVED` -> the spec in which the backward half reads it.
        """
        flow = Flow(planner.rules, settled, planner.mesh)
        for node in planner.rules.operators:
            choices = settled.choices.get(node.name)
            if choices is not None and ABSENT not in choices:
                continue
            if node.target in (TO_HOST, TO_DEVICE):
                (value,) = planner.rules.operands[node]
                spec = flow.produced_spec(value)
                if node.target is TO_DEVICE:
                    (moved,) = planner.rules.operands[value.node]
                    spec = wanted.get(moved.name + MOVED, spec)
                settled.choices[node.name] = self._choices_for(node, value, spec, planner)
            else:
                settled.choices[node.name] = settled.choices[node.meta[RECOMPUTES]]  # a recomputed view

    def _choices_for(self, node: fx.Node, value: Value, spec: Spec, planner: Planner) -> Choices:
        """Return how a copy is split to be made in a spec, or in the one with the fastest reshard from it."""
        options = planner.tables.options(planner.rules.rules[node])
        specs = options.operands[0]
        places = [place for place, each in enumerate(specs.distinct) if each is spec]
        if not places:
            meta = value.meta
            seconds = planner.resharder.seconds(meta.shape, meta.dtype.itemsize, (spec,), specs.distinct)
            places = [int(np.argmin(seconds[0]))]
        return options.choices[int(np.flatnonzero(specs.index == places[0])[0])]

    def planner_with(self, names: Collection[str]) -> Planner:
        """Return the planner of the graph in which the operators of these names are recomputed, and values moved."""
        key = frozenset(names)
        if key not in self._settled:
            with self.time_phase("patterns"):
                moved = [self.moves[name].name for name in key & self.moves.keys()]
                graph = recompute_layers(self.without.graph, key - self.moves.keys(), moved)
                graph = offload_values(graph, moved)
                like = self.without
                planner = Planner(graph, like.mesh, like.cluster, like.constraints, like.settings, like=like)
            planner.budget, planner.timings = self.budget, self.timings
            self._settled[key] = planner
        return self._settled[key]

    def names_of(self, plan: CandidatePlan) -> list[str]:
        """Return the names for `evaluate_reruns` of a plan's recomputed operators and moved values."""
        graph, given = plan.estimate.context.graph, self.without.graph
        moved = [DEVICE_NAME.format(name) for name in graph.offloaded if name not in given.offloaded]
        return [*(name for name in graph.recomputed if name not in given.recomputed), *moved]

    def moments_of(self, plan: CandidatePlan) -> np.ndarray:
        """Return the bytes that a plan holds at every moment of the whole problem."""
        return plan.held_bytes[self.places_of(plan)]

    def places_of(self, plan: CandidatePlan) -> np.ndarray:
        """Return, for every moment of the whole problem, the moment of a plan.

        For an operator that the plan lacks, it is the moment of the next operator that it has.
        """
        rules = plan.estimate.context.rules
        position = {node.name: place for place, node in enumerate(rules.operators)}
        places = np.empty(len(self.rules.operators) + 1, dtype=np.intp)
        places[-1] = len(rules.operators)
        for moment in range(len(self.rules.operators) - 1, -1, -1):
            places[moment] = position.get(self.rules.operators[moment].name, places[moment + 1])
        return places

    def _within_host(self, names: Collection[str], decisions: Decisions) -> tuple[set[str], frozenset[str]]:
        """Return operator names, copy names and hosted parameters, without copies and state too large for the host."""
        room, flow = self.settings.host_memory, Flow(self.rules, decisions, self.mesh)
        if room is None:
            return set(names), decisions.hosted

        def size(name: str) -> int:
            value = self._value(name)
            shape = local_shape(value.meta.shape, flow.produced_spec(value), self.mesh)
            return self.settings.under_way * math.prod(shape) * value.meta.dtype.itemsize

        left = room - sum(size(DEVICE_NAME.format(name)) for name in self.without.graph.offloaded)
        kept = set(names) - self.moves.keys()
        # Earlier values first: the device would hold them longer.
        for name in self.moves:
            if name in names and size(name) <= left:
                kept.add(name)
                left -= size(name)
        hosted = set[str]()
        nodes = [source.node for source in self.graph.parameters if source.node.name in decisions.hosted]
        for node, update in zip(nodes, self.host_updates(flow), strict=True):
            if update.bytes <= left:
                hosted.add(node.name)
                left -= update.bytes
        # Parameters that the user named are always hosted: a plan with too many is refused.
        return kept, frozenset(hosted | {node.name for node in nodes if not self.constraints.may_host})

    def _value(self, name: str) -> Value:
        """Return the value that a copy of this name brings back."""
        made = value_of(self.moves[name])
        return Value(self._by_name[made.node.name], made.result)

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.graph.nodes}

    def _names_to_rerun(self, decisions: Decisions) -> set[str]:
        """Return the names of the operators whose second run is present and has a reader."""
        # Views of moved values are recomputed without being named.
        if not self.may_rerun:
            return set()
        read = {key.partition("@")[0].partition(":")[0] for key in decisions.hubs}
        return {
            name
            for name, node in self.reruns.items()
            if ABSENT not in decisions.choices[node.name] and node.name in read
        }
