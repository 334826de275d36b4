"""Hash of a captured graph, the same on all ranks and in all runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from types import FunctionType

import torch
from torch import fx

from autoshard.capture._torch import pytree
from autoshard.capture.export import ExportedInput
from autoshard.capture.joint_graph import JointInput, JointOutput
from autoshard.size import DynamicSize, Ratio


def fingerprint(inputs: Iterable[JointInput | ExportedInput], outputs: Iterable[JointOutput], graph: fx.Graph) -> str:
    """Return the SHA-256 of inputs, operators with their arguments, shapes and dtypes, and outputs.

    Plan files store it: the hashed text of a graph must not change from version to version.
    """
    # Names of nodes depend on the process: they are numbered instead.
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for item in inputs:
        digest.update(f"{item.kind} {item.name}\n".encode())
    for node in graph.nodes:
        if node.op == "get_attr":
            region = getattr(graph.owning_module, str(node.target))
            if isinstance(region, fx.GraphModule):
                digest.update(fingerprint((), (), region.graph).encode())
        arguments = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        digest.update(f"{node.op} {_target_text(node)} {arguments}".encode())
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                digest.update(f" {tuple(value.shape)} {value.dtype}".encode())
        # The text of a dynamic size is that of the example: its expression tells graphs of other sizes apart.
        for size in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("sizes"))):
            if isinstance(size, (DynamicSize, Ratio)):
                digest.update(f" {size.expr}".encode())
        digest.update(b"\n")
    for output in outputs:
        digest.update(f"{output.kind} {output.name} {output.tangent}\n".encode())
    return digest.hexdigest()


def _target_text(node: fx.Node) -> str:
    """Return the text of the operator or function that a node calls."""
    if node.op != "call_function":
        return ""
    # The text of a function would have its address in memory.
    if isinstance(node.target, FunctionType):
        return f"{node.target.__module__}.{node.target.__qualname__}"
    return str(node.target)
