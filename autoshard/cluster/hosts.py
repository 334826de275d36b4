"""Which rank sits on which host, where hosts differ: stretches of ranks on hosts that are alike."""

from __future__ import annotations

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

    @property
    def hosts(self) -> int:
        """Their number."""
        return -(-self.count // self.devices_per_host)

    def is_like(self, other: Hosts) -> bool:
        """Whether the devices and links are of the same kind."""
        return (self.device, self.inside, self.between) == (other.device, other.inside, other.between)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank sits: the stretch of its host, by position, and the number of its host in the cluster."""

    stretch: int
    host: int


def place_of(stretches: Sequence[Hosts], rank: int) -> RankPlace:
    """Where a rank sits; `IndexError` if there are fewer."""
    hosts = 0
    for position, stretch in enumerate(stretches):
        if 0 <= rank < stretch.count:
            return RankPlace(position, hosts + rank // stretch.devices_per_host)
        rank -= stretch.count
        hosts += stretch.hosts
    raise IndexError(rank)


def stretches_of(stretches: Sequence[Hosts], places: Iterable[RankPlace]) -> tuple[Hosts, ...]:
    """Stretches in which these places come one after another.

    Neighbours stay on one host; places of one host with others between them count as of different hosts.
    """
    runs: list[Hosts] = []
    before = None
    for place in places:
        if place == before:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(replace(stretches[place.stretch], count=1))
        before = place
    made: list[Hosts] = []
    for run in runs:
        last = made[-1] if made else None
        whole = last is not None and last.count % last.devices_per_host == 0 and run.count <= last.devices_per_host
        if last is not None and whole and last.is_like(run):
            made[-1] = replace(last, count=last.count + run.count)
        else:
            made.append(replace(run, devices_per_host=run.count))
    return tuple(made)
