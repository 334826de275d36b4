"""What of a program the host has to read while the program runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoshard.capture.attention import operators
from autoshard.patterns.ops._draws import draws

aten = torch.ops.aten
DRAWS = {
    getattr(draws, name).default
    for name in ("uniform", "normal", "integers", "bernoulli", "poisson", "gamma", "dirichlet", "binomial")
}
"""Operators that read their seed and their shard."""
READERS = DRAWS | {operators.attention.default, operators.attention_backward.default}
"""Operators that take values of the host beside tensors of the device; attention reads where its queries begin."""
_GIVEN = ("seed", "host_coordinate_", "key_default")
"""How inputs of a half are named that are on the host; the last are seeds that the forward half made."""
SIZED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def host_values(graph: fx.Graph) -> set[fx.Node]:
    """The values of a program that are on the host: coordinates, the seed, and what is computed from them alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and str(node.target).startswith(_GIVEN)
        computed = node.op == "call_function" and node.target not in READERS and node.all_input_nodes
        if given or (computed and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def host_reads(graph: fx.Graph) -> list[str]:
    """Calls for which the host waits for the device, or in which a value of the host meets one of the device.

    Operators of `autoshard` that exchange rows, as many as the data says, are left out: they have to read how many.
    """
    host = host_values(graph)
    return [f"{node.format_node()}: {why}" for node in graph.nodes for why in _faults(node, host)]


def _faults(node: fx.Node, host: set[fx.Node]) -> Iterator[str]:
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op.namespace == "_c10d_functional":
        return
    of_host = [one for one in node.all_input_nodes if one in host]
    if of_host and node not in host and op not in READERS:
        yield f"mixes {of_host} of the host with tensors of the device"
    if op in DRAWS and any(_value(node, name) not in {*host, None} for name in ("seed", "shard")):
        yield "reads a seed or a shard that is on the device"
    if SIZED_BY_DATA.intersection(op.tags):
        yield "is read on the host, or has a size that is"
    if "device" in node.kwargs and node.all_input_nodes and node.kwargs["device"] != node.meta["val"].device:
        yield "moves a tensor to another device"
    if op is aten.index.Tensor and any(_is_mask(one) for one in node.all_input_nodes[1:]):
        yield "indexes by a mask"


def _value(node: fx.Node, name: str) -> Any:
    """The argument of a call by its name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _is_mask(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)
