"""Checks that the decisions of a plan fit a graph, before a program is made from them.

An invalid decision would fail later, or make a program with wrong results. The decisions of a planner are valid by
construction; those of a file may have been edited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch.distributed.tensor import Placement

from autoshard.errors import PlanError, reason_of
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import GraphRules, Value, value_of
from autoshard.patterns.rule import Rule
from autoshard.patterns.strategy import Choices, axis_choices, describe, fits, keeps_shares, splits_evenly
from autoshard.planner.account import value_uses
from autoshard.planner.boundary_specs import is_boundary_spec, is_storage_spec
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.target_constraints import PlacementsByName
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.reshard.path import Resharder
from autoshard.size import at
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, padded_segments_of
from autoshard.specs.spec import Spec, block_of, is_shard, split_factor_of

_MAX_LISTED = 4  # differences that an error lists


def checked_flow(planner: PlanningContext, plan: ShardingPlan) -> Flow:
    """Return the decisions of a plan on the planner's graph, after checking that they fit it.

    Raises:
        PlanError: a decision is missing, or is for nothing in the graph; a strategy is not one of its operator's; a
            spec does not fit its tensor and the mesh; there is no path from the spec of a tensor to that of its use;
            decisions that must be equal are not; or the plan's placements are not those of its decisions.
    """
    flow = planner.flow_of(plan)
    checks = _Checks(flow, planner.constraints)
    _raise_if_any(checks.names())
    _raise_if_any(checks.strategies())  # specs follow from strategies
    _raise_if_any(checks.specs())
    _raise_if_any(checks.ties())
    # The program is made with the same resharder, which caches the paths.
    _raise_if_any(_unreachable_uses(flow, planner.resharder))
    _raise_if_any(_contradicting_placements(flow, plan))
    return flow


def _contradicting_placements(flow: Flow, plan: ShardingPlan) -> Iterator[str]:
    """Return where the plan's placements of parameters, buffers, inputs and outputs differ from its decisions."""
    whole = Spec.all_replicated(flow.mesh.ndim).placements

    def pairs() -> Iterator[tuple[str, PlacementsByName, Spec]]:
        for source in flow.graph.inputs:
            rest = flow.decisions.rest[source.node.name]
            if source.kind in ("parameter", "buffer"):
                yield from ((name, plan.placements, rest) for name in flow.graph.aliases[source.name])
            elif source.kind == "input":
                yield source.name, plan.input_placements, rest
        yield from ((name, plan.output_placements, spec) for name, spec in flow.decisions.outputs.items())

    for name, placements, spec in pairs():
        placed = Spec.of(*placements.get(name, whole))
        if placed is not spec:
            yield f"{name} lies as {placed} by its placements, and as {spec} by the decisions"


def _raise_if_any(differences: Iterable[str]) -> None:
    """Raise a `PlanError` that lists the differences, if there are any."""
    texts = list(differences)
    if texts:
        more = f"\n  - and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
        listed = "".join(f"\n  - {text}" for text in texts[:_MAX_LISTED])
        raise PlanError(
            f"this plan's decisions do not fit the model on this mesh:{listed}{more}\nThe plan was edited, or made by "
            "another version of autoshard: make it again with autoshard.plan. To pin placements by hand, pass hints."
        )


class _Checks:
    """Differences between decisions and the graph that they should fit, each as a text.

    Args:
        flow: the graph, its rules and the decisions.
        constraints: placements of inputs, and the shares of an axis.
    """

    def __init__(self, flow: Flow, constraints: Constraints) -> None:
        self.flow = flow
        self.rules: GraphRules = flow.rules
        self.decisions = flow.decisions
        self.mesh: MeshShape = flow.mesh
        self.constraints = constraints
        self.free = [node for node in flow.rules.operators if flow.rules.pin_spec(node, flow.mesh) is None]

    def names(self) -> Iterator[str]:
        """Return missing decisions, and decisions for something that the graph lacks."""
        graph, free = self.rules.graph, {node.name for node in self.free}
        sources = {source.node.name for source in graph.inputs}
        outputs = set(graph.tensor_outputs)
        yield from _missing_or_unknown(
            "the operator", self.decisions.choices, free, {node.name for node in self.rules.operators}
        )
        yield from _missing_or_unknown("the input", self.decisions.rest, sources, sources)
        yield from _missing_or_unknown("the output", self.decisions.outputs, outputs, outputs)
        # Shared copies are optional: none has to be decided, but all decided ones must exist.
        copies = {f"{value.name}{phase}" for value in self.rules.values() for phase in ("", "@forward", "@backward")}
        yield from _missing_or_unknown("the shared copy of", self.decisions.hubs, set(), copies)
        parameters = {source.node.name for source in graph.parameters}
        yield from _missing_or_unknown("state on the host of", dict.fromkeys(self.decisions.hosted), set(), parameters)

    def strategies(self) -> Iterator[str]:
        """Return operators whose choices are not one of their strategies."""
        known: dict[tuple[int, Choices], str] = {}  # layers share their rules: most choices are checked once
        for node in self.free:
            rule, choices = self.rules.rules[node], self.decisions.choices[node.name]
            key = (id(rule), choices)
            if key not in known:
                known[key] = self._strategy_problem(rule, choices)
            if known[key]:
                yield f"the operator {node.name} ({node.target}) {known[key]}"

    def _strategy_problem(self, rule: Rule, choices: Choices) -> str:
        if len(choices) != self.mesh.ndim:
            return f"has {len(choices)} choices for the {self.mesh.ndim} axes of the mesh {self.mesh}"
        for choice, axis in zip(choices, self.mesh.axes, strict=True):
            offered = axis_choices(rule, axis.size)
            if choice not in offered:
                return (
                    f"has the choice {choice} on axis {axis.name!r}, where it can have {', '.join(map(str, offered))}"
                )
        if not fits(rule, choices, self.mesh):
            return f"has choices that do not go together: {describe(rule, choices, self.mesh)}"
        shared = self.constraints.shared
        if shared is not None and not (
            keeps_shares(rule, choices[shared.axis], shared) and splits_evenly(rule, choices, shared, self.mesh)
        ):
            axis_name = self.mesh.names[shared.axis]
            split = describe(rule, choices, self.mesh)
            return (
                f"is split as {split}, and axis {axis_name!r} has shares: plan with the same shares, or leave them out"
            )
        return ""

    def specs(self) -> Iterator[str]:
        """Return tensors whose spec is impossible outside of the step or inside the program."""
        for source in self.rules.graph.inputs:
            value, spec = Value(source.node), self.decisions.rest[source.node.name]
            problem = self._spec_problem(value, spec)
            if not problem and source.kind == "parameter" and not is_storage_spec(value, spec, self.mesh):
                problem = "no parameter can lie so outside a step"
            if not problem and not is_boundary_spec(value, spec, self.mesh):
                problem = "nothing that is given to a step can lie so"
            if not problem and source.kind in ("buffer", "constant") and not spec.is_replicated:
                problem = f"a {source.kind} lies whole on all ranks"
            if not problem and source.kind == "input":
                problem = self._input_problem(source.name, spec)
            if problem:
                yield f"the {source.kind} {source.name} is to lie as {spec}: {problem}"
        for name, node in self.rules.graph.tensor_outputs.items():
            value, spec = value_of(node), self.decisions.outputs[name]
            problem = self._spec_problem(value, spec)
            if not problem and not is_boundary_spec(value, spec, self.mesh):
                problem = "nothing can be handed back so, in blocks, partial or as the data says"
            asked = self.constraints.outputs.get(name, spec)
            if not problem and asked is not spec:
                problem = f"it is asked for as {asked}; was the plan made with other options of outputs?"
            if problem:
                yield f"the output {name} is to lie as {spec}: {problem}"
        for value in self.rules.values():
            for phase in ("", "@forward", "@backward"):
                spec_or_none = self.decisions.hubs.get(f"{value.name}{phase}")
                problem = "" if spec_or_none is None else self._spec_problem(value, spec_or_none)
                if problem:
                    yield f"the shared copy of {value.name}{phase} is to lie as {spec_or_none}: {problem}"

    def _spec_problem(self, value: Value, spec: Spec) -> str:
        """Return why a tensor in a program can't have a spec; an empty text if it can."""
        shape = value.meta.shape
        shards = [placement for placement in spec if is_shard(placement)]
        steps = [step for placement in shards for step in (split_factor_of(placement), block_of(placement))]
        # In an empty tensor, stretches and blocks are empty, too.
        if 0 not in shape and any(step is not None and step < 1 for step in steps):
            return "stretches and blocks have one element at least"
        try:
            normal = canonical(shape, spec, self.mesh)
            padded_segments_of(shape, spec, self.mesh)
        except ValueError as error:
            return reason_of(error)
        # Compare as text, since a dynamic size may be a number in one spec and an expression in the other.
        return "" if str(normal) == str(spec) else f"that is written {normal}"

    def _input_problem(self, name: str, spec: Spec) -> str:
        """Return why callers do not pass an input with a spec; an empty text if they do."""
        pinned: Sequence[Placement | None] = self.constraints.pinned.get(name, ())
        if not self.constraints.local_inputs and not pinned:
            whole = 'with inputs="global" every rank passes it whole; was the plan made with inputs="local"?'
            return "" if spec.is_replicated else whole
        differs = any(pin is not None and pin != placement for pin, placement in zip(pinned, spec, strict=False))
        return f"it is asked for as {', '.join(map(str, pinned))}" if differs else ""

    def ties(self) -> Iterator[str]:
        """Return decisions that must be equal and are not."""
        outputs = self.decisions.outputs
        for source in self.rules.graph.inputs:
            if source.kind == "tangent" and source.name in outputs:
                spec = self.decisions.rest[source.node.name]
                if spec is not outputs[source.name]:
                    yield (
                        f"the output {source.name} is handed back as {outputs[source.name]}, and its gradient taken as "
                        f"{spec}"
                    )
        for node in self.free:
            drawn = self.rules.original_draw(node)
            # A random operator's numbers depend on its shards, and on a seed that both runs share.
            if drawn is not None and self._split(drawn) != self._split(node):
                yield f"{node.name} runs {drawn.name} again and is split otherwise: it would draw other numbers"
            seeded = self.rules.first_with_seed(node)
            if seeded is not None and self._split(seeded, 1) != self._split(node, 1):
                yield f"{node.name} drops by the seed of {seeded.name} and is split otherwise: it would drop others"
        for node in self.rules.operators:
            if self.rules.restores_dtype(node) and self.flow.produced_spec(Value(node)).partial_axes:
                yield f"{node.name} casts a gradient that is not yet reduced"

    def _split(self, node: fx.Node, results: int | None = None) -> tuple[object, ...]:
        """Return what the random numbers of an operator depend on: the axes that split it, and its results' specs."""
        if self.rules.pin_spec(node, self.mesh) is not None:
            return ()
        specs = [
            self.flow.produced_spec(Value(node, index))
            for index, _ in enumerate(self.rules.rules[node].results[:results])
        ]
        return (tuple(choice >= 0 for choice in self.decisions.choices[node.name]), *specs)


def _missing_or_unknown(what: str, decided: Mapping[str, Any], needed: set[str], known: set[str]) -> Iterator[str]:
    yield from (f"it decides nothing of {what} {name}" for name in sorted(needed - decided.keys()))
    yield from (f"it decides of {what} {name}, which this graph lacks" for name in sorted(decided.keys() - known))


def _unreachable_uses(flow: Flow, resharder: Resharder) -> Iterator[str]:
    """Return tensors without a path from the spec in which they are produced to that of a use."""
    # Paths of dynamic sizes are those of generic sizes, as in programs.
    generic = flow.rules.generic
    flow = flow.at(generic)
    seen: set[object] = set()
    for use in value_uses(flow):
        value, meta, unreduced = use.value, at(use.value.meta, generic), use.value in flow.rules.unreduced
        for _, source, spec in flow.reshards(value, use.phase, use.target):
            # Equal layers have equal reshards: search one of them.
            key = (meta.shape, source, spec, unreduced)
            if key in seen:
                continue
            seen.add(key)
            if unreduced and not set(source.partial_axes) <= set(spec.partial_axes):
                yield f"{value.name} is reduced from {source} to {spec} before it is cast for its reduction"
            try:
                resharder.path(meta.shape, meta.dtype.itemsize, source.at(generic), spec.at(generic))
            except ValueError as error:
                user = use.user.name if isinstance(use.user, fx.Node) else f"the {use.user.kind} {use.user.name}"
                yield f"{value.name}, which {user} takes as {use.target}, can not be brought there: {reason_of(error)}"
