"""The meshes that a number of devices can be laid out as, with and without a pipeline axis (Rhino 3)."""

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
"""Names of the axes that no stages lie along. The planner decides what each is for: data, tensors, sequences."""

PipelineAxis = Literal["none", "outer", "inner"]
"""Where the axis of stages lies: nowhere; outermost, so that neighbouring stages are far apart; or innermost."""

_AxisKind = Literal["inside", "hosts", "across"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to lay out devices.

    Attributes:
        mesh: all axes.
        axis: name of the one along which pipeline stages lie; None without a pipeline.
    """

    mesh: MeshShape
    axis: str | None = None

    @property
    def ranks(self) -> int:
        """Of the pipeline; 1 without one."""
        return 1 if self.axis is None else self.mesh.sizes[self.mesh.index(self.axis)]

    @property
    def devices_per_rank(self) -> int:
        """Devices that one rank of the pipeline has; all without one."""
        return self.mesh.size // self.ranks

    def __str__(self) -> str:
        return str(self.mesh)


def shapes(
    devices: int, cluster: Cluster, pipeline: PipelineAxis = "none", roomy: Callable[[Shape], bool] = lambda shape: True
) -> tuple[Shape, ...]:
    """All shapes of up to three axes for a number of devices, the most promising first.

    Axes next to each other that run over equal links could be swapped without any difference: of such shapes there is
    one, the longer axis first. First come those with one axis inside hosts and one between hosts at most, then those
    that split these, then those with an axis over both; among them those that leave room, and of these those with fewer
    pipeline stages.

    Args:
        devices: how many there are; any number from 1 up.
        cluster: how many of them share a host.
        pipeline: `"none"`: shapes without a pipeline alone; `"outer"`, `"inner"`: those with one too, outermost or
            innermost.
        roomy: whether a step on a mesh leaves much of the memory free, as far as that can be told without a plan.

    Source: Rhino 3 enumerates mesh configurations and searches a strategy for each.
    """
    found = [_shape(sizes, 1, "none") for sizes in _factorisations(devices, len(AXES))]
    if pipeline != "none":
        for ranks in (number for number in range(2, devices + 1) if devices % number == 0):
            inner = _factorisations(devices // ranks, len(AXES) - 1)
            found += [_shape(sizes, ranks, pipeline) for sizes in inner]
    kept = [shape for shape in found if _is_canonical(shape, cluster)]
    return tuple(sorted(kept, key=lambda shape: _promise_key(shape, cluster, roomy)))


def straddle_reason(shape: Shape, cluster: Cluster) -> str | None:
    """Why stages must not be cut so: they share hosts unevenly. None where they do not."""
    host = cluster.devices_per_host
    part = shape.devices_per_rank if _is_outermost(shape) else shape.ranks
    if shape.axis is None or shape.mesh.size <= host or part % host == 0 or host % part == 0:
        return None
    return f"{part} devices straddle the hosts, which have {host} devices each"


def coarser_shapes(shape: Shape, cluster: Cluster) -> tuple[Shape, ...]:
    """The shapes in which two axes are one that run over equal links: what it can do, this shape can do too."""
    axes = [(kind, size) for kind, size in _kinds(shape, cluster) if kind is not None]
    sizes = tuple(size for _, size in axes)
    pipeline: PipelineAxis = "none" if shape.axis is None else "outer" if _is_outermost(shape) else "inner"
    return tuple(
        _shape((*sizes[:index], size * following, *sizes[index + 2 :]), shape.ranks, pipeline)
        for index, ((kind, size), (other, following)) in enumerate(itertools.pairwise(axes))
        if kind == other != "across"
    )


def _is_outermost(shape: Shape) -> bool:
    return shape.mesh.names[0] == shape.axis


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write a number as a product of at most so many factors above 1; 1 has the empty one."""
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
    """Of every axis what its groups join, devices of a host or whole hosts or both, and its size; None: stages."""
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
    """Whether no swap of axes that run over equal links puts a longer one first."""
    pairs = itertools.pairwise(_kinds(shape, cluster))
    return not any(
        one == other and one in ("inside", "hosts") and size < next_ for (one, size), (other, next_) in pairs
    )


def _promise_key(shape: Shape, cluster: Cluster, roomy: Callable[[Shape], bool]) -> tuple[object, ...]:
    """Shapes in this order are looked at: what is found early spares work on those that are no better."""
    kinds = [kind for kind, _ in _kinds(shape, cluster) if kind is not None]
    split = len(kinds) - len(set(kinds))
    return "across" in kinds, split, not roomy(shape), shape.ranks, tuple(-size for size in shape.mesh.sizes)
