"""The places of ranks on hosts that differ: stretches of ranks on hosts that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.device import Device, Link


@dataclass(frozen=True, slots=True)
class Hosts:
    """Consecutive ranks on hosts that are alike; the first of them is the first of a host.

    Attributes:
        name: of the kind, such as `"V100-32GB"`.
        count: ranks.
        device: of every rank.
        devices_per_host: ranks of every host; the last host may have fewer.
        inside: the link between devices of one host.
        between: the link between devices of different hosts.
    """

    name: str
    count: int
    device: Device
    devices_per_host: int
    inside: Link
    between: Link


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank: the position of its stretch, and the number of its host in the cluster."""

    stretch: int
    host: int


def place_of(stretches: Sequence[Hosts], rank: int) -> RankPlace:
    """Return the place of a rank; `IndexError` if there are fewer ranks."""
    hosts = 0
    for position, stretch in enumerate(stretches):
        if 0 <= rank < stretch.count:
            return RankPlace(position, hosts + rank // stretch.devices_per_host)
        rank -= stretch.count
        hosts += -(-stretch.count // stretch.devices_per_host)
    raise IndexError(rank)


def stretches_of(stretches: Sequence[Hosts], places: Iterable[RankPlace]) -> tuple[Hosts, ...]:
    """Return stretches in which the ranks at these places come one after another.

    Neighbours stay on one host; places of one host with others between them count as of different hosts.
    """
    joined: list[Hosts] = []
    for place, run in itertools.groupby(places):
        count = len(list(run))
        # Each run of ranks on one host begins as a host of its own, with as many devices as ranks were chosen there.
        host = replace(stretches[place.stretch], count=count, devices_per_host=count)
        last = joined[-1] if joined else None
        # A stretch numbers its hosts by division, so that only its last host may be smaller than the others.
        if (
            last is not None
            and last.count % last.devices_per_host == 0
            and host.count <= last.devices_per_host
            and (host.device, host.inside, host.between) == (last.device, last.inside, last.between)
        ):
            joined[-1] = replace(last, count=last.count + host.count)
        else:
            joined.append(host)
    return tuple(joined)
