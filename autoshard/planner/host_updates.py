"""Optimizer state on the host, and updates there (ZeRO-Offload): their seconds, and their bytes.

The gradient and the parameter are copied to the host, the host updates parameter and state, and the parameter is copied
back. Copies of one parameter overlap with the update of another; nothing overlaps with the step.

Source: ZeRO-Offload (Ren et al., 2021), 4.1, without the overlap of copies with the backward half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoshard.cluster.cost import CostModel
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import Value
from autoshard.simulate.events import FROM_HOST_STREAM, TO_HOST_STREAM, Operation, replay
from autoshard.specs.layout import local_shape

_HOST_STREAM = "the host"


class HostUpdate(NamedTuple):
    """The update of one parameter with its optimizer state on the host.

    Attributes:
        to_host: seconds of the copies of gradient and parameter to the host.
        update: seconds of the update there, at the bandwidth of the host's memory.
        from_host: seconds of the copy of the parameter back.
        bytes: of the host, for the state and the copies.
    """

    to_host: float
    update: float
    from_host: float
    bytes: int

    @staticmethod
    def of(
        optimizer: OptimizerMemory, cost: CostModel, shape: Sequence[int], local: Sequence[int], itemsize: int
    ) -> HostUpdate:
        """Return the update of a parameter; arguments as of `OptimizerMemory.state_bytes`."""
        held = math.prod(local) * itemsize
        return HostUpdate(
            2 * cost.host_copy(held),
            cost.host_update(optimizer.moved_bytes(shape, local, itemsize, held)),
            cost.host_copy(held),
            optimizer.state_bytes(shape, local, itemsize) + 2 * held,
        )

    @property
    def seconds(self) -> float:
        """The longest of the three: the least that the update adds to many others."""
        return max(self.to_host, self.update, self.from_host)


def host_updates(flow: Flow, optimizer: OptimizerMemory, cost: CostModel) -> list[HostUpdate]:
    """Return the updates of the parameters whose optimizer state is on the host under some decisions."""
    hosted = [source.node for source in flow.graph.parameters if source.node.name in flow.decisions.hosted]
    parts = [(Value(node).meta, flow.decisions.rest[node.name]) for node in hosted]
    return [
        HostUpdate.of(optimizer, cost, meta.shape, local_shape(meta.shape, spec, flow.mesh), meta.dtype.itemsize)
        for meta, spec in parts
    ]


class StateOption(NamedTuple):
    """Bytes and seconds of having the optimizer state of one parameter on the host.

    Attributes:
        node: the parameter's placeholder.
        seconds: of the update there, as `HostUpdate.seconds`.
        state: bytes that it frees throughout the step.
        temporaries: further bytes that it frees in the optimizer's step.
    """

    node: str
    seconds: float
    state: int
    temporaries: int


def state_options(flow: Flow, optimizer: OptimizerMemory, cost: CostModel) -> list[StateOption]:
    """Return the option of having its state on the host for every trained parameter of a graph."""
    options = []
    for source in flow.graph.parameters:
        if source.name in flow.graph.gradients:
            meta, name = Value(source.node).meta, source.node.name
            local = local_shape(meta.shape, flow.decisions.rest[name], flow.mesh)
            held, state = math.prod(local) * meta.dtype.itemsize, (meta.shape, local, meta.dtype.itemsize)
            # Temporaries of one parameter at a time are those of the largest, whatever the others do.
            temporaries = optimizer.together * held if optimizer.foreach else 0
            seconds = HostUpdate.of(optimizer, cost, *state).seconds
            options.append(StateOption(name, seconds, optimizer.state_bytes(*state), temporaries))
    return options


def cheapest_cover(options: Sequence[StateOption], bytes: float, step_bytes: float) -> list[StateOption] | None:
    """Return cheap options that free `bytes` throughout the step, and `step_bytes` in the optimizer's step.

    The cheaper of two greedy covers without unnecessary options: adding the cheapest bytes first, or removing the most
    expensive options first. None if all options free too little.
    """

    def covers(chosen: Sequence[StateOption]) -> bool:
        freed = sum(option.state for option in chosen)
        return freed >= bytes and freed + sum(option.temporaries for option in chosen) >= step_bytes

    if not covers(options):
        return None
    ranked = sorted((each for each in options if each.state), key=lambda option: option.seconds / option.state)
    first = next(ranked[:count] for count in range(len(ranked) + 1) if covers(ranked[:count]))
    found = []
    for chosen in (first, ranked):
        left = [*chosen]
        for option in sorted(chosen, key=lambda option: -option.seconds):
            others = [each for each in left if each is not option]
            left = others if covers(others) else left
        found.append(left)
    return min(found, key=lambda chosen: sum(option.seconds for option in chosen))


def update_seconds(updates: Iterable[HostUpdate]) -> float:
    """Return the seconds of updates in this order, with copies that overlap with other updates."""
    operations: list[Operation] = []
    for update in updates:
        place = len(operations)
        operations += [
            Operation("to host", TO_HOST_STREAM, update.to_host),
            Operation("update", _HOST_STREAM, update.update, (place,)),
            Operation("from host", FROM_HOST_STREAM, update.from_host, (place + 1,)),
        ]
    return replay(operations).seconds
