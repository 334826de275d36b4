"""Strongly connected components: what lies on a common cycle of edges."""

from __future__ import annotations

from collections.abc import Sequence


def components(nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """For every node the number of its component: nodes have the same one if each can be reached from the other.

    Source: Kosaraju's algorithm: depth-first, then against the edges from what was finished last.
    """
    after: list[list[int]] = [[] for _ in range(nodes)]
    before: list[list[int]] = [[] for _ in range(nodes)]
    for source, user in edges:
        after[source].append(user)
        before[user].append(source)
    component = [-1] * nodes
    for start in reversed(_postorder(after)):
        if component[start] >= 0:
            continue
        component[start], stack = start, [start]
        while stack:
            for node in before[stack.pop()]:
                if component[node] < 0:
                    component[node] = start
                    stack.append(node)
    return component


def _postorder(after: Sequence[Sequence[int]]) -> list[int]:
    """The nodes in the order in which a depth-first search leaves them."""
    seen = [False] * len(after)
    finished = []
    for start in range(len(after)):
        if seen[start]:
            continue
        seen[start], stack = True, [(start, iter(after[start]))]
        while stack:
            node, rest = stack[-1]
            following = next((user for user in rest if not seen[user]), None)
            if following is None:
                finished.append(node)
                stack.pop()
            else:
                seen[following] = True
                stack.append((following, iter(after[following])))
    return finished
