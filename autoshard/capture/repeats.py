"""Repetition in the joint graph: nodes that do the same work, and modules that are the same layer again."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.capture._torch import pytree
from autoshard.capture.graph import JointGraph


@dataclass(frozen=True, slots=True)
class RepeatedModule:
    """Modules whose paths differ in one index, and whose nodes do the same work in the same order.

    `pattern` is the path with `*` for the index, such as `model.layers.*`; `paths` are in order of the index; `nodes`
    has the nodes of each path in graph order, so that `nodes[i][k]` and `nodes[j][k]` correspond.
    """

    pattern: str
    paths: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Repeats:
    """What `repeats` found.

    `key` maps every node to the hash of its work; `classes` has the nodes of each key, in graph order; `modules` are
    the repeated modules, outermost and first in the graph first.
    """

    key: dict[fx.Node, str]
    classes: dict[str, tuple[fx.Node, ...]]
    modules: tuple[RepeatedModule, ...]


def repeats(graph: JointGraph) -> Repeats:
    """Group the nodes of a joint graph by the work they do, and its modules by the layers they repeat.

    Two nodes do the same work when operator, arguments that are no nodes, phase, and the shapes and dtypes of operands
    and results are equal. Keys are hashes of these, equal on all ranks and in all runs.
    """
    key = {node: work_key(node, graph.phase(node)) for node in graph.graph.nodes if node.op != "output"}
    classes: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for node, work in key.items():
        classes[work].append(node)
    return Repeats(key, {work: tuple(nodes) for work, nodes in classes.items()}, _repeated_modules(graph, key))


def work_key(node: fx.Node, phase: str) -> str:
    """Hash of what a node does, whatever its operands are called: 16 hexadecimal digits."""
    arguments = fx.node.map_arg((node.args, node.kwargs), _operand_text)
    target = node.target if node.op == "call_function" else node.op
    text = f"{phase} {target} {arguments} -> {_value_text(node)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _operand_text(node: fx.Node) -> str:
    return f"<{_value_text(node)}>"


def _value_text(node: fx.Node) -> str:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return " ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves if isinstance(leaf, torch.Tensor))


def _repeated_modules(graph: JointGraph, key: dict[fx.Node, str]) -> tuple[RepeatedModule, ...]:
    members = _members(graph)
    groups: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for path, nodes in members.items():
        work = tuple(key[node] for node in nodes)
        for pattern in _patterns(path):
            groups[pattern, work].append(path)
    found = [
        RepeatedModule(pattern, tuple(paths), tuple(tuple(members[path]) for path in paths))
        for (pattern, _), paths in groups.items()
        if len(paths) > 1
    ]
    return tuple(sorted(found, key=lambda module: module.pattern.count(".")))


def _members(graph: JointGraph) -> dict[str, list[fx.Node]]:
    """Nodes below every module path, in graph order; paths by index, not alphabetically."""
    members: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        for path in _prefixes(graph.module_path(node)):
            members[path].append(node)
    return dict(sorted(members.items(), key=lambda item: _order(item[0])))


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _patterns(path: str) -> Iterable[str]:
    """The path with each one of its indices replaced by `*`."""
    return (path[: match.start()] + "*" + path[match.end() :] for match in re.finditer(r"(?<![^.])\d+(?![^.])", path))


def _order(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]
