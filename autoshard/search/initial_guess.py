"""Guesses of what a step holds: they decide which meshes and how many microbatches a search plans first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from autoshard.capture.joint import JointGraph
from autoshard.capture.nodes import is_view
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.graph_rules import value_of
from autoshard.search.request import Request
from autoshard.search.shapes import Shape
from autoshard.search.step_bounds import resident_bytes

_FREE_FRACTION = 0.5
"""The part of the memory that parameters, gradients and optimizer leave free where there is room for activations."""

_MICROBATCHES_PER_RANK = 4
"""Of a pipeline that is planned for one number of microbatches: it is idle for less than a quarter of its work."""


class InitialGuess:
    """Quick guesses of what a step holds: they order the search, and rule nothing out.

    Args:
        request: the model, the options and the limits.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._saved = saved_bytes(request.graph)

    def has_free_memory(self, shape: Shape) -> bool:
        """Return True if parameters and all that belongs to them leave much of the memory free."""
        return self._resident_bytes(shape) <= (1 - _FREE_FRACTION) * self._request.device_memory(shape)

    def microbatches(self, shape: Shape) -> int:
        """Return the number of microbatches that a pipeline is planned for first: about four per rank, or more."""
        numbers = self._request.feasible_numbers(shape)
        wanted = _MICROBATCHES_PER_RANK * shape.ranks
        free = self._request.device_memory(shape) - self._resident_bytes(shape)
        nearest = min(numbers, key=lambda number: (abs(math.log(number / wanted)), number))
        # The first stage saves its part of the model for one microbatch per rank: of all ranks' parts together, one
        # microbatch of the whole model. More microbatches are smaller ones, and save less.
        fitting = (
            number for number in numbers if number >= nearest and self._saved / number / shape.devices_per_rank <= free
        )
        return min(fitting, default=max(numbers))

    def _resident_bytes(self, shape: Shape) -> int:
        target = self._request.target
        per_host = target.cluster.devices_per_host
        return typical_bytes(self._request.graph, shape, target.settings.optimizer, per_host)


def typical_bytes(graph: JointGraph, shape: Shape, optimizer: OptimizerMemory, per_host: int) -> int:
    """Return the bytes that a device holds all through a step in the usual layout of models; this is no bound.

    Parameters, gradients and the optimizer's state are shared by the stages, and in a stage by the devices of a host,
    between which links are fast; every host of a stage has all of them.

    Args:
        graph: the captured step.
        shape: the mesh.
        optimizer: the memory of the optimizer.
        per_host: devices of a host.
    """
    parts = shape.ranks * min(per_host, shape.devices_per_rank)
    return sum(resident_bytes(graph, parts, optimizer, parameters_only=True))


def saved_bytes(graph: JointGraph) -> int:
    """Return the bytes of the forward half's results that the backward half needs, in whole tensors."""
    forward = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "forward"]
    saved = {
        value_of(node).name: value_of(node).meta.bytes
        for node in forward
        if not is_view(node) and any(graph.phase(user) == "backward" for user in _readers(node))
    }
    return sum(saved.values())


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a node and of its views."""
    for user in node.users:
        yield user
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
