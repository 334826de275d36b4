"""Mesh axes and shapes.

A mesh axis whose ranks hold shares of their own.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import MeshError
from autoshard.size import DynamicSize, Ratio, at, ceil_div, symbol
from autoshard.specs.axes import MeshAxis, MeshShape, SharedAxis
from tests.reshard.ranks import ranks


def test_a_mapping_names_axes_in_order() -> None:
    mesh = MeshShape.of({"dp": 2, "tp": 3})
    assert mesh.axes == (MeshAxis("dp", 2), MeshAxis("tp", 3))
    assert (mesh.names, mesh.sizes, mesh.ndim, mesh.size) == (("dp", "tp"), (2, 3), 2, 6)
    assert mesh.index("tp") == 1
    assert str(mesh) == "dp=2, tp=3"
    assert MeshShape.of(mesh) is mesh


def test_coordinates_are_in_rank_order() -> None:
    with ranks(dp=2, tp=3) as world:
        places = [tuple((world.device_mesh.mesh == rank).nonzero()[0].tolist()) for rank in range(6)]
        assert list(MeshShape.of(world.device_mesh).coordinates()) == places
        assert MeshShape.of(world.device_mesh) == world.mesh


@pytest.mark.parametrize("mesh", [{}, {"dp": 0}, {"dp": True}, {"dp": 1.5}, 8, {"dp": 10**30}])
def test_what_is_no_mesh_is_refused(mesh: object) -> None:
    with pytest.raises(MeshError):
        MeshShape.of(mesh)  # type: ignore[arg-type]


def test_an_unknown_axis_is_named_with_those_there_are() -> None:
    with pytest.raises(MeshError, match=r"no axis 'pp'.*dp=2, tp=2"):
        MeshShape.of({"dp": 2, "tp": 2}).index("pp")


BATCH = symbol("batch")
SHARED = SharedAxis(axis=0, ranks=3, whole=BATCH)
SIZES = SHARED.example({BATCH: 13})
WHOLE = DynamicSize.of(BATCH, {BATCH: 13})


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(0, 2))
def test_the_symbols_add_up(counts: list[int], rank: int) -> None:
    sizes = {BATCH: sum(counts), **SHARED.sizes(counts, rank)}
    assert [int(at(DynamicSize.of(SHARED.share_of_rank(place), SIZES), sizes)) for place in range(3)] == counts
    assert (sizes[SHARED.own_share], sizes[SHARED.share_before]) == (counts[rank], sum(counts[:rank]))
    assert sizes[SHARED.largest_share] == max(counts)


def test_the_example_is_a_rank_with_a_whole_block() -> None:
    assert SIZES[SHARED.own_share] == ceil_div(13, 3) == 5
    assert SIZES[SHARED.share_before] == 0
    even = SHARED.example({BATCH: 12})
    assert (even[SHARED.own_share], even[SHARED.largest_share]) == (4, 4)


def test_a_block_becomes_a_share_and_the_whole_stays() -> None:
    chosen = SHARED.with_share(ceil_div(WHOLE, 3) * 7, SIZES)
    assert chosen.expr == 7 * SHARED.own_share
    assert SHARED.is_shared((2, chosen))
    assert not SHARED.is_shared((2, WHOLE))
    assert SHARED.with_share(WHOLE * 4, SIZES).expr == 4 * BATCH
    assert SHARED.with_share(5, SIZES) == 5


def test_the_part_of_all_elements_that_a_rank_has_is_its_share_of_them() -> None:
    part = SHARED.with_share(ceil_div(WHOLE, 3) / WHOLE, SIZES)
    assert isinstance(part, Ratio)
    assert at(part, {BATCH: 6, **SHARED.sizes((3, 2, 1), 1)}) == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    "number",
    [
        ceil_div(WHOLE, 3) * 3 - WHOLE,  # how much pads equal blocks
        ceil_div(WHOLE * 4, 3),  # a block of rows that are not whole samples
        4 % ceil_div(WHOLE, 3),
        WHOLE / ceil_div(WHOLE, 3),
    ],
)
def test_what_counts_blocks_has_no_counterpart(number: int) -> None:
    with pytest.raises(ValueError, match="neither a multiple of a rank's share nor a number of the whole"):
        SHARED.with_share(number, SIZES)


def test_a_size_is_the_shared_one_or_made_of_it() -> None:
    assert SHARED.is_whole(WHOLE)
    assert not SHARED.is_whole(13)
    assert not SHARED.is_whole(2 * WHOLE)
    assert SHARED.is_of_whole(2 * WHOLE)
    assert not SHARED.is_of_whole(DynamicSize.of(symbol("seq"), {symbol("seq"): 4}))


def test_blocks_of_other_axes_are_multiples_or_have_nothing_of_it() -> None:
    assert SHARED.is_multiple(WHOLE * 4, 2)
    assert not SHARED.is_multiple(WHOLE * 3, 2)
    assert not SHARED.is_multiple(WHOLE, 3)  # as long as a share, and none
    assert SHARED.is_multiple(WHOLE, 1)
    assert SHARED.is_multiple(7, 2)
