"""The seconds of a step under some decisions: its operators and collectives, and the replay of its program.

`StepAccount` lists operators and reshards as the search counts them. The seconds of a plan are those of its program's
replay on streams (`timeline`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoshard.capture.host_copies import HOST_COPIES
from autoshard.capture.joint import JointOutput
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.worker_shares import scaled_device
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import Value, uncast
from autoshard.patterns.strategy import Choices, describe, offered_factors
from autoshard.planner.planning_problem import HideableKind
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.plans.plan_data import Collective, Decision
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import KernelPrices, issue_calls, operations
from autoshard.reshard.path import Path, Resharder
from autoshard.simulate.events import Operation, Timeline, replay
from autoshard.specs.axes import SharedAxis
from autoshard.specs.spec import Spec

_LOCAL_STEPS = ("slice", "make_partial")  # steps of a reshard that send nothing


@dataclass(frozen=True, slots=True)
class ValueUse:
    """A use of a value by an operator, or by an output of the step.

    Attributes:
        value: the value.
        user: the operator or the output.
        phase: `"forward"` or `"backward"`.
        target: the spec in which the user takes the value.
        position: position of the operator in the program; for an output, the one after the value's operator.
        gradient: True if the user is an optimizer, or the cast of a gradient for it.
    """

    value: Value
    user: fx.Node | JointOutput
    phase: str
    target: Spec
    position: int
    gradient: bool


def value_uses(flow: Flow) -> Iterator[ValueUse]:
    """Return every use of a value in program order. An output is resharded as soon as its value exists."""

    def output_uses(value: Value, position: int) -> Iterator[ValueUse]:
        for output in flow.rules.outputs_of.get(value, ()):
            target, gradient = flow.output_spec(output), output.kind == "gradient"
            yield ValueUse(value, output, phase_of(output), target, position, gradient)

    # An input that is returned unchanged is an output without an operator.
    for source in flow.graph.inputs:
        yield from output_uses(Value(source.node), 0)
    for position, node in enumerate(flow.rules.operators):
        phase, gradient = flow.graph.phase(node), flow.rules.restores_dtype(node)
        for operand, value in enumerate(flow.rules.operands[node]):
            yield ValueUse(value, node, phase, flow.consumed_spec(node, operand), position, gradient)
        for index in range(len(flow.rules.calls[node].results)):
            yield from output_uses(Value(node, index), position + 1)


@dataclass(frozen=True, slots=True)
class StepReshard:
    """One reshard of the step.

    Attributes:
        key: key of the copy that it makes.
        value: the value that it copies.
        path: the steps, at least one.
        position: position of the operator that needs the copy first.
        phase: `"forward"` or `"backward"`.
        module: path of the module that it belongs to.
        gradient: True if it brings a gradient to its optimizer. Such reductions are joined into buckets.
    """

    key: str
    value: Value
    path: Path
    position: int
    phase: str
    module: str
    gradient: bool


class StepAccount:
    """Operators and reshards of a step, in program order.

    Args:
        flow: the graph and the decisions.
        tables: prices of strategies.
        resharder: finds the reshards.

    Attributes:
        reshards: the reshards in the order of first use; every copy is made once.
    """

    def __init__(self, flow: Flow, tables: StrategyTables, resharder: Resharder) -> None:
        self.flow = flow
        self.rules = flow.rules
        self.mesh = flow.mesh
        self.tables = tables
        self.resharder = resharder
        self.reshards = list(self._find_reshards())

    def _find_reshards(self) -> Iterator[StepReshard]:
        copies: set[str] = set()  # the program makes each copy once, for its first use
        for use in value_uses(self.flow):
            for key, source, spec in self.flow.reshards(use.value, use.phase, use.target):
                if key in copies:
                    continue
                copies.add(key)
                # Only the last reshard before the optimizer reduces a gradient; a shared copy before it does not.
                gradient = use.gradient and spec is use.target
                resharder = self.resharder.gradients if gradient else self.resharder
                path = resharder.path(use.value.meta.shape, use.value.meta.dtype.itemsize, source, spec)
                if path.steps:
                    node = use.user if isinstance(use.user, fx.Node) else use.value.node
                    module = "" if node.op == "placeholder" else self.flow.graph.module_path(node)
                    yield StepReshard(key, use.value, path, use.position, use.phase, module, gradient)

    @property
    def total_seconds(self) -> float:
        """Seconds of all operators and reshards, one after the other: the cost of the decisions."""
        return sum(map(self.seconds, self.rules.operators)) + sum(reshard.path.seconds for reshard in self.reshards)

    def collectives(self) -> tuple[Collective, ...]:
        """Return all collectives of the step, with equal ones counted."""
        cost, counts = self.tables.cost, Counter[tuple[str, int, int, str, str, bool]]()
        for reshard in self.reshards:
            for step in reshard.path.steps:
                if step.kind not in _LOCAL_STEPS:
                    counts[step.kind, step.axis, step.bytes, reshard.module, reshard.phase, reshard.gradient] += 1
        # Some strategies send data inside the local program of an operator, as ring attention does.
        for node in self.rules.operators:
            if not self._is_pinned(node):
                module, phase = self.flow.graph.module_path(node), self.flow.graph.phase(node)
                for kind, axis, size in self.tables.exchanges(self.rules.rules[node], self._choices(node)):
                    counts[kind, axis, size, module, phase, False] += 1
        return tuple(
            Collective(
                kind,
                self.mesh.names[axis],
                size,
                count,
                module,
                phase,
                (cost.gradient_collective if gradient else cost.collective)(kind, size, axis),
                gradient,
            )
            for (kind, axis, size, module, phase, gradient), count in counts.items()
        )

    def hideable(self, kind: HideableKind) -> Iterator[tuple[float, int]]:
        """Return seconds and moment, as in `Hideable`, of the reshards of a kind that compute may hide."""
        needs = self.rules.first_parameter_uses
        for reshard in self.reshards:
            if kind == "reductions" and reshard.gradient:
                yield reshard.path.seconds, reshard.position
            needed = needs.get((reshard.value.node, reshard.phase))
            if kind == "gathers" and not reshard.gradient and needed is not None:
                yield reshard.path.seconds, needed

    def gathered_parameters(self) -> Iterator[tuple[str, str]]:
        """Return all names of gathered parameters, with `"again"` if both halves gather them, or `"once"`."""
        phases: dict[fx.Node, set[str]] = defaultdict(set)
        for reshard in self.reshards:
            # A parameter may be cast before it is gathered.
            if not reshard.gradient and any(step.kind == "all_gather" for step in reshard.path.steps):
                phases[uncast(reshard.value.node)].add(reshard.phase)
        for source in self.flow.graph.parameters:
            if source.node in phases:
                how = "again" if len(phases[source.node]) > 1 else "once"
                yield from ((name, how) for name in self.flow.graph.aliases[source.name])

    def decisions(self) -> Iterator[Decision]:
        """Return the choice of every operator as text, with the seconds of its compute."""
        graph = self.flow.graph
        for node in self.rules.operators:
            pinned = self.rules.pin_spec(node, self.mesh)
            op = self.rules.calls[node].op
            text = f"pinned to {pinned}"
            if pinned is None:
                text = describe(self.rules.rules[node], self._choices(node), self.mesh)
            name = f"{op.namespace}.{op.overloadpacket.__name__}"
            seconds = self.compute_seconds(node)
            yield Decision(node.name, name, graph.module_path(node), graph.phase(node), text, seconds)

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of an operator: its compute, and the collectives inside its local program."""
        # A pin is the identity in the local program: only the reshard to it costs time.
        if self._is_pinned(node):
            return 0.0
        call, rule = self.rules.calls[node], self.rules.rules[node]
        return self.tables.strategy_seconds(call, rule, self._choices(node), self.rules.zeros[node])

    def compute_seconds(self, node: fx.Node) -> float:
        """Return the seconds of an operator's compute, without collectives."""
        if self._is_pinned(node) or node.target in HOST_COPIES:
            return 0.0
        # The tables keep the seconds of both; few operators have collectives inside.
        inner = self.tables.exchanges(self.rules.rules[node], self._choices(node))
        return self.seconds(node) - sum(self.tables.cost.collective(kind, size, axis) for kind, axis, size in inner)

    def _is_pinned(self, node: fx.Node) -> bool:
        return self.rules.pin_spec(node, self.mesh) is not None

    def _choices(self, node: fx.Node) -> tuple[int, ...]:
        return self.flow.decisions.choices[node.name]


class OperatorPrices(KernelPrices):
    """Prices at which a local program costs as much as in the search: as the operator that it replaces.

    Args:
        tables: the search's prices of strategies.
    """

    # Priced by kernels, an eager local program would cost more, and a compiled one less. Plans are compared by the
    # seconds that the search minimised.

    def __init__(self, tables: StrategyTables) -> None:
        super().__init__(tables.cost)
        self._tables = tables
        self._programs: dict[tuple[int, int, Choices, Sequence[bool]], tuple[object, float]] = {}

    def seconds(self, node: fx.Node) -> float:
        """Return the time of a call that is no collective."""
        stands_for = node.meta.get("stands_for")
        if stands_for is None:
            return super().seconds(node)
        if not stands_for:
            return 0.0
        # The first call of a local program has the time of all its calls.
        call, rule, choices, zeros = stands_for
        key = id(call), id(rule), choices, zeros
        known = self._programs.get(key)
        if known is None:
            # The entry keeps call and rule alive, so that no others get their ids.
            known = self._programs[key] = stands_for, self._tables.compute_seconds(*stands_for)
        return known[1]


class SharePrices(KernelPrices):
    """Prices of a program of equal shares for a rank with another share (Whale, 3.3.1).

    The time of an operator that computes with a share is proportional to it; others take as long as with equal shares.
    Calls that belong to no operator, such as copies and pieces, count as the longer of both.

    Args:
        flow: the graph and decisions of the program.
        cluster: the cluster; its `device` is the rank's.
        shared: the mesh axis whose ranks have shares, if there is one.
        share: the rank's share as a multiple of an equal share.
    """

    def __init__(self, flow: Flow, cluster: Cluster, shared: SharedAxis | None, share: float) -> None:
        self._equal = OperatorPrices(StrategyTables(CostModel(cluster, flow.mesh), shared))
        super().__init__(self._equal.cost)
        # A rank with a larger share is like a slower device with an equal share.
        cluster = replace(cluster, device=scaled_device(cluster.device, 1 / share))
        self._scaled = OperatorPrices(StrategyTables(CostModel(cluster, flow.mesh), shared))
        self._is_scaled = {node.name: _splits_share(flow, node, shared) for node in flow.rules.operators}
        self._is_scaled_by_default = share > 1

    def seconds(self, node: fx.Node) -> float:
        scaled = self._is_scaled.get(node.meta.get("key", ""), self._is_scaled_by_default)
        return (self._scaled if scaled else self._equal).seconds(node)


def _splits_share(flow: Flow, node: fx.Node, shared: SharedAxis | None) -> bool:
    """Return True if an operator computes with the rank's share of a dim."""
    if shared is None or flow.rules.pin_spec(node, flow.mesh) is not None:
        return False
    choice = flow.decisions.choices[node.name][shared.axis]
    return choice >= 0 and shared.is_of_whole(offered_factors(flow.rules.rules[node])[choice].size)


def timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """Return the step on a stream of compute and one of communication for each kind of link.

    The replay runs the calls of the program, with its copies, masks and local programs, joined reductions, and gathers
    that start early.
    """
    return replay([operation for operation, _ in step_calls(program, prices)])


def step_calls(program: PredictedProgram, prices: KernelPrices) -> list[tuple[Operation, fx.Node]]:
    """Return the operations of `timeline` and the nodes that issue them."""
    return issue_calls((program.forward.graph, program.backward.graph), prices.cost.mesh.names, prices)


def reduction_timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """Return the replay of the deferred reductions of gradients; no compute hides them."""
    graphs = () if program.unreduced is None else (program.unreduced.scheduled_graph(),)
    return replay(operations(graphs, prices.cost.mesh.names, prices))
