"""The graphs of a program as operations on streams, in the order in which they are issued: what `replay` runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.cluster.cost import CostModel
from autoshard.patterns.routed_exchange import exchange_ops
from autoshard.program.fusion import is_written, memory_operands
from autoshard.program.kernels import COLLECTIVE_KINDS, kernel_seconds, tensors
from autoshard.simulate.events import COMPUTE, Operation, link_stream
from autoshard.specs.emitter import collectives

_WAIT = collectives.wait_tensor.default


class KernelPrices:
    """Seconds of the kernels of programs, each distinct call priced once.

    Calls that are alike share the tensor without numbers that stands for their result (`planner.recorded`); so that
    tells which price is known.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[tuple[Any, int], tuple[object, float]] = {}

    def seconds(self, node: fx.Node) -> float:
        """Time of a call that is no collective."""
        if self.cost.cluster.device.compiled:
            read = memory_operands(node)
            if read is not None:
                return self._fused_seconds(node, read)
        val = node.meta.get("val")
        key = node.target, id(val)
        if key not in self._known:
            operands = [source.meta.get("val") for source in node.all_input_nodes]
            seconds = kernel_seconds(self.cost, node.target, operands, val, node.args)
            self._known[key] = val, seconds  # what a key names by identity stays alive
        return self._known[key][1]

    def _fused_seconds(self, node: fx.Node, read: Sequence[fx.Node]) -> float:
        """What a call adds to the kernel that it is fused into: the bytes that it reads and writes.

        The call that writes the kernel's result pays for the launch.
        """
        made, written = node.meta.get("val"), is_written(node)
        moving = [source.meta.get("val") for source in read] + ([made] if written else [])
        moved = sum(one.numel() * one.element_size() for one in tensors(moving))
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        dtype = next((one.dtype for one in tensors(made)), torch.float32)
        launched = 0.0 if written else self.cost.compute(0.0, 0.0, dtype, name)
        return max(0.0, self.cost.compute(0.0, moved, dtype, name) - launched)


def operations(graphs: Iterable[fx.Graph], groups: Sequence[str], prices: KernelPrices) -> list[Operation]:
    """What one device runs in a step: kernels, collectives, and the waits for these.

    Args:
        graphs: the program's halves in turn, not compiled; `meta["val"]` of a node is its tensor, without numbers.
        groups: for every mesh axis, the name of the process group in the program.
        prices: of the kernels, and of the collectives.

    Returns:
        The operations in program order. A collective runs on the stream of its link; it starts once the kernels issued
        before it have ended, since it is issued behind them, and the first kernel behind its wait needs it.
    """
    issuer = _Issuer(groups, prices)
    for graph in graphs:
        issuer.run(graph)
    return issuer.issued


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective of a program: its kind, the bytes that one rank holds before it, and its mesh axis."""

    kind: str
    bytes: int
    axis: int


def collective_calls(graphs: Iterable[fx.Graph], groups: Sequence[str]) -> list[CollectiveCall]:
    """The collectives of a program in its order; arguments as for `operations`."""
    return [
        collective_call(node, groups) for graph in graphs for node in graph.nodes if node.target in COLLECTIVE_KINDS
    ]


def collective_call(node: fx.Node, groups: Sequence[str]) -> CollectiveCall:
    """What a node that starts a collective sends; the groups as for `operations`."""
    operands = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.all_input_nodes[:1]
    sent = [next(tensors(operand.meta["val"])) for operand in operands]  # type: ignore[union-attr]
    size = sum(one.numel() * one.element_size() for one in sent)
    return CollectiveCall(COLLECTIVE_KINDS[node.target], size, groups.index(str(node.args[-1])))


def _start_of(wait: fx.Node) -> fx.Node:
    """The collective whose result, or one of whose results, is awaited."""
    (source,) = wait.all_input_nodes
    return source.all_input_nodes[0] if source.target is operator.getitem else source


class _Issuer:
    """One pass over the graphs of a program."""

    def __init__(self, groups: Sequence[str], prices: KernelPrices) -> None:
        self.prices = prices
        self.groups = groups
        self.issued: list[Operation] = []
        self.computed: int | None = None  # the last operation of the compute stream

    def run(self, graph: fx.Graph) -> None:
        """Issue all nodes of a graph."""
        started: dict[fx.Node, int] = {}  # a collective's node -> its operation
        dispatch = self.prices.cost.cluster.device.dispatch
        for node in graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            if node.target in COLLECTIVE_KINDS:
                started[node] = self._start(node)
                if node.target is exchange_ops.exchange.default:
                    self._issue(f"wait {node.name}", COMPUTE, 0.0, started[node])
            elif node.target is _WAIT:
                self._issue(node.name, COMPUTE, 0.0, started.get(_start_of(node)), dispatch=dispatch.view)
            else:
                seconds = self.prices.seconds(node)
                self._issue(node.name, COMPUTE, seconds, dispatch=dispatch.kernel if seconds else dispatch.view)

    def _start(self, node: fx.Node) -> int:
        sent, cost = collective_call(node, self.groups), self.prices.cost
        seconds = cost.collective(sent.kind, sent.bytes, sent.axis)
        dispatch = cost.cluster.device.dispatch.collective
        return self._issue(node.name, link_stream(cost.spans_hosts(sent.axis)), seconds, dispatch=dispatch)

    def _issue(self, name: str, stream: str, seconds: float, *needs: int | None, dispatch: float = 0.0) -> int:
        known = {need for need in (*needs, self.computed) if need is not None}
        self.issued.append(Operation(name, stream, seconds, tuple(sorted(known)), dispatch))
        if stream == COMPUTE:
            self.computed = len(self.issued) - 1
        return len(self.issued) - 1
