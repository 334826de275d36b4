"""The graphs of a program as operations on streams, in the order in which they are issued: what `replay` runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.cluster.cost import CostModel
from autoshard.patterns.local import collectives
from autoshard.patterns.routed_exchange import programs
from autoshard.simulate.events import COMPUTE, Operation, link_stream
from autoshard.simulate.kernels import STARTS, kernel_seconds, tensors

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
        val = node.meta.get("val")
        key = node.target, id(val)
        if key not in self._known:
            operands = [source.meta.get("val") for source in node.all_input_nodes]
            seconds = kernel_seconds(self.cost, node.target, operands, val, node.args)
            self._known[key] = val, seconds  # what a key names by identity stays alive
        return self._known[key][1]


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
class Sending:
    """A collective of a program: its kind, the bytes that one rank holds before it, and its mesh axis."""

    kind: str
    bytes: int
    axis: int


def sendings(graphs: Iterable[fx.Graph], groups: Sequence[str]) -> list[Sending]:
    """The collectives of a program in its order; arguments as for `operations`."""
    return [_sending(node, groups) for graph in graphs for node in graph.nodes if node.target in STARTS]


def _sending(node: fx.Node, groups: Sequence[str]) -> Sending:
    sent = next(tensors(node.all_input_nodes[0].meta["val"]))
    return Sending(STARTS[node.target], sent.numel() * sent.element_size(), groups.index(str(node.args[-1])))


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
        for node in graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            if node.target in STARTS:
                started[node] = self._start(node)
                if node.target is programs.exchange.default:
                    self._issue(f"wait {node.name}", COMPUTE, 0.0, started[node])
            elif node.target is _WAIT:
                self._issue(node.name, COMPUTE, 0.0, started.get(node.all_input_nodes[0]))
            else:
                self._issue(node.name, COMPUTE, self.prices.seconds(node))

    def _start(self, node: fx.Node) -> int:
        sent, cost = _sending(node, self.groups), self.prices.cost
        seconds = cost.collective(sent.kind, sent.bytes, sent.axis)
        return self._issue(node.name, link_stream(cost.spans_hosts(sent.axis)), seconds)

    def _issue(self, name: str, stream: str, seconds: float, *needs: int | None) -> int:
        known = {need for need in (*needs, self.computed) if need is not None}
        self.issued.append(Operation(name, stream, seconds, tuple(sorted(known))))
        if stream == COMPUTE:
            self.computed = len(self.issued) - 1
        return len(self.issued) - 1
