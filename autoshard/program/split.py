"""The program in two halves that run apart: forward, which saves, and backward, which takes what was saved."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from autoshard.patterns.ring import lower_shifts
from autoshard.patterns.routed_exchange import exchange_ops
from autoshard.program._torch import compile_graph, split_joint, write_code
from autoshard.program.graph_parts import GraphPart, split_at_waits, split_by_results
from autoshard.program.localize import LocalStep
from autoshard.program.overlap import Arrangement, arrange_own
from autoshard.reshard.bucket import is_border
from autoshard.reshard.deferred_reductions import (
    DeferredReduction,
    PendingReductions,
    reduce_with_sums,
    take_reductions,
)
from autoshard.reshard.gathers import propagate_layers
from autoshard.size import DynamicSize, Ratio


@dataclass(frozen=True, slots=True, eq=False)
class GradientReduction:
    """How gradients are reduced that the backward half returns unreduced, to be added up over several runs of it.

    Attributes:
        places: of these among the step's gradients.
        last: what runs instead the last time: of the backward half, or of its second part if it has parts. It takes the
            sums of the runs before, too, behind all else; and returns gradients, and behind them what `end` takes.
        end: awaits what is left of the reductions, and returns those gradients; None if `last` returns all.
    """

    places: tuple[int, ...]
    last: GraphPart
    end: GraphPart | None


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """Forward and backward of a local step.

    The forward graph takes the program's inputs but the tangents, and returns the outputs of the forward and then
    `saved` tensors; the backward graph takes these and the tangents, and returns the gradients. Unless it is compiled,
    it takes them as one list, which it empties: what is saved is freed as it is used up. A forward-only step has no
    backward. Where it is asked for, `parts` is the backward graph in two: gradients of inputs, then those of
    parameters; and where it returns some of these unreduced, `reduction` is how they are reduced.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: int
    draws: bool  # whether the program takes random numbers
    forward_sizes: tuple[sympy.Expr, ...] = ()  # the numbers, by expression, that a half takes last
    backward_sizes: tuple[sympy.Expr, ...] = ()
    parts: tuple[GraphPart, GraphPart] | None = None
    reduction: GradientReduction | None = None

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graphs of both halves."""
        return tuple(half.graph for half in (self.forward, self.backward) if half is not None)


def split(
    step: LocalStep,
    compile: bool,
    in_parts: bool = False,
    reduced: DeferredReduction | None = None,
    arrange: Arrangement = arrange_own,
) -> Halves:
    """Split a local step with torch's partitioner, and join and order its collectives.

    Args:
        step: the program.
        compile: hand both halves to inductor, unless the data decides how many rows a rank holds; cheap operators are
            then recomputed in the backward half, unless the plan itself says what is done again.
        in_parts: whether gradients of parameters may be wanted later than those of inputs.
        reduced: if gradients of parameters are added up over several runs before they are reduced, which ones.
        arrange: joins and orders the collectives of a half; reductions of such sums are arranged as planned.
    """
    joint = step.graph_module
    propagate_layers(joint.graph)
    compile = compile and not _is_sized_by_data(joint)
    placeholders = joint.graph.find_nodes(op="placeholder")
    draws = any(node.users for node in placeholders if node.target == "seed")
    if any(border.kind == "gradient" for border in step.outputs):
        # The partitioner that recomputes cheap operators merges equal ones first, those that the plan repeats too.
        cheap = compile and not step.repeats
        forward, backward = split_joint(joint, len(step.forward_outputs), recompute=cheap)
    else:
        forward, backward = joint, None
    unreduced = None
    if reduced is not None and backward is not None:
        unreduced = take_reductions(backward.graph, _gradients_of(step, "parameter"), reduced)
    # What is made of the backward half takes the same numbers as it.
    taken = take_sizes(backward.graph) if backward is not None and (in_parts or unreduced is not None) else ()
    parts = split_by_results(backward, _gradients_of(step, "input")) if in_parts and backward is not None else None
    reduction = None
    if unreduced is not None and backward is not None:
        reduction = _reduction(unreduced, backward if parts is None else parts[1], compile, dynamic=bool(taken))
    backwards = [half for half in (backward, *(one.graph for one in parts or ())) if half is not None]
    for half in (forward, *backwards):
        half.graph.eliminate_dead_code(is_impure_node=is_border)
        arrange(half, half is forward)
        if compile:
            lower_shifts(half.graph)
    forward_sizes = take_sizes(forward.graph)
    backward_sizes = () if backward is None else (*taken, *take_sizes(backward.graph))
    for half in (forward, *backwards):
        half.graph.lint()
        write_code(half, take_list=not compile and half is not forward)
    output = next(iter(forward.graph.find_nodes(op="output")))
    saved = len(output.args[0]) - len(step.forward_outputs)
    if compile:
        dynamic = bool(forward_sizes or backward_sizes)
        forward = compile_graph(forward, dynamic=dynamic)
        backward = None if backward is None else compile_graph(backward, dynamic=dynamic)
        if parts is not None:
            first, second = (replace(one, graph=compile_graph(one.graph, dynamic=dynamic)) for one in parts)
            parts = first, second
    return Halves(forward, backward, saved, draws, forward_sizes, backward_sizes, parts, reduction)


def _reduction(
    unreduced: PendingReductions, ends: fx.GraphModule | GraphPart, compile: bool, dynamic: bool
) -> GradientReduction:
    """How what is left of gradients is done where the backward half, or its second part, runs last."""
    whole = ends.graph if isinstance(ends, GraphPart) else ends
    makes = ends.makes if isinstance(ends, GraphPart) else tuple(range(len(whole.graph.output_node().args[0])))  # type: ignore[arg-type]
    own = [makes.index(place) for place in unreduced.places]
    graph = fx.GraphModule(whole, reduce_with_sums(whole.graph, unreduced, own))
    if compile:
        lower_shifts(graph.graph)
        graph.recompile()
        takes = tuple(range(len(graph.graph.find_nodes(op="placeholder"))))
        return GradientReduction(unreduced.places, GraphPart(compile_graph(graph, dynamic=dynamic), takes, makes), None)
    last, end = (replace(one, makes=tuple(makes[place] for place in one.makes)) for one in split_at_waits(graph, own))
    for half in (last, end):
        write_code(half.graph, take_list=True)
    return GradientReduction(unreduced.places, last, end)


def _gradients_of(step: LocalStep, kind: str) -> list[int]:
    """Places, among the gradients, of those of one kind of what the step is given."""
    named = {border.name for border in step.inputs if border.kind == kind}
    gradients = [border.name for border in step.outputs if border.kind == "gradient"]
    return [place for place, name in enumerate(gradients) if name in named]


def take_sizes(graph: fx.Graph) -> tuple[sympy.Expr, ...]:
    """Make every number that depends on dynamic sizes an input of the graph, behind the others: their expressions."""
    last = list(graph.find_nodes(op="placeholder"))[-1]
    taken: dict[sympy.Expr, fx.Node] = {}

    def number(value: Any) -> Any:
        nonlocal last
        if not isinstance(value, (DynamicSize, Ratio)):
            return value
        if value.expr not in taken:
            with graph.inserting_after(last):
                taken[value.expr] = last = graph.placeholder(f"size_{len(taken)}")
            last.meta["val"] = int(value) if isinstance(value, DynamicSize) else float(value)
        return taken[value.expr]

    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), number)
    return tuple(taken)


def _is_sized_by_data(joint: fx.GraphModule) -> bool:
    """Whether ranks send each other as many rows as the data says; compiled code knows one size only."""
    if not joint.graph.find_nodes(op="call_function", target=exchange_ops.exchange.default):
        return False
    warnings.warn(
        "compile=True has no effect on this program, which runs operator by operator: it sends rows to the ranks of "
        "their groups, such as tokens to their experts, as many as the data says, and compiled code knows one size "
        "only. To have it compiled, place the groups' weights otherwise by a hint, such as Shard(1) for the weights of "
        "experts.",
        stacklevel=2,
    )
    return True
