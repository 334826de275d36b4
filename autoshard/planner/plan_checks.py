"""Decisions are looked at before a program is made of them: each must fit the graph.

What is refused here would stop the making of the program, or make one that computes other numbers. Those of a planner
pass by construction; those of a file may have been edited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch.distributed.tensor import Placement

from autoshard.errors import PlanError
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import GraphRules, Value, value_of
from autoshard.patterns.rule import Rule
from autoshard.patterns.strategy import Choices, axis_choices, describe, fits, keeps_shares, splits_evenly
from autoshard.planner.boundary_specs import is_boundary_spec, is_storage_spec
from autoshard.planner.planning_problem import Constraints
from autoshard.reshard.path import Resharder
from autoshard.size import at
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, padded_segments_of
from autoshard.specs.spec import Spec, block_of, is_shard, split_factor_of

_MAX_LISTED = 4  # differences that an error lists

PlacementsByName = Mapping[str, tuple[Placement, ...]]


def check_decisions(flow: Flow, resharder: Resharder, wishes: Constraints) -> None:
    """Make sure that the decisions are some for this graph, which a program can be made of.

    Args:
        flow: the graph, its rules and the decisions.
        resharder: finds the reshards, the same that the program is made with, which then has them at hand.
        wishes: how inputs lie, and in which shares.

    Raises:
        PlanError: a decision is missing, or is of what the graph lacks; a strategy is not among an operator's; a spec
            does not fit its tensor and the mesh; no path leads from where a tensor is made to where it is wanted; what
            has to be decided alike is not.
    """
    checks = _Checks(flow, wishes)
    _raise_if_any(checks.names())
    _raise_if_any(checks.strategies())  # specs follow from strategies
    _raise_if_any(checks.specs())
    _raise_if_any(checks.ties())
    _raise_if_any(_unreachable_uses(flow, resharder))


def check_placements(
    flow: Flow, placements: PlacementsByName, inputs: PlacementsByName, outputs: PlacementsByName
) -> None:
    """Make sure that what a plan says of parameters, buffers, inputs and outputs is what its decisions say.

    Args:
        flow: the graph and the decisions.
        placements: of parameters and buffers, under all their names.
        inputs, outputs: of the step's inputs and outputs; those that are not named are whole.

    Raises:
        PlanError: some lies otherwise.
    """

    whole = Spec.all_replicated(flow.mesh.ndim).placements

    def pairs() -> Iterator[tuple[str, PlacementsByName, Spec]]:
        for source in flow.graph.inputs:
            rest = flow.decisions.rest[source.node.name]
            if source.kind in ("parameter", "buffer"):
                yield from ((name, placements, rest) for name in flow.graph.aliases[source.name])
            elif source.kind == "input":
                yield source.name, inputs, rest
        yield from ((name, outputs, spec) for name, spec in flow.decisions.outputs.items())

    _raise_if_any(
        f"{name} lies as {Spec.of(*placed.get(name, whole))} by its placements, and as {spec} by the decisions"
        for name, placed, spec in pairs()
        if Spec.of(*placed.get(name, whole)) is not spec
    )


def _raise_if_any(differences: Iterable[str]) -> None:
    """`PlanError` that lists the differences, the first few of many, if there are any."""
    found = list(differences)
    if found:
        more = f"\n  - and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        listed = "".join(f"\n  - {one}" for one in found[:_MAX_LISTED])
        raise PlanError(
            f"this plan's decisions do not fit the model on this mesh:{listed}{more}\nThe plan was edited, or made by "
            "another version of autoshard: make it again with autoshard.plan. To pin placements by hand, pass hints."
        )


class _Checks:
    """The differences between decisions and the graph that they are to be of, each as a text.

    Args:
        flow, wishes: as for `check_decisions`.
    """

    def __init__(self, flow: Flow, wishes: Constraints) -> None:
        self.flow = flow
        self.rules: GraphRules = flow.rules
        self.decisions = flow.decisions
        self.mesh: MeshShape = flow.mesh
        self.constraints = wishes
        self.free = [node for node in flow.rules.operators if flow.rules.pin_spec(node, flow.mesh) is None]

    def names(self) -> Iterator[str]:
        """Decisions that are missing, and those of what the graph lacks."""
        graph, free = self.rules.graph, {node.name for node in self.free}
        sources = {source.node.name for source in graph.inputs}
        outputs = {output.name for output in graph.outputs if output.kind == "output" and output.node is not None}
        yield from _missing_or_unknown(
            "the operator", self.decisions.choices, free, {node.name for node in self.rules.operators}
        )
        yield from _missing_or_unknown("the input", self.decisions.rest, sources, sources)
        yield from _missing_or_unknown("the output", self.decisions.outputs, outputs, outputs)
        copies = {f"{value.name}{phase}" for value in self.rules.values() for phase in ("", "@forward", "@backward")}
        yield from _missing_or_unknown("the shared copy of", self.decisions.hubs, set(), copies)

    def strategies(self) -> Iterator[str]:
        """Operators whose choices are no strategy of theirs."""
        known: dict[tuple[int, Choices], str] = {}  # layers share their rules
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
        """Tensors that can not lie as it is said where they come from or go to."""
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
        for output in self.rules.graph.outputs:
            if output.kind == "output" and output.node is not None:
                value, spec = value_of(output.node), self.decisions.outputs[output.name]
                problem = self._spec_problem(value, spec)
                if not problem and not is_boundary_spec(value, spec, self.mesh):
                    problem = "nothing can be handed back so, in blocks, partial or as the data says"
                if problem:
                    yield f"the output {output.name} is to lie as {spec}: {problem}"
        for value in self.rules.values():
            for phase in ("", "@forward", "@backward"):
                spec_or_none = self.decisions.hubs.get(f"{value.name}{phase}")
                problem = "" if spec_or_none is None else self._spec_problem(value, spec_or_none)
                if problem:
                    yield f"the shared copy of {value.name}{phase} is to lie as {spec_or_none}: {problem}"

    def _spec_problem(self, value: Value, spec: Spec) -> str:
        """Why a tensor can't lie so in a program; empty if it can."""
        shape = value.meta.shape
        steps = [each for one in spec if is_shard(one) for each in (split_factor_of(one), block_of(one))]
        if 0 not in shape and any(each is not None and each < 1 for each in steps):
            return "stretches and blocks have one element at least"
        try:
            normal = canonical(shape, spec, self.mesh)
            padded_segments_of(shape, spec, self.mesh)
        except ValueError as error:
            return str(error)
        # As they are written: of a dynamic size, one may be a number and the other an expression.
        return "" if str(normal) == str(spec) else f"that is written {normal}"

    def _input_problem(self, name: str, spec: Spec) -> str:
        """Why an input can't lie so: it lies as callers pass it."""
        if not self.constraints.local_inputs:
            whole = 'with inputs="global" every rank passes it whole; was the plan made with inputs="local"?'
            return "" if spec.is_replicated else whole
        pinned: Sequence[Placement | None] = self.constraints.pinned.get(name, ())
        asked = {axis: want for axis, want in enumerate(pinned) if want is not None and want != spec[axis]}
        return f"it is asked for as {', '.join(map(str, pinned))}" if asked else ""

    def ties(self) -> Iterator[str]:
        """What has to be decided alike and is not."""
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
            if drawn is not None and self._split(drawn) != self._split(node):
                yield f"{node.name} runs {drawn.name} again and is split otherwise: it would draw other numbers"
            seeded = self.rules.first_with_seed(node)
            if seeded is not None and self._split(seeded, 1) != self._split(node, 1):
                yield f"{node.name} drops by the seed of {seeded.name} and is split otherwise: it would drop others"
        for node in self.rules.operators:
            if self.rules.restores_dtype(node) and self.flow.produced_spec(Value(node)).partial_axes:
                yield f"{node.name} casts a gradient that is not yet reduced"

    def _split(self, node: fx.Node, results: int | None = None) -> tuple[object, ...]:
        """What the numbers that an operator draws depend on: axes that split it, and specs of its results."""
        if self.rules.pin_spec(node, self.mesh) is not None:
            return ()
        specs = [
            self.flow.produced_spec(Value(node, index))
            for index, _ in enumerate(self.rules.rules[node].results[:results])
        ]
        return (tuple(choice >= 0 for choice in self.decisions.choices[node.name]), *specs)


def _missing_or_unknown(what: str, decided: Mapping[str, Any], needed: set[str], known: set[str]) -> Iterator[str]:
    """What of the needed is not decided, and what is decided that is not known."""
    missing = sorted(needed - decided.keys())
    unknown = sorted(decided.keys() - known)
    yield from (f"it decides nothing of {what} {name}" for name in missing)
    yield from (f"it decides of {what} {name}, which this graph lacks" for name in unknown)


def _unreachable_uses(flow: Flow, resharder: Resharder) -> Iterator[str]:
    """Tensors that can not be brought from where they are made to where they are wanted.

    Where sizes are dynamic, paths are those of sizes that stand for all, as in programs.
    """
    generic = flow.rules.generic
    flow = flow.at(generic)
    seen: set[object] = set()
    for value, phase, target, where in _value_uses(flow):
        meta = at(value.meta, generic)
        for _, source, spec in flow.reshards(value, phase, target):
            key = (meta.shape, source, spec, value in flow.rules.unreduced)
            if key in seen:
                continue
            seen.add(key)
            if value in flow.rules.unreduced and not set(source.partial_axes) <= set(spec.partial_axes):
                yield f"{value.name} is reduced from {source} to {spec} before it is cast for its reduction"
            try:
                resharder.path(meta.shape, meta.dtype.itemsize, source.at(generic), spec.at(generic))
            except ValueError as error:
                yield f"{value.name}, which {where} takes as {target}, can not be brought there: {error}"


def _value_uses(flow: Flow) -> Iterator[tuple[Value, str, Spec, str]]:
    """Every use of a value: the value, the phase, the spec in which it is wanted, and by whom."""
    for node in flow.rules.operators:
        for operand, value in enumerate(flow.rules.operands[node]):
            yield value, flow.graph.phase(node), flow.consumed_spec(node, operand), node.name
    for value, outputs in flow.rules.outputs_of.items():
        for output in outputs:
            yield value, phase_of(output), flow.output_spec(output), f"the {output.kind} {output.name}"
