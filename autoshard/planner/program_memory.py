"""The memory of a device in a step: the lifetimes of the allocations of a program's calls."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autoshard.capture.host_copies import HOST_TENSORS
from autoshard.memory.footprint import Allocation, AllocationKind
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.operator_library import WORKSPACES
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import Value
from autoshard.program.aliasing import makes_view, storage_root, view_source
from autoshard.program.fusion import FusedResults, maker, may_be_written_over, writes_over
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import bytes_of
from autoshard.reshard.collective_schedule import KEEPS_INPUT, waits_of

_PERSISTENT_KINDS: dict[str, AllocationKind] = {"parameter": "parameter", "buffer": "buffer", "constant": "buffer"}
# Every run of the step under way has its own such allocations if they live from the forward to the backward half.
_PER_RUN_KINDS: frozenset[AllocationKind] = frozenset({"output", "saved", "gathered", "communication", "temporary"})


def allocations(
    flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory, under_way: int = 1, holds_sums: bool = False
) -> Iterator[Allocation]:
    """Return the allocations of one device, in positions of the program; the last moment is the optimizer's step.

    An operator has several calls: reshards of its operands, and its local program with temporaries. Its moment is the
    call that holds most. The training loop is assumed to set gradients to None before the forward, to hold inputs and
    outputs to the end of the step, and to have optimizer state from an earlier step.

    Args:
        flow: the graph and the decisions.
        program: their program.
        optimizer: the memory of the optimizer.
        under_way: the number of concurrent runs of the step, each with its own saved tensors.
        holds_sums: True if the sums of earlier runs' gradients, as large as the gradients, are held during the run.
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
    # All are there when the backward half begins.
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
    """Lifetimes of all memory of one program; arguments as for `allocations`."""

    def __init__(self, flow: Flow, program: PredictedProgram, optimizer: OptimizerMemory) -> None:
        self.graph = flow.graph
        self.hosted = flow.decisions.hosted
        self.operators = flow.rules.operators
        self.program = program
        self.optimizer = optimizer
        self.end = len(self.operators) + 1
        self.border = sum(self.graph.phase(node) == "forward" for node in self.operators)  # first backward position
        self.order: list[fx.Node] = []  # all calls of the step
        self.times: dict[fx.Node, int] = {}  # call -> its index in the order
        self._sizes: dict[int, int] = {}  # identity of a fake tensor -> its bytes
        self.forward = 0  # the number of calls of the forward half
        self.returned: set[fx.Node] = set()  # the roots of outputs
        # By the root of a storage, the node that allocates it.
        self.first_call: dict[fx.Node, int] = {}  # the call that allocates it
        self.last_call: dict[fx.Node, int] = {}  # the last call that reads it or a view of it

    def run(self) -> Iterator[Allocation]:
        yield from self._persistent_allocations()
        self._find_lifetimes()
        lives = [(root, self._bytes(root), start, self.last_call[root] + 1) for root, start in self.first_call.items()]
        # Workspaces that an operator allocates and frees.
        for node in self._calls_of(WORKSPACES):
            held = WORKSPACES[node.target](*fx.map_arg(node.args, lambda source: source.meta["val"]))
            lives.append((node, held, self.times[node], self.times[node] + 1))
        positions, calls = self._peak_calls(lives)
        gradients = {
            storage_root(node): name for (kind, name), node in self.program.outputs.items() if kind == "gradient"
        }
        for root, held, start, end in lives:
            # Memory that no position's peak call sees is dropped: more is held at another call of that position.
            first, last = bisect.bisect_left(calls, start), bisect.bisect_left(calls, end)
            if held and first < last:
                until = self.end if end > len(self.order) else positions[last - 1] + 1
                module = self._module(root)
                # The name of a value or copy is its module and its key.
                name = f"{module}: {root.meta['key']}" if module else root.meta["key"]
                if root in gradients:
                    name, module = gradients[root], _owner(gradients[root])
                yield Allocation(name, held, positions[first], until, self._kind(root, end, gradients), module)

    def sums_before(self) -> Iterator[Allocation]:
        """Yield the sums of earlier runs' parameter gradients, held until the last reduction."""
        parameters = {source.name for source in self.graph.parameters}
        gradients = [(name, node) for (kind, name), node in self.program.outputs.items() if kind == "gradient"]
        gradients = [(name, node) for name, node in gradients if name in parameters]
        before = 0
        for name, node in sorted(gradients, key=lambda pair: pair[1].meta["position"]):
            size, position = node.meta["val"].nbytes, min(node.meta["position"], self.end - 2)
            yield Allocation(f"sum of {name}", size, 0, self.end - 1, "gradient")
            # The last run adds out of place, and then frees the old sums.
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
        # A gathered copy that backward reads is still "gathered", which says why it exists.
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
            # Names of inputs are paths in the arguments, not in modules.
            module = "" if kind == "input" else _owner(source.name)
            yield Allocation(source.name, held, 0, self.end, kind, module)
            # State on the host, and its temporaries there, take no device memory.
            hosted = source.node.name in self.hosted
            if source.kind == "parameter" and source.name in trained and not hosted:
                shape = Value(source.node).meta.shape
                state = self.optimizer.state_bytes(shape, tuple(val.shape), val.element_size())
                yield Allocation(source.name, state, 0, self.end, "optimizer", module)
                states.append(held)
        yield Allocation("optimizer's step", self.optimizer.step_bytes(states), self.end - 1, self.end, "temporary")

    def _find_lifetimes(self) -> None:
        """Find the indices of the first and the last call of every root."""
        program, first_call, last_call = self.program, self.first_call, self.last_call
        roots: dict[fx.Node, fx.Node] = {}  # in program order, the roots of all operands are known
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
                    # The kernels that compute it later read its operands then.
                    if fused is not None and node in fused.unmade:
                        continue
                    read = node.all_input_nodes if fused is None else fused.read_by(node)
                    for held in {roots[source] for source in read} & first_call.keys():
                        last_call[held] = time
                    # Tensors on the host take no device memory.
                    if viewed is None and node.target not in HOST_TENSORS:
                        first_call[node] = last_call[node] = time
                        if node.target is operator.getitem:  # allocated with the other results of its operator
                            first_call[node] = first_call[node.all_input_nodes[0]]
        self.times = times = {node: time for time, node in enumerate(self.order)}
        # A collective reads its input until the wait.
        for node in self._calls_of(KEEPS_INPUT):
            until = min((times[wait] for wait in waits_of(node)), default=times[node])
            for held in {roots[source] for source in node.all_input_nodes} & first_call.keys():
                last_call[held] = max(last_call[held], until)
        # Backward starts with all that forward saved, even tensors it never reads. Compiled code with dynamic sizes
        # frees them at its end.
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
                # Outputs are held while the optimizer steps. New values are copied to their tensors after forward; the
                # former values, which backward may need, are as large.
                is_copied = kind == "mutation" and name not in former
                until = self.forward - 1 if is_copied else len(self.order)
                last_call[root] = max(last_call[root], until)
        if program.compiled:
            self._write_over()

    def _write_over(self) -> None:
        """Let kernels of a compiled program write their results over operands that they are the last to read."""
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
                # A value of the other half is an argument, and is not overwritten.
                if source.graph is node.graph and self._bytes(source) == size and self.first_call[source] < time:
                    self.last_call[source] = time - 1
                    read_last[time].remove(source)
                    break

    def _peak_calls(self, lives: list[tuple[fx.Node, int, int, int]]) -> tuple[list[int], list[int]]:
        """Return the positions at which calls run, and for each position the call that holds most."""
        changes = [0] * (len(self.order) + 2)  # one more moment for the optimizer's step, and one for the end after it
        for _, held, start, end in lives:
            changes[start] += held
            changes[end] -= held
        held_at = list(accumulate(changes))
        positions, calls, most, last = [], [], -1, -1
        for time, node in enumerate(self.order):
            # For `bisect`, positions must be in order of calls: a moved call counts to the operator at its new place.
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
        """Return the bytes that a call allocates; for several results, those of the unread ones."""
        val = root.meta["val"]
        if isinstance(val, torch.Tensor):
            # Equal calls share the fake tensor of their result.
            held = self._sizes.get(id(val))
            if held is None:
                held = self._sizes[id(val)] = val.untyped_storage().nbytes()
            return held
        if makes_view(root.target):
            return 0
        # A result that is read has its own root: its `getitem`.
        read = {user.args[1] for user in root.users}
        unread = (result for index, result in enumerate(val) if isinstance(result, torch.Tensor) and index not in read)
        return sum(result.untyped_storage().nbytes() for result in unread)
