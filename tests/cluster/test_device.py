"""Stretches of ranks on hosts: places, and what is left when some ranks are taken out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Device, Link
from autoshard.cluster.device import Hosts, RankPlace, place_of, stretches_of


def _hosts(name: str, count: int, per_host: int) -> Hosts:
    device = Device(name, 1, {"float32": 1.0, "bfloat16": 1.0, "float64": 1.0}, 1.0, 0.0)
    return Hosts(name, count, device, per_host, Link(2.0, 0.0), Link(1.0, 0.0))


CLUSTER = (_hosts("large", 8, 4), _hosts("small", 6, 4))


def test_ranks_fill_hosts_one_after_another() -> None:
    places = [place_of(CLUSTER, rank) for rank in range(14)]
    assert places == [RankPlace(0, rank // 4) for rank in range(8)] + [RankPlace(1, 2 + rank // 4) for rank in range(6)]


@pytest.mark.parametrize("rank", [-1, 14])
def test_there_is_no_rank_beyond_the_last(rank: int) -> None:
    with pytest.raises(IndexError):
        place_of(CLUSTER, rank)


def test_all_ranks_are_the_cluster_itself() -> None:
    assert stretches_of(CLUSTER, [place_of(CLUSTER, rank) for rank in range(14)]) == CLUSTER


def test_every_second_rank_leaves_half_hosts() -> None:
    built = stretches_of(CLUSTER, [place_of(CLUSTER, rank) for rank in range(0, 14, 2)])
    assert [(part.name, part.count, part.devices_per_host) for part in built] == [("large", 4, 2), ("small", 3, 2)]


@given(st.lists(st.integers(0, 13), min_size=1, max_size=12, unique=True))
def test_places_keep_their_device_and_neighbours_their_host(ranks: list[int]) -> None:
    places = [place_of(CLUSTER, rank) for rank in ranks]
    built = stretches_of(CLUSTER, places)
    new = [place_of(built, position) for position in range(len(ranks))]
    assert sum(part.count for part in built) == len(ranks)
    assert [built[place.stretch].device for place in new] == [CLUSTER[place.stretch].device for place in places]
    assert [a.host == b.host for a, b in pairwise(new)] == [a == b for a, b in pairwise(places)]
