"""The stage graph of an exported forward graph: seconds, bytes, and operators that stay together."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import fx

from autoshard.capture.layers import group_by_list_element
from autoshard.cluster.cost import CostModel
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from autoshard.program.dry_run import CallCost, DryRun
from autoshard.program.kernels import tensors


def read_stage_graph(
    exported: ExportedModule, cost: CostModel, *, optimizer: OptimizerMemory | None = None
) -> StageGraph:
    """Read the stage graph of an exported module.

    Args:
        exported: the module, exported with an example of one microbatch.
        cost: prices of one device.
        optimizer: the state of every trained parameter; AdamW's by default.

    Returns:
        One node for every operator, or for operators that must stay together: those of `exported.together`; an operator
        of several results with the nodes that take them out; an operator without a result with the one that it watches.
        Seconds and saved bytes are those of `program.dry_run`, plus the additions of gradients where several operators
        read one value. A saved tensor counts once, where it was made, however many operators read it or views of it.
    """
    return _Reader(exported, cost, optimizer or optimizer_memory(None, None, foreach=False)).read()


class _Reader:
    """One pass over a graph."""

    def __init__(self, exported: ExportedModule, cost: CostModel, optimizer: OptimizerMemory) -> None:
        self.exported = exported
        self.cost = cost
        self.optimizer = optimizer
        sources = exported.sources
        self.names = {node: source.name for node, source in sources.items() if source.kind in ("parameter", "buffer")}
        self.parameters = {node for node, source in sources.items() if source.kind == "parameter"}
        self.needs = {node: node in self.parameters and source.fake.requires_grad for node, source in sources.items()}
        self.nodes = exported.operators
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.costs: dict[fx.Node, CallCost] = {}
        # The node and the number of its result that own the memory of a node's tensor.
        self.memory: dict[fx.Node, tuple[fx.Node, int]] = {}

    def read(self) -> StageGraph:
        run = DryRun(self.cost)
        for node in self.exported.graph.nodes:
            self.memory[node] = node, 0
            if node in self.position:
                self._price_node(node, run)
        saved = self._saved_bytes()
        recompute_seconds = self._recompute_seconds()
        layers = self._layers()
        nodes, values = [], []
        for place, node in enumerate(self.nodes):
            call, value = self.costs[node], node.meta.get("val")
            size = _bytes(value)
            readers = [user for user in node.users if user in self.position]
            differentiated = sum(self.needs[user] for user in readers) if self.needs[node] else 0
            nodes.append(
                StageNode(
                    name=node.name,
                    forward_seconds=call.forward_seconds,
                    backward_seconds=call.backward_seconds + self._additions(value, differentiated - 1),
                    saved_bytes=saved.get(node, 0) + call.saved_inside,
                    at_rest=tuple(
                        dict.fromkeys(self.names[source] for source in node.all_input_nodes if source in self.names)
                    ),
                    members=(node.name,),
                    layer=layers.get(node, ""),
                )
            )
            output = node in self.exported.forward.outputs
            if readers or output:
                users = tuple(sorted(self.position[user] for user in readers))
                gradient_bytes = size if self.needs[node] else 0
                values.append(
                    StageValue(node.name, place, users, size, gradient_bytes, recompute_seconds.get(node), output)
                )
        graph = StageGraph(tuple(nodes), tuple(values), self._at_rest())
        return graph.merge_pairs(tuple(self._inseparable_pairs()))

    def _layers(self) -> dict[fx.Node, str]:
        """Return the path of the layer of every node that belongs to one."""
        stacks = {node: node.meta.get("nn_module_stack") or {"": ("",)} for node in self.nodes}
        groups = group_by_list_element({node: next(reversed(stack.values()))[0] for node, stack in stacks.items()})
        return {node: name for name, nodes in groups.items() for node in nodes}

    def _recompute_seconds(self) -> dict[fx.Node, float]:
        """Return the seconds of computing a value anew on another stage, where inputs, buffers and constants suffice.

        They include all calls that the value depends on, each once.
        """
        differentiated = {node for node, needs in self.needs.items() if needs}
        changed = {name for group in self.exported.together for name in group}
        fixed = self.parameters | differentiated | {node for node in self.nodes if node.name in changed}
        cones: dict[fx.Node, frozenset[fx.Node]] = {}
        for call in self.nodes:
            possible = call not in fixed and call.name not in self.exported.random
            read = call.all_input_nodes
            if possible and all(source in cones if source in self.position else source not in fixed for source in read):
                cones[call] = frozenset({call}).union(*(cones[source] for source in read if source in cones))
        return {call: sum(self.costs[node].forward_seconds for node in cone) for call, cone in cones.items()}

    def _inseparable_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of positions that one stage must have, the earlier first."""
        last = len(self.nodes) - 1
        for node, place in self.position.items():
            if not isinstance(node.meta.get("val"), torch.Tensor):
                # A result that is no tensor can't be sent: its readers stay with it.
                yield from ((place, self.position[user]) for user in node.users if user in self.position)
            if not node.users:
                # A call that nothing reads, such as a check, stays with the call that it reads. If it reads none, as a
                # count of batches does, it stays with the next call.
                watched = [self.position[source] for source in node.all_input_nodes if source in self.position]
                if node.meta.get("val") is None and watched:
                    yield max(watched), place
                if not watched and last:
                    yield min(place, last - 1), min(place, last - 1) + 1
        places = {node.name: place for node, place in self.position.items()}
        for group in self.exported.together:
            yield from pairwise(sorted(places[name] for name in group))

    def _price_node(self, node: fx.Node, run: DryRun) -> None:
        operands = node.all_input_nodes
        self.costs[node] = call = run.call_cost(node, [self.needs.get(source, False) for source in operands])
        if node.target is operator.getitem and isinstance(node.args[1], int):
            source, index = operands[0], _result(operands[0], node.args[1])
            cost = self.costs.get(source, CallCost())
            self.needs[node] = cost.needs_gradient[index] if index < len(cost.needs_gradient) else self.needs[source]
            alias = cost.aliases[index] if index < len(cost.aliases) else None
            self.memory[node] = (source, index) if alias is None else self.memory[source.all_input_nodes[alias]]
            return
        self.needs[node] = any(call.needs_gradient)
        if call.aliases and call.aliases[0] is not None:
            self.memory[node] = self.memory[operands[call.aliases[0]]]

    def _saved_bytes(self) -> dict[fx.Node, int]:
        """Return the bytes that backward reads of the results of every node."""
        read = set()  # a set, as a tensor counts once, however many operators save it or a view of it
        for node, call in self.costs.items():
            read |= {self.memory[node.all_input_nodes[place]] for place in call.saved_operands}
            read |= {(node, place) for place in call.saved_results}
        saved: dict[fx.Node, int] = {}
        for node, place in read:
            if node in self.costs and place < len(self.costs[node].result_bytes):
                saved[node] = saved.get(node, 0) + self.costs[node].result_bytes[place]
        return saved

    def _additions(self, value: object, count: int) -> float:
        """Return the seconds of adding up the gradients of several readers."""
        if count <= 0 or not isinstance(value, torch.Tensor):
            return 0.0
        # Each addition reads two tensors and writes one.
        return count * self.cost.compute(0.0, 3 * _bytes(value), value.dtype)

    def _at_rest(self) -> dict[str, int]:
        """Return the bytes of every buffer, and of every parameter with its gradient and optimizer state."""
        held = {}
        for node, name in self.names.items():
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                held[name] = _bytes(value)
                if self.needs[node]:
                    shape = tuple(value.shape)
                    held[name] += _bytes(value) + self.optimizer.state_bytes(shape, shape, value.element_size())
        return held


def _result(source: fx.Node, index: int) -> int:
    """Return the number of a result among those that are tensors."""
    value = source.meta.get("val")
    return len(list(tensors(list(value[:index])))) if isinstance(value, (list, tuple)) else index


def _bytes(value: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))
