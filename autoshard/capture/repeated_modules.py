"""Repetition in the joint graph: modules that are the same layer again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autoshard.capture.joint_graph import JointGraph


@dataclass(frozen=True, slots=True)
class RepeatedModule:
    """Modules whose paths differ in one index, and whose nodes do the same work in the same order.

    `pattern` is the path with `*` for the index, such as `model.layers.*`; `paths` are in order of the index; `nodes`
    has the nodes of each path in graph order, so that `nodes[i][k]` and `nodes[j][k]` correspond.
    """

    pattern: str
    paths: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]


def repeated_modules(graph: JointGraph, work: Mapping[fx.Node, Hashable]) -> tuple[RepeatedModule, ...]:
    """The modules of a joint graph that repeat one another, outermost and first in the graph first.

    Args:
        graph: the joint graph.
        work: what every node does that counts; equal for nodes that do the same in the same half of the step.
    """
    members = _members(graph, work)
    groups: defaultdict[tuple[str, tuple[Hashable, ...]], list[str]] = defaultdict(list)
    for path, nodes in members.items():
        done = tuple(work[node] for node in nodes)
        for pattern in _patterns(path):
            groups[pattern, done].append(path)
    found = [
        RepeatedModule(pattern, tuple(paths), tuple(tuple(members[path]) for path in paths))
        for (pattern, _), paths in groups.items()
        if len(paths) > 1
    ]
    return tuple(sorted(found, key=lambda module: module.pattern.count(".")))


def _members(graph: JointGraph, work: Mapping[fx.Node, Hashable]) -> dict[str, list[fx.Node]]:
    """Nodes below every module path, in graph order; paths by index, not alphabetically."""
    below: defaultdict[str, list[fx.Node]] = defaultdict(list)
    prefixes: dict[str, tuple[str, ...]] = {}
    for node in graph.graph.nodes:
        if node in work:
            path = graph.module_path(node)
            if path not in prefixes:
                prefixes[path] = tuple(_prefixes(path))
            for prefix in prefixes[path]:
                below[prefix].append(node)
    return dict(sorted(below.items(), key=lambda item: _order(item[0])))


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _patterns(path: str) -> Iterable[str]:
    """The path with each one of its indices replaced by `*`."""
    return (path[: match.start()] + "*" + path[match.end() :] for match in re.finditer(r"(?<![^.])\d+(?![^.])", path))


def _order(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]
