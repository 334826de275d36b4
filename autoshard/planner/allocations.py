"""What one device holds during a step, and when: the memory of its program, call by call."""

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
from autoshard.reshard.collective_schedule import KEEPS_INPUT
from autoshard.reshard.gathers import waits_of

_PERSISTENT_KINDS: dict[str, AllocationKind] = {"parameter": "parameter", "buffer": "buffer", "constant": "buffer"}
_PER_RUN_KINDS: frozenset[AllocationKind] = frozenset({"saved", "gathered", "communication", "temporary"})
"""What every run of a step that is under way has its own of, if it holds it from the forward to the backward half."""


def allocations(
    flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory, under_way: int = 1
) -> Iterator[Allocation]:
    """What one device holds and when, in positions of the program; the last moment is the optimizer's step.

    At a moment stands what is held while an operator runs and what belongs to it (reshards of its operands, temporaries
    of its local program), when that is most. What is assumed of the training loop: gradients are set to None before the
    forward; inputs are held to the end of the step, outputs too; the optimizer made its state in an earlier step.

    Args:
        flow: the graph and the decisions.
        program: that they stand for.
        optimizer: what it holds.
        under_way: runs of the step that are under way at once: what the others save is held until the optimizer's step.
    """
    holdings = _ProgramMemory(flow, program, optimizer)
    for one in holdings.run():
        yield one
        if under_way > 1 and one.kind in _PER_RUN_KINDS and one.start < holdings.border < one.end:
            yield replace(one, bytes=(under_way - 1) * one.bytes, start=0, end=holdings.end - 1)


class _ProgramMemory:
    """Lives of all memory in one program."""

    def __init__(self, flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory) -> None:
        self.graph = flow.graph
        self.operators = flow.rules.operators
        self.program = program
        self.optimizer = optimizer
        self.end = len(self.operators) + 1
        self.border = sum(self.graph.phase(node) == "forward" for node in self.operators)  # where backward begins
        self.order: list[fx.Node] = []  # every call of the step
        self.forward = 0  # how many of them are the forward half's
        self.first_call: dict[fx.Node, int] = {}  # root -> the call that makes it
        self.last_call: dict[fx.Node, int] = {}  # root -> the last call that reads it or a view of it

    def run(self) -> Iterator[Allocation]:
        yield from self._persistent_allocations()
        self._find_lifetimes()
        lives = [(root, self._bytes(root), start, self.last_call[root] + 1) for root, start in self.first_call.items()]
        places, moments = self._moments([(held, start, end) for _, held, start, end in lives])
        gradients = {
            storage_root(node): name for (kind, name), node in self.program.outputs.items() if kind == "gradient"
        }
        for root, held, start, end in lives:
            first, last = bisect.bisect_left(moments, start), bisect.bisect_left(moments, end)
            if held and first < last:
                begin = places[first]
                until = self.end if end > len(self.order) else places[last - 1] + 1
                name = gradients[root] if root in gradients else self._name(root)
                yield Allocation(name, held, begin, until, self._kind(root, end, gradients))

    def _name(self, root: fx.Node) -> str:
        """The path of the module that asks for it, and the value or copy that it is, or is made for."""
        place = min(root.meta["position"], len(self.operators) - 1)
        module = self.graph.module_path(self.operators[place]) if self.operators else ""
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
            yield Allocation(source.name, held, 0, self.end, _PERSISTENT_KINDS.get(source.kind, "input"))
            if source.kind == "parameter" and source.name in trained:
                shape = Value(source.node).meta.shape
                state = self.optimizer.state_bytes(shape, tuple(val.shape), val.element_size())
                yield Allocation(source.name, state, 0, self.end, "optimizer")
                states.append(held)
        yield Allocation("optimizer's step", self.optimizer.step_bytes(states), self.end - 1, self.end, "temporary")

    def _find_lifetimes(self) -> None:
        """Births and last uses, in numbers of calls; a collective uses its input until it is awaited."""
        program = self.program
        forward = [node for node in program.forward.graph.nodes if node.op == "call_function"]
        backward = [node for node in program.backward.graph.nodes if node.op == "call_function"]
        self.order, self.forward = forward + backward, len(forward)
        roots: dict[fx.Node, fx.Node] = {}

        def root(node: fx.Node) -> fx.Node:
            if node not in roots:
                own = storage_root(node)
                roots[node] = root(program.backward.saved[own]) if own in program.backward.saved else own
            return roots[node]

        for time, node in enumerate(self.order):
            for source in node.all_input_nodes:
                held = root(source)
                if held in self.first_call:
                    self.last_call[held] = time
            if root(node) is node:
                self.first_call[node] = self.last_call[node] = time
                if node.target is operator.getitem:  # made with the other results
                    self.first_call[node] = self.first_call[node.all_input_nodes[0]]
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

    def _moments(self, lives: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        """The positions at which something runs, and for each the call of it at which most is held."""
        changes = [0] * (len(self.order) + 2)
        for held, start, end in lives:
            changes[start] += held
            changes[end] -= held
        at = list(accumulate(changes))
        best: dict[int, int] = {}
        position = 0
        for time, node in enumerate(self.order):
            position = max(position, node.meta["position"])
            if position not in best or at[time] > at[best[position]]:
                best[position] = time
        best[self.end - 1] = len(self.order)
        return list(best), list(best.values())

    @staticmethod
    def _bytes(root: fx.Node) -> int:
        """Bytes that a call allocates; of one with several results, those of the results that nothing takes."""
        val = root.meta["val"]
        if isinstance(val, torch.Tensor):
            return val.untyped_storage().nbytes()
        if makes_view(root.target):
            return 0
        taken = {user.args[1] for user in root.users}
        unused = (one for index, one in enumerate(val) if isinstance(one, torch.Tensor) and index not in taken)
        return sum(one.untyped_storage().nbytes() for one in unused)
