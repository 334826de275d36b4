"""A rank's shard as blocks, which are boxes of the whole tensor: the form in which files are written and read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_indices
from autoshard.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A box of a tensor that one rank holds: its ranges per dim in the whole tensor, and in the local one."""

    whole: tuple[slice, ...]
    local: tuple[slice, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(place.start for place in self.whole)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(place.stop - place.start for place in self.whole)


def blocks_of(shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]) -> Iterator[ShardBlock]:
    """Yield the blocks of the rank at `coordinate`: one where nothing is strided, none where the shard is empty."""
    indices = local_indices(shape, spec, mesh, coordinate)
    # A box for every combination of runs of its dims.
    for runs in itertools.product(*(_runs(index) for index in indices)):
        yield ShardBlock(tuple(whole for whole, _ in runs), tuple(local for _, local in runs))


def _runs(indices: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return runs of consecutive indices: the range of the indices, and the range of their places."""
    # Without strides: a large dim is not walked through.
    if isinstance(indices, range):
        return [(slice(indices.start, indices.stop), slice(0, len(indices)))] if indices else []
    breaks = [place for place in range(1, len(indices)) if indices[place] != indices[place - 1] + 1]
    edges = [0, *breaks, len(indices)]
    return [
        (slice(indices[start], indices[stop - 1] + 1), slice(start, stop))
        for start, stop in itertools.pairwise(edges)
        if start < stop
    ]
