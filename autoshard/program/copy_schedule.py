"""Schedule of the copies to and from the host in half a program: concurrent with compute, as far as bytes allow.

A copy to the host starts when its tensor exists, and is awaited before later copies would hold too many bytes. A copy
back is issued ahead of its first reader, after the waits of copies that are read before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import fx

from autoshard.capture.host_copies import AWAIT_COPY, START_TO_DEVICE, START_TO_HOST, TO_DEVICE, TO_HOST

# At 50 GB/s, copying these takes 11 ms: about the compute of a layer of a model of 8 billion parameters.
COPIED_BYTES = 512 * 2**20
"""Most bytes on a device that copies of one direction hold at once."""

_AHEAD = 2  # most pending copies of the largest size: small programs hold little more than their largest


def schedule_copies(graph: fx.Graph, limit: int = COPIED_BYTES) -> None:
    """Make the copies of half a program run concurrently with its compute.

    Args:
        graph: the half, whose other calls are in their final order.
        limit: the most bytes that copies of one direction hold on the device. A larger tensor is copied alone.
    """
    _await_late([node for node in graph.nodes if node.target is TO_HOST], limit)
    _start_early([node for node in graph.nodes if node.target is TO_DEVICE], limit)


def _await_late(copies: Sequence[fx.Node], limit: int) -> None:
    """Await copies to the host in order, each where the next one would exceed the limit, or at the end."""
    limit = _limit(copies, limit)
    pending: deque[fx.Node] = deque()
    for copy in copies:
        copy.target = START_TO_HOST
        while pending and sum(map(_bytes, (*pending, copy))) > limit:
            _await(pending.popleft(), copy)
        pending.append(copy)
    for copy in pending:
        _await(copy, copy.graph.output_node())


def _start_early(copies: Sequence[fx.Node], limit: int) -> None:
    """Issue copies from the host in the order of their first readers, each as early as the limit allows."""
    limit = _limit(copies, limit)
    waits: list[fx.Node] = []
    sizes: list[int] = []
    first = 0  # the oldest copy that may be pending together with the next one
    for copy in sorted(copies, key=lambda copy: min(copy.users)):
        copy.target = START_TO_DEVICE
        waits.append(_await(copy, min(copy.users)))
        sizes.append(_bytes(copy))
        while first < len(waits) - 1 and sum(sizes[first:]) > limit:
            first += 1
        # If all earlier copies may be pending, the half begins with it.
        place = _first_call(copy.graph) if first == 0 else waits[first - 1].next
        if place < copy:
            place.prepend(copy)
            copy.meta = _meta_at(copy, place)


def _limit(copies: Sequence[fx.Node], limit: int) -> int:
    return min(limit, _AHEAD * max(map(_bytes, copies), default=0))


def _await(copy: fx.Node, place: fx.Node) -> fx.Node:
    """Await a copy before a call, for all of its users."""
    arguments = tuple(copy.all_input_nodes) if copy.target is START_TO_HOST else ()
    meta = _meta_at(copy, place)
    with copy.graph.inserting_before(place):
        # Its source is held until the copy has ended.
        wait = copy.graph.call_function(AWAIT_COPY, (copy, *arguments))
    copy.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)
    wait.meta = meta
    return wait


def _meta_at(node: fx.Node, place: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node that is moved to `place`, with the position of the operator there."""
    place = place if "position" in place.meta else place.prev  # the output has none
    return {**node.meta, "position": place.meta["position"]} if "position" in place.meta else dict(node.meta)


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function")


def _bytes(copy: fx.Node) -> int:
    value = copy.meta["val"]
    return int(value.numel()) * int(value.element_size())
