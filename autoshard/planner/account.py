"""What a step does under some decisions: its operations in order, its collectives, and what is alive when."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autoshard.memory.footprint import Allocation, Kind, Memory
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph import Use, Value, operand_nodes, value_of
from autoshard.patterns.strategy import describe
from autoshard.plan import Collective, Decision
from autoshard.planner.options import OptionTables
from autoshard.reshard.path import Path, Resharder
from autoshard.simulate.events import Operation, Timeline, replay
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class Leg:
    """One reshard of the step: the copy `key` of a value, made when operator number `position` asks for it."""

    key: str
    value: Value
    path: Path
    position: int
    phase: str
    module: str


class Account:
    """The step that some decisions stand for, walked once in program order.

    Attributes:
        legs: the reshards, in the order in which they are asked for; every copy is made once.
    """

    def __init__(self, flow: Flow, tables: OptionTables, resharder: Resharder, state_bytes: float) -> None:
        self.flow = flow
        self.rules = flow.rules
        self.mesh = flow.mesh
        self.tables = tables
        self.resharder = resharder
        self.state_bytes = state_bytes
        self.position = {node: position for position, node in enumerate(self.rules.operators)}
        self.legs: list[Leg] = []
        self.last_use: dict[str, int] = {}  # key of a value or copy -> last position at which it is read
        self._last_reads: dict[str, int] = {}
        self._walk()

    def _walk(self) -> None:
        graph, seen = self.flow.graph, set()
        for node, value, phase, target in self._wants():
            position = len(self.rules.operators) if node is None else self.position[node]
            key = value.name
            for copy, source, spec in self.flow.legs(value, phase, target):
                self.last_use[key] = max(self.last_use.get(key, 0), position)
                if copy not in seen:
                    seen.add(copy)
                    meta = value.meta
                    path = self.resharder.path(meta.shape, meta.dtype.itemsize, source, spec)
                    where = value.node if node is None else node
                    module = "" if where.op == "placeholder" else graph.module_path(where)
                    self.legs.append(Leg(copy, value, path, position, phase, module))
                key = copy
            self.last_use[key] = max(self.last_use.get(key, 0), position)

    def _wants(self) -> Iterator[tuple[fx.Node | None, Value, str, Spec]]:
        """Every use in program order: (operator or None for an output, value, phase, spec)."""
        for node in self.rules.operators:
            for operand, source in enumerate(operand_nodes(node)):
                yield node, value_of(source), self.flow.graph.phase(node), self.flow.wanted(node, operand)
        for output in self.flow.graph.outputs:
            if output.node is not None:
                yield None, value_of(output.node), phase_of(output), self.flow.delivered(output)

    # Collectives

    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of the step, equal ones counted."""
        counts: Counter[tuple[str, int, int, str, str]] = Counter()
        for leg in self.legs:
            for step in leg.path.steps:
                if step.kind not in _LOCAL_STEPS:
                    counts[step.kind, step.axis, step.bytes, leg.module, leg.phase] += 1
        for node in self.rules.operators:
            if not self._pinned(node):
                for kind, axis, size in self.tables.exchanges(self.rules.rules[node], self._choices(node)):
                    counts[kind, axis, size, self.flow.graph.module_path(node), self.flow.graph.phase(node)] += 1
        price = self.tables.cost.collective
        return tuple(
            Collective(kind, self.mesh.names[axis], size, count, module, phase, price(kind, size, axis))
            for (kind, axis, size, module, phase), count in counts.items()
        )

    def _pinned(self, node: fx.Node) -> bool:
        return self.rules.pinned(node, self.mesh) is not None

    def _choices(self, node: fx.Node) -> tuple[int, ...]:
        return self.flow.decisions.choices[node.name]

    def decisions(self) -> Iterator[Decision]:
        """The choice made for every operator, for people."""
        graph = self.flow.graph
        for node in self.rules.operators:
            pinned = self.rules.pinned(node, self.mesh)
            rule, call = self.rules.rules[node], self.rules.calls[node]
            if pinned is not None:
                text, seconds = f"pinned to {pinned}", 0.0
            else:
                text = describe(rule, self._choices(node), self.mesh)
                seconds = self.tables.strategy_seconds(call, rule, self._choices(node))
            name = f"{call.op.namespace}.{call.op.overloadpacket.__name__}"
            yield Decision(node.name, name, graph.module_path(node), graph.phase(node), text, seconds)

    # Time

    def timeline(self) -> Timeline:
        """The step on two streams: compute in program order, collectives as soon as their data is there."""
        operations: list[Operation] = []
        made: dict[str, int] = {}
        waiting: dict[int, list[Leg]] = {}
        for leg in self.legs:
            waiting.setdefault(leg.position, []).append(leg)
        for position, node in enumerate((*self.rules.operators, None)):
            for leg in waiting.get(position, ()):
                self._replay_leg(leg, operations, made)
            if node is not None:
                self._replay_operator(node, operations, made)
        return replay(operations)

    def _replay_leg(self, leg: Leg, operations: list[Operation], made: dict[str, int]) -> None:
        before = made.get(leg.key.split(" -> ")[0], made.get(leg.value.node.name))
        for step in leg.path.steps:
            stream = "compute" if step.kind in _LOCAL_STEPS else "communication"
            needs = () if before is None else (before,)
            operations.append(Operation(f"{step.kind} {leg.key}", stream, step.seconds, needs))
            before = len(operations) - 1
        if before is not None:
            made[leg.key] = before

    def _replay_operator(self, node: fx.Node, operations: list[Operation], made: dict[str, int]) -> None:
        needs = set()
        for operand, source in enumerate(operand_nodes(node)):
            value = value_of(source)
            key = value.name
            for copy, _, _ in self.flow.legs(value, self.flow.graph.phase(node), self.flow.wanted(node, operand)):
                key = copy
            before = made.get(key, made.get(value.node.name))
            if before is not None:
                needs.add(before)
        rule, call = self.rules.rules[node], self.rules.calls[node]
        if self._pinned(node):
            seconds = 0.0
        else:
            seconds = self.tables.strategy_seconds(call, rule, self._choices(node))
        operations.append(Operation(node.name, "compute", seconds, tuple(sorted(needs))))
        made[node.name] = len(operations) - 1

    # Memory

    def memory(self) -> Memory:
        """Bytes per device of the step: at rest, saved, and at the peak."""
        return Memory.of(list(self.allocations()))

    def allocations(self) -> Iterator[Allocation]:
        """What one device holds and when, in positions of the program."""
        end = len(self.rules.operators) + 1
        training = any(output.kind == "gradient" for output in self.flow.graph.outputs)
        trained = {
            output.name for output in self.flow.graph.outputs if output.kind == "gradient" and output.node is not None
        }
        for source in self.flow.graph.inputs:
            value = Value(source.node)
            held = self._bytes(value, self.flow.produced(value))
            kinds: dict[str, Kind] = {"parameter": "parameter", "buffer": "buffer", "constant": "buffer"}
            yield Allocation(source.name, held, 0, end, kinds.get(source.kind, "temporary"))
            if training and source.kind == "parameter" and source.name in trained:
                elements = held // value.meta.dtype.itemsize
                yield Allocation(source.name, int(elements * self.state_bytes), 0, end, "optimizer")
        yield from self._made(end)
        yield from self._copies(end)

    def _made(self, end: int) -> Iterator[Allocation]:
        """Results of operators; a gradient that is handed over as it was made is a gradient from then on."""
        handed = {
            value_of(output.node): output
            for output in self.flow.graph.outputs
            if output.kind == "gradient" and output.node is not None
        }
        for node in self.rules.operators:
            if self.rules.rules[node].free:
                continue
            for index, meta in enumerate(self.rules.calls[node].results):
                if meta is None:
                    continue
                value = Value(node, index)
                spec, start = self.flow.produced(value), self.position[node]
                output = handed.get(value)
                if (
                    output is not None
                    and self.flow.delivered(output) is spec
                    and self.flow.hub(value, "backward") is None
                ):
                    yield Allocation(value.name, self._bytes(value, spec), start, end, "gradient")
                else:
                    last = self._last_read(value, value.name)
                    yield Allocation(value.name, self._bytes(value, spec), start, last + 1, "activation")

    def _copies(self, end: int) -> Iterator[Allocation]:
        gradients = {value_of(o.node) for o in self.flow.graph.outputs if o.kind == "gradient" and o.node is not None}
        for leg in self.legs:
            if not leg.path.steps:
                continue
            held = self._bytes(leg.value, leg.path.target)
            last = self._last_read(leg.value, leg.key)
            if leg.value in gradients and last == len(self.rules.operators):
                yield Allocation(leg.key, held, leg.position, end, "gradient")
            else:
                kind: Kind = "gathered" if leg.value.node.op == "placeholder" else "activation"
                yield Allocation(leg.key, held, leg.position, max(last, leg.position) + 1, kind)

    def _last_read(self, value: Value, key: str) -> int:
        """Last position at which a tensor or a view of it is read."""
        if key not in self._last_reads:
            last = self.last_use.get(key, self.position.get(value.node, 0))
            if key == value.name:
                for use in self.rules.uses.get(value, ()):
                    if self.rules.rules[use.node].free and self._unmoved(value, use):
                        views = (Value(use.node, index) for index in range(len(self.rules.calls[use.node].results)))
                        last = max(last, *(self._last_read(view, view.name) for view in views))
            self._last_reads[key] = last
        return self._last_reads[key]

    def _unmoved(self, value: Value, use: Use) -> bool:
        return self.flow.wanted(use.node, use.operand) is self.flow.produced(value)

    def _bytes(self, value: Value, spec: Spec) -> int:
        meta = value.meta
        return math.prod(local_shape(meta.shape, spec, self.mesh)) * meta.dtype.itemsize


_LOCAL_STEPS = ("slice", "make_partial")
