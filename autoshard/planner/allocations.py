"""Allocations of one device during a step: the memory of its program, call by call."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import fx

from autoshard.memory.footprint import Allocation, AllocationKind
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import Value
from autoshard.program.aliasing import makes_view, storage_root
from autoshard.program.predicted_program import PredictedProgram
from autoshard.reshard.collective_schedule import KEEPS_INPUT, waits_of

_PERSISTENT_KINDS: dict[str, AllocationKind] = {"parameter": "parameter", "buffer": "buffer", "constant": "buffer"}
# If such an allocation lives from the forward to the backward half, every run of a step that is under way has its own.
_PER_RUN_KINDS: frozenset[AllocationKind] = frozenset({"saved", "gathered", "communication", "temporary"})


def allocations(
    flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory, under_way: int = 1
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
    """
    memory = _ProgramMemory(flow, program, optimizer)
    for allocation in memory.run():
        yield allocation
        if under_way > 1 and allocation.kind in _PER_RUN_KINDS and allocation.start < memory.border < allocation.end:
            yield replace(allocation, bytes=(under_way - 1) * allocation.bytes, start=0, end=memory.end - 1)


class _ProgramMemory:
    """Lifetimes of all memory of one program."""

    def __init__(self, flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory) -> None:
        self.graph = flow.graph
        self.operators = flow.rules.operators
        self.program = program
        self.optimizer = optimizer
        self.end = len(self.operators) + 1
        self.border = sum(self.graph.phase(node) == "forward" for node in self.operators)  # where backward begins
        self.order: list[fx.Node] = []  # every call of the step
        self.forward = 0  # the number of calls of the forward half
        # By the node that allocates a storage, its root.
        self.first_call: dict[fx.Node, int] = {}  # the call that allocates it
        self.last_call: dict[fx.Node, int] = {}  # the last call that reads it or a view of it

    def run(self) -> Iterator[Allocation]:
        yield from self._persistent_allocations()
        self._find_lifetimes()
        lives = [(root, self._bytes(root), start, self.last_call[root] + 1) for root, start in self.first_call.items()]
        positions, calls = self._peak_calls([(held, start, end) for _, held, start, end in lives])
        gradients = {
            storage_root(node): name for (kind, name), node in self.program.outputs.items() if kind == "gradient"
        }
        for root, held, start, end in lives:
            first, last = bisect.bisect_left(calls, start), bisect.bisect_left(calls, end)
            if held and first < last:
                until = self.end if end > len(self.order) else positions[last - 1] + 1
                name = gradients[root] if root in gradients else self._name(root)
                yield Allocation(name, held, positions[first], until, self._kind(root, end, gradients))

    def _name(self, root: fx.Node) -> str:
        """Return the path of the module, and the key of the value or copy that the memory is for."""
        position = min(root.meta["position"], len(self.operators) - 1)
        module = self.graph.module_path(self.operators[position]) if self.operators else ""
        return f"{module}: {root.meta['key']}" if module else root.meta["key"]

    def _kind(self, root: fx.Node, end: int, gradients: dict[fx.Node, str]) -> AllocationKind:
        if root in gradients:
            return "gradient"
        kind: AllocationKind = root.meta["kind"]
        saved = self.first_call[root] < self.forward < end
        return "saved" if saved and kind != "gathered" else kind

    def _persistent_allocations(self) -> Iterator[Allocation]:
        trained = {output.name for output in self.graph.outputs if output.kind == "gradient" and output.node}
        states = []
        for source in self.graph.inputs:
            if source.kind == "tangent":
                continue
            val: torch.Tensor = self.program.inputs[source.node.name].meta["val"]
            held = val.untyped_storage().nbytes()
            # Parameters, buffers and inputs are held for the whole step.
            yield Allocation(source.name, held, 0, self.end, _PERSISTENT_KINDS.get(source.kind, "input"))
            if source.kind == "parameter" and source.name in trained:
                shape = Value(source.node).meta.shape
                state = self.optimizer.state_bytes(shape, tuple(val.shape), val.element_size())
                yield Allocation(source.name, state, 0, self.end, "optimizer")
                states.append(held)
        yield Allocation("optimizer's step", self.optimizer.step_bytes(states), self.end - 1, self.end, "temporary")

    def _find_lifetimes(self) -> None:
        """Find the first and the last call of every root, as numbers of calls."""
        program = self.program
        forward = [node for node in program.forward.graph.nodes if node.op == "call_function"]
        backward = [node for node in program.backward.graph.nodes if node.op == "call_function"]
        self.order, self.forward = forward + backward, len(forward)
        roots: dict[fx.Node, fx.Node] = {}

        def root(node: fx.Node) -> fx.Node:
            if node not in roots:
                allocating = storage_root(node)
                saved = program.backward.saved.get(allocating)
                roots[node] = allocating if saved is None else root(saved)
            return roots[node]

        for time, node in enumerate(self.order):
            for source in node.all_input_nodes:
                held = root(source)
                if held in self.first_call:
                    self.last_call[held] = time
            if root(node) is node:
                self.first_call[node] = self.last_call[node] = time
                if node.target is operator.getitem:  # allocated with the other results of its operator
                    self.first_call[node] = self.first_call[node.all_input_nodes[0]]
        # A collective reads its input until it is awaited.
        times = {node: time for time, node in enumerate(self.order)}
        for node in self.order:
            if node.target in KEEPS_INPUT:
                until = min((times[wait] for wait in waits_of(node)), default=times[node])
                for held in {root(source) for source in node.all_input_nodes} & self.first_call.keys():
                    self.last_call[held] = max(self.last_call[held], until)
        for node in program.backward.saved.values():
            if root(node) in self.first_call:
                self.last_call[root(node)] = max(self.last_call[root(node)], self.forward)
        for node in program.outputs.values():
            if root(node) in self.first_call:
                self.last_call[root(node)] = len(self.order)  # held while the optimizer steps

    def _peak_calls(self, lives: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        """Return the positions at which calls run, and for each position the call at which most is held."""
        changes = [0] * (len(self.order) + 2)
        for held, start, end in lives:
            changes[start] += held
            changes[end] -= held
        held_at = list(accumulate(changes))
        best: dict[int, int] = {}
        position = 0
        for time, node in enumerate(self.order):
            position = max(position, node.meta["position"])
            if position not in best or held_at[time] > held_at[best[position]]:
                best[position] = time
        best[self.end - 1] = len(self.order)
        return list(best), list(best.values())

    @staticmethod
    def _bytes(root: fx.Node) -> int:
        """Return the bytes that a call allocates; of several results, those of the results that nothing reads."""
        val = root.meta["val"]
        if isinstance(val, torch.Tensor):
            return val.untyped_storage().nbytes()
        if makes_view(root.target):
            return 0
        # A result that is read has a root of its own: the `getitem` that reads it.
        read = {user.args[1] for user in root.users}
        unread = (result for index, result in enumerate(val) if isinstance(result, torch.Tensor) and index not in read)
        return sum(result.untyped_storage().nbytes() for result in unread)
