"""What can be made once more on another stage, from inputs, buffers and constants, and what that takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from autoshard.capture.simplify import is_random


def recompute_seconds(
    calls: Sequence[fx.Node], seconds: Mapping[fx.Node, float], fixed: Collection[fx.Node]
) -> dict[fx.Node, float]:
    """Seconds of making a value once more, for every call of which that is possible.

    Args:
        calls: the calls of a graph, in its order.
        seconds: of every call, forward.
        fixed: nodes that can't be had on another stage: parameters, what has a gradient, and what is changed in place.

    Returns:
        For every call that depends on no fixed node and on no random numbers, the seconds of all that it depends on and
        of itself, each counted once.
    """
    cones: dict[fx.Node, frozenset[fx.Node]] = {}
    known = set(calls)
    for call in calls:
        possible = call not in fixed and not _draws(call)
        read = call.all_input_nodes
        if possible and all(source in cones if source in known else source not in fixed for source in read):
            cones[call] = frozenset({call}).union(*(cones[source] for source in read if source in cones))
    return {call: sum(seconds[one] for one in cone) for call, cone in cones.items()}


def _draws(call: fx.Node) -> bool:
    """Whether two calls may give different numbers; of a region, whether any of its calls may."""
    attributes = [source for source in call.all_input_nodes if source.op == "get_attr"]
    regions = [getattr(source.graph.owning_module, str(source.target), None) for source in attributes]
    inner = [one for region in regions if isinstance(region, fx.GraphModule) for one in region.graph.nodes]
    return is_random(call) or any(is_random(one) for one in inner)
