"""The meshes for a number of devices, with and without a pipeline axis (Rhino 3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from autoshard.cluster.cluster import Cluster
from autoshard.specs.axes import MeshShape

PIPELINE_AXIS = "pp"
AXES = ("x", "y", "z")
"""Names of the other axes. The planner decides their use: data, tensors, sequences."""

PipelineAxis = Literal["none", "outer", "inner"]
"""The position of the pipeline axis, if any: outermost, with neighbouring stages far apart, or innermost."""

_AxisKind = Literal["inside", "hosts", "across"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A mesh with its pipeline axis.

    Attributes:
        mesh: all axes.
        axis: the name of the pipeline axis; None without a pipeline.
    """

    mesh: MeshShape
    axis: str | None = None

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks; 1 without a pipeline."""
        return 1 if self.axis is None else self.mesh.sizes[self.mesh.index(self.axis)]

    @property
    def devices_per_rank(self) -> int:
        """The number of devices of each pipeline rank; all devices without a pipeline."""
        return self.mesh.size // self.ranks

    def __str__(self) -> str:
        return str(self.mesh)


def shapes(
    devices: int,
    cluster: Cluster,
    pipeline: PipelineAxis = "none",
    has_free_memory: Callable[[Shape], bool] = lambda shape: True,
) -> tuple[Shape, ...]:
    """Return all shapes of up to three axes for a number of devices, the most promising first.

    Shapes that differ in the order of adjacent axes over equal links are equivalent: only the one with the longer axis
    first is returned. Shapes with at most one axis inside hosts and one between hosts come first, then those that split
    these axes, then those with an axis over both kinds of links; within each group, those with free memory first, and
    of these those with fewer pipeline stages.

    Args:
        devices: the number of devices, from 1 up.
        cluster: provides the number of devices per host.
        pipeline: `"none"`: only shapes without a pipeline; `"outer"`, `"inner"`: also those with an outermost or
            innermost pipeline axis.
        has_free_memory: returns True if a step on a mesh is likely to leave much of the memory free.

    Source: Rhino 3 enumerates mesh configurations and searches a strategy for each.
    """
    every = [_shape(sizes, 1, "none") for sizes in _factorisations(devices, len(AXES))]
    if pipeline != "none":
        for ranks in (number for number in range(2, devices + 1) if devices % number == 0):
            inner = _factorisations(devices // ranks, len(AXES) - 1)
            every += [_shape(sizes, ranks, pipeline) for sizes in inner]
    canonical = [shape for shape in every if _is_canonical(shape, cluster)]

    def promise_key(shape: Shape) -> tuple[object, ...]:
        # A good plan early in the search saves work on the others.
        kinds = [kind for kind, _ in _kinds(shape, cluster) if kind is not None]
        split = len(kinds) - len(set(kinds))
        sizes = tuple(-size for size in shape.mesh.sizes)
        return "across" in kinds, split, not has_free_memory(shape), shape.ranks, sizes

    return tuple(sorted(canonical, key=promise_key))


def straddle_reason(shape: Shape, cluster: Cluster) -> str | None:
    """Return why the stages of a shape share hosts unevenly; None if they do not."""
    # Outermost axis: a stage is a row of neighbours. Innermost: a pipeline is, which must not straddle hosts.
    host = cluster.devices_per_host
    part = shape.devices_per_rank if _is_outermost(shape) else shape.ranks
    if shape.axis is None or shape.mesh.size <= host or part % host == 0 or host % part == 0:
        return None
    return f"{part} devices straddle the hosts, which have {host} devices each"


def coarser_shapes(shape: Shape, cluster: Cluster) -> tuple[Shape, ...]:
    """Return the shapes with two adjacent axes over equal links joined; this shape includes all their plans."""
    axes = [(kind, size) for kind, size in _kinds(shape, cluster) if kind is not None]
    sizes = tuple(size for _, size in axes)
    pipeline: PipelineAxis = "none" if shape.axis is None else "outer" if _is_outermost(shape) else "inner"
    return tuple(
        _shape((*sizes[:index], size * following, *sizes[index + 2 :]), shape.ranks, pipeline)
        for index, ((kind, size), (other, following)) in enumerate(itertools.pairwise(axes))
        # An axis over both kinds of links is not a join of two equal ones.
        if kind == other != "across"
    )


def _is_outermost(shape: Shape) -> bool:
    return shape.mesh.names[0] == shape.axis


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factorisations of a number into at most `most` factors above 1; that of 1 is empty."""
    if number == 1:
        yield ()
    elif most:
        for first in (factor for factor in range(2, number + 1) if number % factor == 0):
            for rest in _factorisations(number // first, most - 1):
                yield (first, *rest)


def _shape(sizes: tuple[int, ...], ranks: int, pipeline: PipelineAxis) -> Shape:
    named = dict(zip(AXES, sizes, strict=False))
    if pipeline == "none":
        return Shape(MeshShape.of(named or {AXES[0]: 1}))
    stages = {PIPELINE_AXIS: ranks}
    return Shape(MeshShape.of({**stages, **named} if pipeline == "outer" else {**named, **stages}), PIPELINE_AXIS)


def _kinds(shape: Shape, cluster: Cluster) -> Iterator[tuple[_AxisKind | None, int]]:
    """Yield every axis's kind of links, inside hosts, between hosts or both, and size; None for the pipeline."""
    sizes, host = shape.mesh.sizes, cluster.devices_per_host
    for index, name in enumerate(shape.mesh.names):
        stride = math.prod(sizes[index + 1 :])
        if name == shape.axis:
            yield None, sizes[index]
        elif shape.mesh.size <= host or host % (stride * sizes[index]) == 0:
            yield "inside", sizes[index]
        else:
            yield ("hosts" if stride % host == 0 else "across"), sizes[index]


def _is_canonical(shape: Shape, cluster: Cluster) -> bool:
    """Return True if, of adjacent axes over equal links, the longer one is first."""
    pairs = itertools.pairwise(_kinds(shape, cluster))
    # Over "across" links, the order of two axes decides which of them crosses hosts: both orders are tried.
    return not any(
        kind == next_kind and kind in ("inside", "hosts") and size < next_size
        for (kind, size), (next_kind, next_size) in pairs
    )
