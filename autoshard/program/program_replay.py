"""The seconds of a program: prices of kernels, alone or fused by a compiler, and its calls as operations on streams.

The operations, in the order in which they are issued, are the input of `simulate.events.replay`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture.host_copies import AWAIT_COPY, HOST_COPIES, START_TO_DEVICE, START_TO_HOST
from autoshard.cluster.cost import CostModel, work_of_call
from autoshard.patterns.exchanging import exchange_ops, shift
from autoshard.program.aliasing import makes_view
from autoshard.simulate.events import COMPUTE, FROM_HOST_STREAM, TO_HOST_STREAM, Operation, link_stream
from autoshard.specs.emitter import collectives

# Operators that start a collective -> its kind. Tensors are their first argument, the group is the last.
COLLECTIVE_KINDS: dict[Any, str] = {
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_coalesced.default: "all_gather",
    collectives.all_reduce.default: "all_reduce",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_to_all_single.default: "all_to_all",
    shift: "shift",
    exchange_ops.exchange.default: "all_to_all",
}


def kernel_seconds(cost: CostModel, op: Any, operands: object, results: object, args: Sequence[object]) -> float:
    """Return the seconds of one call of an operator that is no collective, on one device.

    A view costs a call. Everything else costs its operations, or the bytes that it reads and writes.

    Args:
        cost: prices of the cluster.
        op: the operator. Other functions, such as arithmetic on sizes, cost nothing.
        operands: the tensors that it reads, possibly nested or fake.
        results: the tensors that it makes.
        args: its arguments, for the operators whose work does not follow from shapes.
    """
    if not hasattr(op, "overloadpacket"):
        return 0.0
    written, operands = list(tensors(results)), list(tensors(operands))
    if op is torch.ops.aten.index_copy_.default:
        written = operands = operands[-1:]  # rows are written to the memory of another tensor
    elif makes_view(op):
        return cost.view()
    work = work_of_call(op, operands, written, args)
    # A kernel that selects reads only the selected elements.
    read = written if op is torch.ops.aten.index_select.default else operands
    return cost.compute(work.flops, bytes_of([*read, *written]), work.dtype, work.operator, work.streamed)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: itself, or those in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def bytes_of(value: object) -> int:
    """Return the bytes of the elements of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))


# A compiler fuses a chain of pointwise operators, and reductions of their results, into one kernel. Softmax and norms
# are reductions without torch's tag.
_REDUCTIONS = ("_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm")


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Return True if every element of the result depends only on the elements at its position."""
    # Casts lack the tag.
    return torch.Tag.pointwise in getattr(op, "tags", ()) or op is torch.ops.aten._to_copy.default


@functools.cache
def _fuses_operands(op: Any) -> bool:
    """Return True if a compiler computes the operands of an operator in the operator's own kernel."""
    name = getattr(getattr(op, "overloadpacket", None), "__name__", "")
    return is_pointwise(op) or torch.Tag.reduction in getattr(op, "tags", ()) or name in _REDUCTIONS


def memory_operands(node: fx.Node) -> list[fx.Node] | None:
    """Return the operands that a compiled call reads from memory; None if its operator is not fused."""
    if not _fuses_operands(node.target):
        return None
    read = []
    for source in node.all_input_nodes:
        base = source
        while base.op == "call_function" and _is_view(base):
            base = base.all_input_nodes[0]
        # The results of pointwise operators are in the kernel already.
        if not is_pointwise(base.target):
            read.append(source)
    return read


def is_written(node: fx.Node) -> bool:
    """Return True if a compiled call writes its result to memory, since a call outside of its kernel reads it."""
    if not is_pointwise(node.target) or not node.users:
        return True
    return not all(_fuses_operands(user.target) for user in _users(node))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node and of its views."""
    for user in node.users:
        if user.op == "call_function" and _is_view(user):
            yield from _users(user)
        else:
            yield user


def _is_view(node: fx.Node) -> bool:
    return makes_view(node.target) and len(node.all_input_nodes) == 1


_WAIT = collectives.wait_tensor.default
# The link is full duplex.
_COPY_STREAMS: dict[Any, str] = {START_TO_HOST: TO_HOST_STREAM, START_TO_DEVICE: FROM_HOST_STREAM}


class KernelPrices:
    """Seconds of the kernels of programs; each distinct call is priced once."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[tuple[Any, int], tuple[object, float]] = {}

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of a call that is no collective."""
        if self.cost.cluster.device.compiled:
            read = memory_operands(node)
            if read is not None:
                return self._fused_seconds(node, read)
        val = node.meta.get("val")
        # Equal calls share the fake tensor of their result, so its identity is a cheap key.
        key = node.target, id(val)
        known = self._known.get(key)
        if known is None:
            operands = [source.meta.get("val") for source in node.all_input_nodes]
            seconds = kernel_seconds(self.cost, node.target, operands, val, node.args)
            # The entry keeps the tensor alive, so that no other tensor gets its id.
            known = self._known[key] = val, seconds
        return known[1]

    def _fused_seconds(self, node: fx.Node, read: Sequence[fx.Node]) -> float:
        """Return the seconds that a call adds to its fused kernel, for the bytes that it reads and writes."""
        val, written = node.meta.get("val"), is_written(node)
        moved = bytes_of([source.meta.get("val") for source in read]) + (bytes_of(val) if written else 0)
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        dtype = next((tensor.dtype for tensor in tensors(val)), torch.float32)
        # A kernel is launched once: the call that writes its result pays for that.
        launch = 0.0 if written else self.cost.compute(0.0, 0.0, dtype, name)
        return max(0.0, self.cost.compute(0.0, moved, dtype, name) - launch)


def operations(graphs: Iterable[fx.Graph], groups: Sequence[str], prices: KernelPrices) -> list[Operation]:
    """Return the operations of one device in a step, in program order: kernels, collectives, and their waits.

    A collective runs on the stream of its link. It starts once the kernels issued before it have ended, and the first
    kernel after its wait needs it.

    Args:
        graphs: the program's halves in turn, not compiled; `meta["val"]` of a node is its fake tensor.
        groups: for every mesh axis, the name of the process group in the program.
        prices: of kernels and collectives.
    """
    return [operation for operation, _ in issue_calls(graphs, groups, prices)]


def issue_calls(
    graphs: Iterable[fx.Graph], groups: Sequence[str], prices: KernelPrices
) -> list[tuple[Operation, fx.Node]]:
    """Return the operations of `operations`, each with the node that issues it."""
    issuer = _Issuer(groups, prices)
    for graph in graphs:
        issuer.run(graph)
    return list(zip(issuer.issued, issuer.nodes, strict=True))


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective of a program: its kind, the bytes that one rank holds before it, and its mesh axis."""

    kind: str
    bytes: int
    axis: int


def collective_calls(graphs: Iterable[fx.Graph], groups: Sequence[str]) -> list[CollectiveCall]:
    """Return the collectives of a program in its order; arguments as for `operations`."""
    return [
        collective_call(node, groups) for graph in graphs for node in graph.nodes if node.target in COLLECTIVE_KINDS
    ]


def collective_call(node: fx.Node, groups: Sequence[str]) -> CollectiveCall:
    """Return the collective that a node starts; groups as for `operations`."""
    operands = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.all_input_nodes[:1]
    sent = [next(tensors(operand.meta["val"])) for operand in operands]  # type: ignore[union-attr]
    return CollectiveCall(COLLECTIVE_KINDS[node.target], bytes_of(sent), groups.index(str(node.args[-1])))


class _Issuer:
    """One pass over the graphs of a program."""

    def __init__(self, groups: Sequence[str], prices: KernelPrices) -> None:
        self.prices = prices
        self.groups = groups
        self.issued: list[Operation] = []
        # The node of every operation.
        self.nodes: list[fx.Node] = []
        # The last operation of the compute stream.
        self.computed: int | None = None

    def run(self, graph: fx.Graph) -> None:
        """Issue all nodes of a graph."""
        # A collective's node -> its operation.
        started: dict[fx.Node, int] = {}
        dispatch, seconds_of = self.prices.cost.cluster.device.dispatch, self.prices.seconds
        for node in graph.nodes:
            target = node.target
            if node.op != "call_function" or target is operator.getitem:
                continue
            if target is _WAIT:
                (start,) = node.all_input_nodes
                # One of several results.
                if start.target is operator.getitem:
                    start = start.all_input_nodes[0]
                self._issue(node, node.name, COMPUTE, 0.0, dispatch.view, started.get(start))
            elif target in COLLECTIVE_KINDS:
                started[node] = self._start(node)
                # An exchange has no wait in the program: its operator returns when the rows have arrived.
                if target is exchange_ops.exchange.default:
                    self._issue(node, f"wait {node.name}", COMPUTE, 0.0, 0.0, started[node])
            elif target in HOST_COPIES:
                started[node] = self._copy(node)
            elif target is AWAIT_COPY:
                self._issue(node, node.name, COMPUTE, 0.0, dispatch.view, started.get(node.all_input_nodes[0]))
            else:
                seconds = seconds_of(node)
                self._issue(node, node.name, COMPUTE, seconds, dispatch.kernel if seconds else dispatch.view)

    def _start(self, node: fx.Node) -> int:
        sent, cost = collective_call(node, self.groups), self.prices.cost
        seconds = cost.collective(sent.kind, sent.bytes, sent.axis)
        dispatch = cost.cluster.device.dispatch.collective
        return self._issue(node, node.name, link_stream(cost.spans_hosts(sent.axis)), seconds, dispatch)

    def _copy(self, node: fx.Node) -> int:
        """Issue a copy over the link to the host; a compiled program waits for it."""
        cost, stream = self.prices.cost, _COPY_STREAMS.get(node.target, COMPUTE)
        seconds = cost.host_copy(bytes_of(node.meta["val"]))
        return self._issue(node, node.name, stream, seconds, cost.cluster.device.dispatch.kernel)

    def _issue(
        self, node: fx.Node, name: str, stream: str, seconds: float, dispatch: float, awaited: int | None = None
    ) -> int:
        """Issue an operation, which needs the last computation and, if given, the operation that it awaits."""
        index, needs = len(self.issued), () if self.computed is None else (self.computed,)
        if awaited is not None:
            needs = tuple(sorted({awaited, *needs}))
        self.issued.append(Operation(name, stream, seconds, needs, dispatch))
        self.nodes.append(node)
        if stream == COMPUTE:
            self.computed = index
        return index
