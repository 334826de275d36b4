"""Random meshes, shapes and specs."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import Segment, merge_loops, spec_of
from autoshard.specs.spec import Spec, shard_placement

REDUCTIONS = ("sum", "avg", "product", "max", "min")


def meshes(most_axes: int = 3, most_size: int = 4) -> st.SearchStrategy[MeshShape]:
    """Meshes of one to `most_axes` axes, each of 1 to `most_size` devices."""
    sizes = st.lists(st.integers(1, most_size), min_size=1, max_size=most_axes)
    return sizes.map(lambda sizes: MeshShape.of({f"a{axis}": size for axis, size in enumerate(sizes)}))


def shapes(ndim: int, sizes: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `ndim` dims; by default of sizes that divide now and then."""
    sizes = sizes or st.sampled_from((1, 4, 5, 6, 12, 24, 48))
    return st.tuples(*[sizes] * ndim)


def placements(ndim: int, factors: tuple[int, ...] = (1, 2, 3, 4)) -> st.SearchStrategy[Placement]:
    """Any placement of a tensor of `ndim` dims."""
    shards = st.builds(shard_placement, st.integers(0, ndim - 1), st.sampled_from(factors))
    return st.one_of(st.just(Replicate()), st.sampled_from(REDUCTIONS).map(Partial), shards, shards)


@st.composite
def specs(draw: st.DrawFn, axes: int, ndim: int, factors: tuple[int, ...] = (1, 2, 3, 4)) -> Spec:
    """Any spec on `axes` mesh axes of a tensor of `ndim` dims, with reductions of one kind."""
    drawn = [draw(placements(ndim, factors)) for _ in range(axes)]
    kind = draw(st.sampled_from(REDUCTIONS))
    return Spec.of(*(Partial(kind) if isinstance(placement, Partial) else placement for placement in drawn))


@st.composite
def placed_shapes(draw: st.DrawFn, ndim: int = 2) -> tuple[MeshShape, tuple[int, ...], Spec]:
    """A mesh, a shape, and any spec on them, even or not."""
    mesh = draw(meshes())
    return mesh, draw(shapes(ndim)), draw(specs(mesh.ndim, ndim))


@st.composite
def blocked_shapes(draw: st.DrawFn) -> tuple[MeshShape, tuple[int, ...], Spec]:
    """A mesh, a shape, and a spec whose first dim holds a loop that an axis does not divide, others above and below."""
    mesh = draw(meshes(most_size=5))
    uneven, *others = draw(st.permutations(range(mesh.ndim)))
    size, steps = mesh.sizes[uneven], draw(st.integers(2, 9))
    block = math.ceil(steps / size)
    loops = [Segment(draw(st.integers(1, 3)))]
    below = [Segment(draw(st.integers(1, 4)))]
    for axis in others:
        place = draw(st.sampled_from((None, loops, below)))
        if place is not None:
            place += [Segment(mesh.sizes[axis], axis), Segment(draw(st.integers(1, 2)))]
    common = math.gcd(block, steps)
    share = (block // common, steps // common) if block * size > steps else (0, 0)
    layout = (merge_loops([*loops, Segment(size, uneven, *share), Segment(block), *below]), (Segment(3),))
    true = math.prod(loop.size for loop in (*loops, *below)) * steps
    return mesh, (true, 3), spec_of(layout, {}, mesh)
