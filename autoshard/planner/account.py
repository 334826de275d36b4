"""The cost of a step under some decisions: its operators and collectives, its seconds, and the memory of a device.

`StepAccount` lists operators and reshards as the search counts them. Seconds and memory are those of the program that
the decisions lead to: its replay on streams (`timeline`), and the lifetimes of what its calls allocate (`allocations`).
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autoshard.capture.host_copies import HOST_COPIES, HOST_TENSORS
from autoshard.capture.joint import JointOutput
from autoshard.capture.operators import WORKSPACES
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.worker_shares import scaled_device
from autoshard.memory.footprint import Allocation, AllocationKind
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import Value, uncast
from autoshard.patterns.strategy import Choices, describe, offered_factors
from autoshard.planner.planning_problem import HideableKind
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.plans.plan_data import Collective, Decision
from autoshard.program.aliasing import makes_view, storage_root, view_source
from autoshard.program.fusion import FusedResults, maker, may_be_written_over, writes_over
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import KernelPrices, bytes_of, issue_calls, operations
from autoshard.reshard.collective_schedule import KEEPS_INPUT, waits_of
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

    # An input that is handed back unchanged is an output without an operator.
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
        reshards: the reshards in the order of their first use; every copy is made once.
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
                # Only the last reshard before the optimizer is a gradient's reduction; a shared copy before it is not.
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
        """Return the seconds of an operator's compute alone."""
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
    """Prices at which a local program costs as much as the search assumes: as the operator that it stands for.

    Args:
        tables: the search's prices of strategies.
    """

    # Kernel by kernel, an eager local program would cost more, and a compiled one less. Plans are compared by the
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

    An operator that computes with a share takes as many times as long as the share is larger; others take as long as
    with equal shares. Calls that belong to no operator, such as copies and pieces, count as the longer of both.

    Args:
        flow: the graph and the decisions that the program is made of.
        cluster: the cluster; its `device` is the rank's.
        shared: the mesh axis whose ranks have shares, if there is one.
        share: the rank's share as a multiple of an equal one.
    """

    def __init__(self, flow: Flow, cluster: Cluster, shared: SharedAxis | None, share: float) -> None:
        self._equal = OperatorPrices(StrategyTables(CostModel(cluster, flow.mesh), shared))
        super().__init__(self._equal.cost)
        # A rank with a larger share computes as a slower device with an equal one does.
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

    The replay runs the calls of the program itself, with its copies, masks and local programs, its joined reductions,
    and gathers that are started ahead.
    """
    return replay([operation for operation, _ in step_calls(program, prices)])


def step_calls(program: PredictedProgram, prices: KernelPrices) -> list[tuple[Operation, fx.Node]]:
    """Return the operations of `timeline` and the nodes that issue them."""
    return issue_calls((program.forward.graph, program.backward.graph), prices.cost.mesh.names, prices)


def reduction_timeline(program: PredictedProgram, prices: KernelPrices) -> Timeline:
    """Return the reductions of gradients that the backward half leaves unreduced; no compute hides them."""
    graphs = () if program.unreduced is None else (program.unreduced.scheduled_graph(),)
    return replay(operations(graphs, prices.cost.mesh.names, prices))


_PERSISTENT_KINDS: dict[str, AllocationKind] = {"parameter": "parameter", "buffer": "buffer", "constant": "buffer"}
# If such an allocation lives from the forward to the backward half, every run of a step that is under way has its own.
_PER_RUN_KINDS: frozenset[AllocationKind] = frozenset({"output", "saved", "gathered", "communication", "temporary"})


def allocations(
    flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory, under_way: int = 1, holds_sums: bool = False
) -> Iterator[Allocation]:
    """Return the allocations of one device, in positions of the program; the last moment is the optimizer's step.

    A moment is the call at which most is held, of an operator and the calls that belong to it: reshards of its
    operands, temporaries of its local program. The training loop is assumed to set gradients to None before the
    forward, to hold inputs and outputs to the end of the step, and to have optimizer state from an earlier step.

    Args:
        flow: the graph and the decisions.
        program: their program.
        optimizer: the memory of the optimizer.
        under_way: runs of the step that are under way at once, each of which holds its saved tensors.
        holds_sums: True if the sums of earlier runs' gradients are held through the run, each as large as the gradient.
    """
    memory = _ProgramMemory(flow, program, optimizer)
    if holds_sums:
        yield from memory.sums_before()
    for allocation in memory.run():
        yield allocation
        if under_way > 1 and allocation.kind in _PER_RUN_KINDS and allocation.start < memory.border < allocation.end:
            yield allocation._replace(bytes=(under_way - 1) * allocation.bytes, start=0, end=memory.end - 1)


def host_bytes(flow: Flow, program: PredictedProgram) -> dict[str, int]:
    """Return the bytes that a run of a program keeps on the host of one device between its halves, by module."""
    # They are there at once when the backward half begins.
    modules = {node.name: flow.graph.module_path(node) for node in flow.rules.operators}
    held = Counter[str]()
    for node in program.forward.graph.nodes:
        if node.target in HOST_TENSORS:
            held[modules[node.meta["key"]]] += bytes_of(node.meta["val"])
    return dict(held)


def _owner(name: str) -> str:
    """Return the path of the module that has a parameter or buffer."""
    return name.rpartition(".")[0]


class _ProgramMemory:
    """Lifetimes of all memory of one program, arguments as for `allocations`."""

    def __init__(self, flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory) -> None:
        self.graph = flow.graph
        self.hosted = flow.decisions.hosted
        self.operators = flow.rules.operators
        self.program = program
        self.optimizer = optimizer
        self.end = len(self.operators) + 1
        self.border = sum(self.graph.phase(node) == "forward" for node in self.operators)  # where backward begins
        self.order: list[fx.Node] = []  # every call of the step
        self.times: dict[fx.Node, int] = {}  # call -> its place in the order
        self._sizes: dict[int, int] = {}  # identity of a fake tensor -> its bytes
        self.forward = 0  # the number of calls of the forward half
        self.returned: set[fx.Node] = set()  # the roots of outputs
        # By the node that allocates a storage, its root.
        self.first_call: dict[fx.Node, int] = {}  # the call that allocates it
        self.last_call: dict[fx.Node, int] = {}  # the last call that reads it or a view of it

    def run(self) -> Iterator[Allocation]:
        yield from self._persistent_allocations()
        self._find_lifetimes()
        lives = [(root, self._bytes(root), start, self.last_call[root] + 1) for root, start in self.first_call.items()]
        # What an operator allocates and frees inside.
        for node in self._calls_of(WORKSPACES):
            held = WORKSPACES[node.target](*fx.map_arg(node.args, lambda source: source.meta["val"]))
            lives.append((node, held, self.times[node], self.times[node] + 1))
        positions, calls = self._peak_calls(lives)
        gradients = {
            storage_root(node): name for (kind, name), node in self.program.outputs.items() if kind == "gradient"
        }
        for root, held, start, end in lives:
            # Memory that no position's peak call sees is left out: at that position, more is held at another call.
            first, last = bisect.bisect_left(calls, start), bisect.bisect_left(calls, end)
            if held and first < last:
                until = self.end if end > len(self.order) else positions[last - 1] + 1
                module = self._module(root)
                # A value or copy is named by its module and its key.
                name = f"{module}: {root.meta['key']}" if module else root.meta["key"]
                if root in gradients:
                    name, module = gradients[root], _owner(gradients[root])
                yield Allocation(name, held, positions[first], until, self._kind(root, end, gradients), module)

    def sums_before(self) -> Iterator[Allocation]:
        """Yield the sums of the gradients of parameters that earlier runs made, until the last reduction."""
        parameters = {source.name for source in self.graph.parameters}
        gradients = [(name, node) for (kind, name), node in self.program.outputs.items() if kind == "gradient"]
        gradients = [(name, node) for name, node in gradients if name in parameters]
        before = 0
        for name, node in sorted(gradients, key=lambda pair: pair[1].meta["position"]):
            size, position = node.meta["val"].nbytes, min(node.meta["position"], self.end - 2)
            yield Allocation(f"sum of {name}", size, 0, self.end - 1, "gradient")
            # The last run adds out of place, and frees the sums to which it has added.
            yield Allocation(f"new sum of {name}", max(0, size - before), position, position + 1, "temporary")
            before += size

    def _module(self, root: fx.Node) -> str:
        """Return the path of the module that allocates the memory."""
        position = min(root.meta["position"], len(self.operators) - 1)
        return self.graph.module_path(self.operators[position]) if self.operators else ""

    def _kind(self, root: fx.Node, end: int, gradients: dict[fx.Node, str]) -> AllocationKind:
        if root in gradients:
            return "gradient"
        if root in self.returned:
            return "output"
        kind: AllocationKind = root.meta["kind"]
        # A gathered copy keeps its kind, which says why it is there, also where backward reads it.
        saved = self.first_call[root] < self.forward < end
        return "saved" if saved and kind != "gathered" else kind

    def _persistent_allocations(self) -> Iterator[Allocation]:
        trained = self.graph.gradients
        states = []
        for source in self.graph.inputs:
            if source.kind == "tangent":
                continue
            val: torch.Tensor = self.program.inputs[source.node.name].meta["val"]
            held = val.untyped_storage().nbytes()
            # Parameters, buffers and inputs are held for the whole step.
            kind = _PERSISTENT_KINDS.get(source.kind, "input")
            # Names of inputs are paths in the arguments, and no module's.
            module = "" if kind == "input" else _owner(source.name)
            yield Allocation(source.name, held, 0, self.end, kind, module)
            # State on the host, and its temporaries there, take nothing of the device.
            hosted = source.node.name in self.hosted
            if source.kind == "parameter" and source.name in trained and not hosted:
                shape = Value(source.node).meta.shape
                state = self.optimizer.state_bytes(shape, tuple(val.shape), val.element_size())
                yield Allocation(source.name, state, 0, self.end, "optimizer", module)
                states.append(held)
        yield Allocation("optimizer's step", self.optimizer.step_bytes(states), self.end - 1, self.end, "temporary")

    def _find_lifetimes(self) -> None:
        """Find the first and the last call of every root, as numbers of calls."""
        program, first_call, last_call = self.program, self.first_call, self.last_call
        roots: dict[fx.Node, fx.Node] = {}  # in the order of the program, those of all operands are known
        for half in (program.forward, program.backward):
            self.forward = len(self.order)
            fused = FusedResults(half.graph) if program.compiled else None
            for node in half.graph.nodes:
                if node.op == "placeholder":
                    roots[node] = roots[half.saved[node]] if node in half.saved else node
                elif node.op == "call_function":
                    time = len(self.order)
                    self.order.append(node)
                    viewed = view_source(node)
                    roots[node] = node if viewed is None else roots[viewed]
                    # What computes it reads these, whenever that is.
                    if fused is not None and node in fused.unmade:
                        continue
                    read = node.all_input_nodes if fused is None else fused.read_by(node)
                    for held in {roots[source] for source in read} & first_call.keys():
                        last_call[held] = time
                    # What lies on the host takes nothing of the device.
                    if viewed is None and node.target not in HOST_TENSORS:
                        first_call[node] = last_call[node] = time
                        if node.target is operator.getitem:  # allocated with the other results of its operator
                            first_call[node] = first_call[node.all_input_nodes[0]]
        self.times = times = {node: time for time, node in enumerate(self.order)}
        # A collective reads its input until it is awaited.
        for node in self._calls_of(KEEPS_INPUT):
            until = min((times[wait] for wait in waits_of(node)), default=times[node])
            for held in {roots[source] for source in node.all_input_nodes} & first_call.keys():
                last_call[held] = max(last_call[held], until)
        # Backward starts with what forward saved, even what it drops unread. Compiled code with dynamic sizes frees it
        # at its end.
        until = len(self.order) - 1 if program.compiled and self.graph.dynamic is not None else self.forward
        for node in program.backward.saved.values():
            if roots[node] in first_call:
                last_call[roots[node]] = max(last_call[roots[node]], until)
        former = self.graph.former_values
        for (kind, name), node in program.outputs.items():
            root = roots[node]
            if root in first_call:
                if kind == "output":
                    self.returned.add(root)
                # Outputs are held while the optimizer steps. New values are copied to their tensors behind forward; the
                # former ones, which backward may need, are as large.
                is_copied = kind == "mutation" and name not in former
                until = self.forward - 1 if is_copied else len(self.order)
                last_call[root] = max(last_call[root], until)
        if program.compiled:
            self._write_over()

    def _write_over(self) -> None:
        """Have kernels of a compiled program write their results over what they read last."""
        read_last: dict[int, list[fx.Node]] = defaultdict(list)
        for root, time in self.last_call.items():
            if may_be_written_over(root):
                read_last[time].append(root)
        for node in self.first_call:
            call = maker(node)
            if not writes_over(call):
                continue
            time, size = self.times[call], self._bytes(node)
            for source in read_last[time]:
                # What the other half made is an argument, which stays.
                if source.graph is node.graph and self._bytes(source) == size and self.first_call[source] < time:
                    self.last_call[source] = time - 1
                    read_last[time].remove(source)
                    break

    def _peak_calls(self, lives: list[tuple[fx.Node, int, int, int]]) -> tuple[list[int], list[int]]:
        """Return the positions at which calls run, and for each position the call at which most is held."""
        changes = [0] * (len(self.order) + 2)  # one moment more, for the optimizer's step, and one end behind it
        for _, held, start, end in lives:
            changes[start] += held
            changes[end] -= held
        held_at = list(accumulate(changes))
        positions, calls, most, last = [], [], -1, -1
        for time, node in enumerate(self.order):
            # Positions must rise with the calls, for `bisect`: a call that was moved counts to the operator there.
            position, held = node.meta["position"], held_at[time]
            if position > last:
                positions.append(position)
                calls.append(time)
                last, most = position, held
            elif held > most:
                calls[-1], most = time, held
        if last == self.end - 1:
            calls[-1] = len(self.order)
        else:
            positions.append(self.end - 1)
            calls.append(len(self.order))
        return positions, calls

    def _calls_of(self, targets: Collection[Any]) -> list[fx.Node]:
        """Return the calls of some operators, in order."""
        halves = self.program.forward, self.program.backward
        calls = (half.graph.find_nodes(op="call_function", target=target) for half in halves for target in targets)
        return sorted(itertools.chain.from_iterable(calls), key=self.times.__getitem__)

    def _bytes(self, root: fx.Node) -> int:
        """Return the bytes that a call allocates; of several results, those of the results that nothing reads."""
        val = root.meta["val"]
        if isinstance(val, torch.Tensor):
            # Equal calls share the fake tensor of their result.
            held = self._sizes.get(id(val))
            if held is None:
                held = self._sizes[id(val)] = val.untyped_storage().nbytes()
            return held
        if makes_view(root.target):
            return 0
        # A result that is read has a root of its own: the `getitem` that reads it.
        read = {user.args[1] for user in root.users}
        unread = (result for index, result in enumerate(val) if isinstance(result, torch.Tensor) and index not in read)
        return sum(result.untyped_storage().nbytes() for result in unread)
