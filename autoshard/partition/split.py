"""The program in two halves that run apart: forward, which saves, and backward, which takes what was saved."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoshard.partition._torch import compile_graph, split_joint
from autoshard.partition.bucket import bucket_reductions
from autoshard.partition.localize import LocalStep
from autoshard.partition.overlap import await_late, gather_ahead


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """Forward and backward of a local step.

    The forward graph takes the program's inputs but the tangents, and returns the outputs of the forward and then
    `saved` tensors; the backward graph takes these and the tangents, and returns the gradients. A forward-only step
    has no backward.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: int
    draws: bool  # whether the program takes random numbers


def split(step: LocalStep, compile: bool) -> Halves:
    """Split a local step with torch's partitioner and schedule its collectives.

    Args:
        step: the program.
        compile: hand both halves to inductor; cheap operators are then recomputed in the backward half.
    """
    joint = step.graph_module
    placeholders = joint.graph.find_nodes(op="placeholder")
    draws = any(node.users for node in placeholders if node.target == "seed")
    if any(border.kind == "gradient" for border in step.outputs):
        forward, backward = split_joint(joint, len(step.forward_outputs), recompute=compile)
    else:
        forward, backward = joint, None
    for half in (forward, backward):
        if half is not None:
            bucket_reductions(half.graph)
            await_late(half.graph)
            gather_ahead(half.graph)
            half.graph.lint()
            half.recompile()
    output = next(iter(forward.graph.find_nodes(op="output")))
    saved = len(output.args[0]) - len(step.forward_outputs)
    if compile:
        forward = compile_graph(forward)
        backward = None if backward is None else compile_graph(backward)
    return Halves(forward, backward, saved, draws)
