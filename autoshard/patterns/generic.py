"""Sizes that stand for all that calls may have, where sizes are dynamic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

from autoshard.capture.joint import JointGraph
from autoshard.errors import InputError
from autoshard.size import Sizes, evaluate, is_dynamic
from autoshard.specs.axes import MeshShape

_TRIES = 4096


def generic_sizes(graph: JointGraph, mesh: MeshShape, other_than: Sizes | None = None) -> Sizes:
    """Values for the symbols of a graph, near the example's, that nothing but themselves is equal to.

    No mesh axis divides them, and no static size of the graph equals them, so that a program made for them takes
    nothing for equal, or for even, that at other sizes is not.

    Args:
        graph: a graph with dynamic sizes.
        mesh: the mesh axes.
        other_than: values that are to be others, as far as there are such.

    Raises:
        InputError: the range in which the graph holds has no such value.
    """
    taken = other_than or {}
    dynamic = graph.dynamic
    assert dynamic is not None
    static = {
        size
        for node in graph.graph.nodes
        for tensor in pytree.tree_leaves(node.meta.get("sizes", node.meta.get("val")))
        for size in (tensor.shape if isinstance(tensor, torch.Tensor) else (tensor,))
        if not is_dynamic(size)
    }
    shapes = [expr for dims in dynamic.dims.values() for expr in dims.values()]
    found = dict(dynamic.example)
    for name in found:
        low, high = dynamic.ranges[name]
        for value in itertools.islice(_near(max(found[name], 2 * mesh.size + 1), low, high), _TRIES):
            tried = found | {name: value}
            others = {found[other] for other in found if other != name}
            sizes = {int(evaluate(expr, tried)) for expr in shapes if name in expr.free_symbols}
            alone = math.gcd(value, mesh.size) == 1 and not sizes & (static | others) and value != taken.get(name)
            if alone and dynamic.serves(tried):
                found = tried
                break
        else:
            if name in taken:
                found = found | {name: taken[name]}
                continue
            raise InputError(
                f'dynamic: no size of "{name}" from {low} to {"any" if high is None else high} can stand for all '
                f"others on the mesh {mesh}: one that no axis divides and that no other size of the model equals. "
                f'Leave "{name}" out of dynamic, so that every size is planned by itself.'
            )
    return found


def _near(start: int, low: int, high: int | None) -> Iterator[int]:
    """Numbers from low to high, those from `start` on first, then those below it."""
    above = itertools.count(start) if high is None else range(start, high + 1)
    return itertools.chain(above, range(min(start, start if high is None else high), low - 1, -1))
