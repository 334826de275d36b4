"""The halves of a program as operations on streams, in the order in which they are issued: what `simulate` replays."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.cluster.cost import CostModel
from autoshard.cluster.flops import flops
from autoshard.partition._torch import FakeTensor
from autoshard.partition.split import Halves
from autoshard.patterns.local import collectives
from autoshard.patterns.ring import shift
from autoshard.patterns.routed_exchange import programs
from autoshard.simulate.events import COMPUTE, Operation, link_stream
from autoshard.size import plain

_WAIT = collectives.wait_tensor.default
_STARTS: dict[Any, str] = {
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_reduce.default: "all_reduce",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_to_all_single.default: "all_to_all",
    shift: "shift",
    programs.exchange.default: "all_to_all",
}


def operations(halves: Halves, groups: Sequence[str], cost: CostModel) -> list[Operation]:
    """What one device runs in a step: kernels, collectives, and the waits for these, of both halves.

    Args:
        halves: the program, not compiled.
        groups: for every mesh axis, the name of the process group in the program.
        cost: prices of the kernels and collectives, by the shapes that the program's tensors have.

    Returns:
        The operations in program order. A collective runs on the stream of its link; it starts once the kernels issued
        before it have ended, since it is issued behind them, and the first kernel behind its wait needs it.
    """
    issuer = _Issuer(groups, cost)
    for half in (halves.forward, halves.backward):
        if half is not None:
            issuer.run(half.graph)
    return issuer.issued


@dataclass(frozen=True, slots=True)
class Sending:
    """A collective of a program: its kind, the bytes that one rank holds before it, and its mesh axis."""

    kind: str
    bytes: int
    axis: int


def sendings(halves: Halves, groups: Sequence[str]) -> list[Sending]:
    """The collectives of both halves in program order; `groups` as for `operations`."""
    found = []
    for half in (halves.forward, halves.backward):
        if half is not None:
            values: dict[fx.Node, Any] = {}
            for node in half.graph.nodes:
                values[node] = _value(node, values)
                if node.target in _STARTS:
                    found.append(_sending(node, values, groups))
    return found


def _sending(node: fx.Node, values: dict[fx.Node, Any], groups: Sequence[str]) -> Sending:
    sent = next(_tensors(values[node.all_input_nodes[0]]))
    return Sending(_STARTS[node.target], sent.numel() * sent.element_size(), groups.index(node.args[-1]))


class _Issuer:
    """One pass over the graphs of a program."""

    def __init__(self, groups: Sequence[str], cost: CostModel) -> None:
        self.cost = cost
        self.groups = groups
        self.issued: list[Operation] = []
        self.computed: int | None = None  # the last operation of the compute stream

    def run(self, graph: fx.Graph) -> None:
        """Issue all nodes of a graph."""
        values: dict[fx.Node, Any] = {}
        started: dict[fx.Node, int] = {}  # a collective's node -> its operation
        for node in graph.nodes:
            values[node] = _value(node, values)
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            if node.target in _STARTS:
                started[node] = self._start(node, values)
                if node.target is programs.exchange.default:
                    self._issue(f"wait {node.name}", COMPUTE, 0.0, started[node])
            elif node.target is _WAIT:
                self._issue(node.name, COMPUTE, 0.0, started.get(node.all_input_nodes[0]))
            else:
                self._issue(node.name, COMPUTE, self._kernel_seconds(node, values))

    def _start(self, node: fx.Node, values: dict[fx.Node, Any]) -> int:
        sent = _sending(node, values, self.groups)
        seconds = self.cost.collective(sent.kind, sent.bytes, sent.axis)
        return self._issue(node.name, link_stream(self.cost.spans_hosts(sent.axis)), seconds)

    def _kernel_seconds(self, node: fx.Node, values: dict[fx.Node, Any]) -> float:
        op: Any = node.target
        if not hasattr(op, "overloadpacket"):  # arithmetic on sizes
            return 0.0
        results = list(_tensors(values[node]))
        if any(result.alias_info is not None for result in op._schema.returns):
            return self.cost.view()
        operands = [tensor for source in node.all_input_nodes for tensor in _tensors(values[source])]
        work = flops(op, [one.shape for one in operands], [one.shape for one in results], node.args)
        read = results if op is torch.ops.aten.index_select.default else operands  # a slice reads what it keeps
        moved = sum(one.numel() * one.element_size() for one in (*read, *results))
        dtype = results[0].dtype if results else torch.float32
        return self.cost.compute(work, moved, dtype, op.overloadpacket.__name__)

    def _issue(self, name: str, stream: str, seconds: float, *needs: int | None) -> int:
        known = {need for need in (*needs, self.computed) if need is not None}
        self.issued.append(Operation(name, stream, seconds, tuple(sorted(known))))
        if stream == COMPUTE:
            self.computed = len(self.issued) - 1
        return len(self.issued) - 1


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The fake tensor that a node stands for; nodes that joined reductions brought have none of their own yet."""
    if "val" in node.meta or node.op != "call_function":
        return node.meta.get("val")
    assert callable(node.target)
    args, kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda one: values[one] if isinstance(one, fx.Node) else plain(one)
    )
    modes = (one.fake_mode for one in _tensors((args, tuple(kwargs.values()))) if isinstance(one, FakeTensor))
    with next(modes, contextlib.nullcontext()), torch.no_grad():
        return node.target(*args, **kwargs)


def _tensors(value: object) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
