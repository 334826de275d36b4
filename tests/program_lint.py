"""What may not be in a program that runs on GPUs: looked for in its graphs, node by node.

Sources: the types that torch has a type of NCCL for, and the reductions that it refuses, are those of
`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp` (`ncclDataType`, `getNcclReduceOp`, `allreduce`,
`reduce_scatter_tensor_coalesced`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoshard.capture.host_copies import HOST_COPIES
from autoshard.capture.joint_graph import JointGraph
from autoshard.operators.attention.attention_operator import operators
from autoshard.patterns.ops.random import draws
from autoshard.runtime.step import RunnableStep

aten = torch.ops.aten
collectives = torch.ops._c10d_functional

DRAWS = {
    getattr(draws, name).default
    for name in ("uniform", "normal", "integers", "bernoulli", "poisson", "gamma", "dirichlet", "binomial")
}
"""Operators that read their seed and their shard."""
_GIVEN = ("seed", "host_coordinate_", "key_default")
"""How inputs of a half are named that are on the host; the last are seeds that the forward half made."""

READERS = DRAWS | {operators.attention.default, operators.attention_backward.default}
"""Operators that take values of the host beside tensors of the device; attention reads where its queries begin."""

_TOLD_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_UNTAGGED_READS = {aten.is_nonzero, aten.nonzero_numpy}
"""Operators whose results have numbers or shapes that only the device knows, though torch does not mark them so."""

PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.convolution_backward,
    aten._grouped_mm,
    aten._scaled_mm,
}
"""Operators with compute enough to hide a collective behind; those of attention are known by their names."""

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
COMPLEX = frozenset({torch.complex64, torch.complex128})
TYPES = FLOAT8 | {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
REDUCTIONS = ("sum", "avg", "product", "min", "max")
_REDUCES = (collectives.all_reduce, collectives.all_reduce_coalesced, collectives.reduce_scatter_tensor)
_VIEWS = (aten.view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.detach, aten.alias, aten._to_copy)


@dataclass(frozen=True, slots=True)
class Finding:
    """A node of a graph, and what is wrong with it."""

    node: str
    problem: str


def program_findings(program: RunnableStep) -> list[Finding]:
    """Findings of all kinds in the halves of a program, but for gathers that nothing hides."""
    return [finding for graph in program.halves.graphs for finding in graph_findings(graph)]


def graph_findings(graph: fx.Graph) -> list[Finding]:
    """Reads of the device by the host, and collectives that NCCL does not have."""
    return [*host_reads(graph), *unknown_collectives(graph)]


def host_values(graph: fx.Graph) -> set[fx.Node]:
    """The values of a program that are on the host: coordinates, the seed, and what is computed from them alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and str(node.target).startswith(_GIVEN)
        computed = node.op == "call_function" and node.target not in READERS and node.all_input_nodes
        if given or (computed and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def host_reads(graph: fx.Graph) -> list[Finding]:
    """Calls for which the host waits for the device, or in which a value of the host meets one of the device.

    Operators of `autoshard` that exchange rows, as many as the data says, are left out: they have to read how many.
    """
    host = host_values(graph)
    return [Finding(str(node), problem) for node in graph.nodes for problem in _reads(node, host)]


def _reads(node: fx.Node, host: set[fx.Node]) -> Iterator[str]:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace == "_c10d_functional":
        return
    of_host = [source for source in node.all_input_nodes if source in host]
    if of_host and node not in host and op not in READERS:
        yield f"mixes {of_host} of the host with tensors of the device"
    if op in DRAWS and any(_argument(node, name) not in {*host, None} for name in ("seed", "shard")):
        yield "reads a seed or a shard that is on the device"
    if op is aten.index.Tensor:
        if any(_type(part) in (torch.bool, torch.uint8) for part in node.args[1]):
            yield "indexes by a mask: the host has to know how many are true"
    elif op is aten.repeat_interleave.Tensor:
        if _argument(node, "output_size") is None:
            yield "repeats by a tensor without output_size"
    elif _TOLD_BY_DATA.intersection(op.tags) or op.overloadpacket in _UNTAGGED_READS:
        yield f"{op} tells the host what the device computed"
    if _moves_to_host(node):
        yield "copies from the device to the host"
    made = next(_tensors(node), None)
    moves = node.all_input_nodes and made is not None and node.kwargs.get("device", made.device) != made.device
    # What comes back from the host goes to the device at hand.
    if moves and op not in HOST_COPIES:
        yield "moves a tensor to another device"


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of a call by its name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def unknown_collectives(graph: fx.Graph) -> list[Finding]:
    """Collectives of a type, or with a reduction, that NCCL does not have."""
    found = []
    for node in graph.nodes:
        packet = _packet(node)
        if node.op != "call_function" or not _is_collective(node):
            continue
        for dtype in {value.dtype for value in _tensors(node.args[0])}:
            problem = _refusal(packet, dtype, _reduction(node))
            if problem:
                found.append(Finding(str(node), f"{node.target}: {problem}"))
    return found


def exposed_gathers(graph: fx.Graph) -> list[Finding]:
    """Gathers of parameters awaited with no product since their start, though there are products before the wait.

    The first gather has nothing to hide behind.
    """
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    products = [place[node] for node in nodes if is_product(node)]
    found = []
    for node in nodes:
        if not _gathers_parameters(node):
            continue
        awaited = min((place[wait] for wait in _waits(node)), default=0)
        before = [product for product in products if product < awaited]
        if before and not any(product > place[node] for product in before):
            found.append(Finding(str(node), "no product runs between its start and its wait"))
    return found


def gathers(graph: fx.Graph) -> int:
    """How many gathers of parameters there are; one that is joined of several counts once."""
    return sum(map(_gathers_parameters, graph.nodes))


def named_devices(graph: JointGraph) -> list[Finding]:
    """Nodes of a captured graph that name a device: its fingerprint would, too."""
    return [
        Finding(str(node), f"names the device {leaf}")
        for node in graph.graph_module.graph.nodes
        for leaf in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(leaf, torch.device)
    ]


def is_product(node: fx.Node) -> bool:
    """Whether a node is compute enough to hide a collective behind."""
    return _packet(node) in PRODUCTS or (node.op == "call_function" and "attention" in str(node.target))


def _refusal(packet: object, dtype: torch.dtype, reduction: str | None) -> str | None:
    """Why NCCL, as torch calls it, does not run the collective; None if it does."""
    if dtype in COMPLEX:
        viewed = packet in (collectives.all_reduce, collectives.all_reduce_coalesced) and reduction in ("sum", "avg")
        return None if viewed else f"{dtype}"
    if dtype not in TYPES:
        return f"{dtype}"
    if reduction is None:
        return None
    if reduction not in REDUCTIONS:
        return f'reduction "{reduction}"'
    if dtype in FLOAT8 or (dtype == torch.bool and reduction == "avg"):
        return f'reduction "{reduction}" of {dtype}'
    return None


def _reduction(node: fx.Node) -> str | None:
    return str(node.args[1]).lower() if _packet(node) in _REDUCES else None


def _is_collective(node: fx.Node) -> bool:
    target = node.target
    named = isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"
    return named and _packet(node) is not collectives.wait_tensor


def _gathers_parameters(node: fx.Node) -> bool:
    """Whether a node gathers parameters, one or several at once, and nothing else."""
    if _packet(node) not in (collectives.all_gather_into_tensor, collectives.all_gather_into_tensor_coalesced):
        return False
    gathered = node.args[0]
    return all(map(_is_parameter, gathered if isinstance(gathered, (list, tuple)) else [gathered]))


def _waits(node: fx.Node) -> Iterator[fx.Node]:
    """Where the results of a collective are awaited; those of a joined one are taken from its list."""
    for user in node.users:
        if _packet(user) is collectives.wait_tensor:
            yield user
        elif user.target is operator.getitem:
            yield from _waits(user)


def _is_parameter(node: object) -> bool:
    """Whether a node is a placeholder, or only a view or a cast of one."""
    while isinstance(node, fx.Node) and node.op != "placeholder":
        if _packet(node) not in _VIEWS:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node)


def _moves_to_host(node: fx.Node) -> bool:
    source = next(iter(node.all_input_nodes), None)
    values = [next(_tensors(end), None) for end in (source, node)] if source is not None else []
    if _packet(node) not in (aten._to_copy, aten.to, aten.copy) or None in values:
        return False
    before, after = (value.device.type for value in values if value is not None)
    return before not in ("cpu", "meta") and after == "cpu"


def _packet(node: object) -> object:
    target = getattr(node, "target", None)
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def _type(node: object) -> torch.dtype | None:
    value = next(_tensors(node), None)
    return None if value is None else value.dtype


def _tensors(node: object) -> Iterator[Tensor]:
    """Tensors without numbers that nodes make, as far as they are known."""
    ends: Iterable[object] = node if isinstance(node, (list, tuple)) else (node,)
    for end in ends:
        meta = end.meta.get("val") if isinstance(end, fx.Node) else None
        yield from (value for value in pytree.tree_leaves(meta) if isinstance(value, Tensor))
