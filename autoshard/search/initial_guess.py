"""Where a search begins, by what a step is likely to hold: which meshes leave room, and with how many microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from autoshard.capture.joint import JointGraph
from autoshard.capture.nodes import is_view
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.graph_rules import Value, value_of
from autoshard.search.request import Request
from autoshard.search.shapes import Shape

_FREE_FRACTION = 0.5
"""Part of the memory that what is held all the time leaves free where there is room for what a step saves."""

_MICROBATCHES_PER_RANK = 4
"""Of a pipeline that is planned for one number: what leaves it idle for less than a quarter of its work."""


class InitialGuess:
    """Guesses of what a step holds, in no time: they say what to plan first, and rule nothing out.

    Args:
        request: what is searched for.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._saved = saved_bytes(request.graph)

    def has_free_memory(self, shape: Shape) -> bool:
        """Whether parameters and all that belongs to them leave much of the memory free."""
        return self._resident_bytes(shape) <= (1 - _FREE_FRACTION) * self._request.device_memory(shape)

    def microbatches(self, shape: Shape) -> int:
        """For how many microbatches a pipeline is planned first.

        About four per rank. More where more than fits would be saved otherwise: the first stage saves, of its part of
        the model, one microbatch for every rank.
        """
        numbers = self._request.feasible_numbers(shape)
        wanted = _MICROBATCHES_PER_RANK * shape.ranks
        free = self._request.device_memory(shape) - self._resident_bytes(shape)
        nearest = min(numbers, key=lambda one: (abs(math.log(one / wanted)), one))
        saving = (one for one in numbers if one >= nearest and self._saved / one / shape.devices_per_rank <= free)
        return min(saving, default=max(numbers))

    def _resident_bytes(self, shape: Shape) -> int:
        settings, cluster = self._request.target.settings, self._request.target.cluster
        return typical_bytes(self._request.graph, shape, settings.optimizer, cluster.devices_per_host)


def typical_bytes(graph: JointGraph, shape: Shape, optimizer: OptimizerMemory, per_host: int) -> int:
    """What a device holds all through a step, as models are most often laid out: no bound, but where to begin.

    Parameters, gradients and the optimizer's state are shared by the stages, and in a stage by the devices of a host,
    between which links are fast; every host of a stage has all of them.

    Args:
        graph: the captured step.
        shape: the mesh.
        optimizer: what it holds.
        per_host: devices of a host.
    """
    trained = {output.name: output.node for output in graph.outputs if output.kind == "gradient" and output.node}
    parts = shape.ranks * min(per_host, shape.devices_per_rank)
    held, updated = 0, []
    for source in graph.inputs:
        if source.kind != "parameter":
            continue
        meta = Value(source.node).meta
        own = -(-math.prod(meta.shape) // parts)
        held += own * meta.dtype.itemsize
        gradient = trained.get(source.name)
        if gradient is not None:
            held += own * gradient.meta["val"].element_size()
            held += optimizer.state_bytes(meta.shape, (own,), meta.dtype.itemsize)
            updated.append(own * meta.dtype.itemsize)
    return held + optimizer.step_bytes(updated)


def saved_bytes(graph: JointGraph) -> int:
    """What the backward half needs of what the forward half makes, in whole tensors."""
    made = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "forward"]
    saved = {
        value_of(node).name: value_of(node).meta.bytes
        for node in made
        if not is_view(node) and any(graph.phase(user) == "backward" for user in _readers(node))
    }
    return sum(saved.values())


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node or a view of it."""
    for user in node.users:
        yield user
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
