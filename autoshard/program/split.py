"""A program in two separate halves: forward, which saves tensors, and backward, which takes them.

Zero-bubble schedules of pipelines also run the backward half in two parts: gradients of inputs as soon as possible,
since the previous stage waits for them, and those of parameters in idle time. Reductions of gradients are awaited when
there is nothing else to do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from autoshard.errors import warn_caller
from autoshard.patterns.exchanging import exchange_ops, lower_shifts
from autoshard.program._torch import compile_graph, split_joint, write_code
from autoshard.program.aliasing import write_in_place
from autoshard.program.cheap_saves import compute_where_read
from autoshard.program.copy_schedule import schedule_copies
from autoshard.program.fusion import keep_joins
from autoshard.program.localize import LocalStep
from autoshard.reshard.collective_schedule import propagate_layers, schedule
from autoshard.reshard.reductions import (
    DeferredReduction,
    PendingReductions,
    bucket_reductions,
    is_border,
    reduce_with_sums,
    take_reductions,
)
from autoshard.size import DynamicSize, is_dynamic
from autoshard.specs.emitter import collectives


@dataclass(frozen=True, slots=True)
class GraphPart:
    """One part of a graph.

    Attributes:
        graph: the first part returns values for the second after its results, which takes them after its arguments.
        takes: positions of its arguments among those of the whole graph.
        makes: positions of its results among those of the whole graph.
    """

    graph: fx.GraphModule
    takes: tuple[int, ...]
    makes: tuple[int, ...]


def split_by_results(whole: fx.GraphModule, first: Sequence[int]) -> tuple[GraphPart, GraphPart]:
    """Split a graph that returns a tuple into everything that the results at positions `first` need, and the rest.

    Nothing is computed twice: the second part takes values from the first.
    """
    results = _results(whole)
    early = {results[place] for place in first}
    pending = list(early)
    # The list grows while it is iterated.
    for node in pending:
        fresh = [source for source in node.all_input_nodes if source not in early]
        early.update(fresh)
        pending += fresh
    # A part cannot pass on a tuple: several results of one operator are passed one by one.
    early |= {user for node in early for user in node.users if user.target is operator.getitem}
    return _split_calls(whole, early, tuple(first))


def split_at_waits(whole: fx.GraphModule, places: Sequence[int]) -> tuple[GraphPart, GraphPart]:
    """Split a graph that returns a tuple before the waits for the last collectives of results at these positions.

    The second part returns only results that share no collective with others.
    """
    output, results = whole.graph.output_node(), _results(whole)
    ends = {place: _wait_chain(results[place]) for place in places}
    # Removing a result from the second part also removes its wait, which another result may need, too.
    while True:
        late = set().union(*ends.values())
        shared = {node for node in late if not late.issuperset({*node.users} - {output})}
        alone = {place: nodes for place, nodes in ends.items() if shared.isdisjoint(nodes)}
        if len(alone) == len(ends):
            break
        ends = alone
    rest = tuple(place for place in range(len(results)) if place not in ends)
    return _split_calls(whole, {node for node in whole.graph.nodes if node not in late}, rest)


def _results(whole: fx.GraphModule) -> tuple[Any, ...]:
    return tuple(whole.graph.output_node().args[0])  # type: ignore[arg-type]


def _wait_chain(result: fx.Node) -> set[fx.Node]:
    """Return the views from a result back to the wait for its collective, and that wait."""
    chain = {result}
    while result.target is not collectives.wait_tensor.default:
        (result,) = result.all_input_nodes
        chain.add(result)
    return chain


def _split_calls(whole: fx.GraphModule, early: Set[fx.Node], first: tuple[int, ...]) -> tuple[GraphPart, GraphPart]:
    """Return the part that runs the calls in `early` and returns the results at positions `first`, and the rest."""
    results = _results(whole)
    calls = [node for node in whole.graph.nodes if node.op == "call_function"]
    late = [node for node in calls if node not in early]
    rest = tuple(place for place in range(len(results)) if place not in first)
    read = dict.fromkeys(source for node in late for source in node.all_input_nodes)
    read |= dict.fromkeys(results[place] for place in rest)
    # The second part takes arguments of the whole graph itself.
    handed = [node for node in read if node in early and node.op == "call_function"]
    return (
        _extract_part(whole, [node for node in calls if node in early], (), first, handed),
        _extract_part(whole, late, handed, rest, ()),
    )


def _extract_part(
    whole: fx.GraphModule,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    makes: tuple[int, ...],
    handed: Sequence[fx.Node],
) -> GraphPart:
    """Return a graph of these nodes, which takes the placeholders that they read, and `given`."""
    results = _results(whole)
    returned = [*(results[place] for place in makes), *handed]
    read = {*returned}.union(*(node.all_input_nodes for node in nodes))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    takes = []
    for place, node in enumerate(whole.graph.find_nodes(op="placeholder")):
        if node in read:
            copies[node] = graph.node_copy(node)
            takes.append(place)
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    # Both parts may read constants.
    for node in whole.graph.find_nodes(op="get_attr"):
        if node in read:
            copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in returned))
    graph.lint()
    return GraphPart(fx.GraphModule(whole, graph), tuple(takes), makes)


@dataclass(frozen=True, slots=True, eq=False)
class GradientReduction:
    """The reduction of gradients that the backward half returns unreduced, to be summed over several runs.

    Attributes:
        places: positions of these gradients among all gradients of the step.
        last: replaces the backward half, or its second part, in the last run. Its last arguments are the sums of
            earlier runs; its last results are the arguments of `end`.
        alone: takes these gradients, or sums of them, as a list, and returns them reduced.
        end: awaits the rest of the reductions and returns those gradients; None if `last` returns all.
    """

    places: tuple[int, ...]
    last: GraphPart
    alone: fx.GraphModule
    end: GraphPart | None


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """Forward and backward of a local step.

    The backward graph takes its arguments as one list, which it empties: a saved tensor is freed after its last use.

    Attributes:
        forward: takes the program's inputs except tangents; returns the forward outputs and then the saved tensors.
        backward: takes the saved tensors and the tangents; returns the gradients. None for a step without gradients.
        saved: the number of saved tensors.
        draws: True if the program draws random numbers.
        forward_sizes: the expressions of the numbers that are the last arguments of the forward graph.
        backward_sizes: those of the backward graph.
        parts: if requested, the backward graph in two parts: gradients of inputs, then those of parameters.
        reduction: of the gradients that the backward graph returns unreduced, if any.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: int
    draws: bool
    forward_sizes: tuple[sympy.Expr, ...] = ()
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
    in_place: bool = False,
) -> Halves:
    """Split a local step with torch's partitioner, and join and schedule its collectives.

    Args:
        step: the program.
        compile: True to compile both halves by inductor, unless the data decides how many rows a rank holds. The
            backward half then recomputes cheap tensors (`cheap_saves`).
        in_parts: True if gradients of parameters may be needed later than those of inputs.
        reduced: which gradients of parameters are summed over several runs before they are reduced, if any.
        in_place: True if the forward half may write into inputs that the step changes, if there is no backward half
            and the program is not compiled.
    """
    joint = step.graph_module
    propagate_layers(joint.graph)
    compile = compile and not _is_sized_by_data(joint)
    placeholders = joint.graph.find_nodes(op="placeholder")
    draws = any(node.users for node in placeholders if node.target == "seed")
    if step.gradients:
        forward, backward = split_joint(joint, len(step.forward_outputs))
        if compile:
            _drop_cheap_saves(forward, backward, len(step.forward_outputs))
    else:
        forward, backward = fx.GraphModule(joint, _copy(joint.graph)), None
    taken: tuple[sympy.Expr, ...] = ()
    unreduced = parts = reduction = None
    if backward is not None:
        if reduced is not None:
            unreduced = take_reductions(backward.graph, _gradients_of(step, "parameter"), reduced)
        # Make numbers inputs of the backward half before other graphs are made from it, which take the same.
        if in_parts or unreduced is not None:
            taken = take_sizes(backward.graph)
        if in_parts:
            parts = split_by_results(backward, _gradients_of(step, "input"))
        if unreduced is not None:
            reduction = _reduction(unreduced, backward if parts is None else parts[1], compile, dynamic=bool(taken))
    backwards = [half for half in (backward, *(part.graph for part in parts or ())) if half is not None]
    for half in (forward, *backwards):
        # For torch, random operators are impure: it would keep dead ones.
        half.graph.eliminate_dead_code(is_impure_node=is_border)
        # Reductions of the forward half are not joined: a stored loss would keep the whole buffer alive.
        if half is not forward:
            bucket_reductions(half.graph)
        schedule(half.graph)
        # Compiled code has no concurrent copies: it copies in order.
        if not compile:
            schedule_copies(half.graph)
        # A compiler would reuse memory that a shift still reads.
        if compile:
            lower_shifts(half.graph)
            keep_joins(half.graph)
    if in_place and backward is None and not compile:
        write_in_place(_changed_inputs(step, forward))
    forward_sizes = take_sizes(forward.graph)
    backward_sizes = () if backward is None else (*taken, *take_sizes(backward.graph))
    for half in (forward, *backwards):
        half.graph.lint()
        # The arguments of the forward half belong to its caller, so only backward takes them as a list.
        write_code(half, take_list=half is not forward)
    results: Any = forward.graph.output_node().args[0]
    saved = len(results) - len(step.forward_outputs)
    if compile:
        dynamic = bool(forward_sizes or backward_sizes)
        forward = compile_graph(forward, dynamic=dynamic)
        backward = None if backward is None else compile_graph(backward, dynamic=dynamic)
        if parts is not None:
            first, second = (replace(part, graph=compile_graph(part.graph, dynamic=dynamic)) for part in parts)
            parts = first, second
    return Halves(forward, backward, saved, draws, forward_sizes, backward_sizes, parts, reduction)


def _drop_cheap_saves(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Drop saved tensors that kernels of the backward half compute where they read them."""
    results = _results(forward)
    placeholders = backward.graph.find_nodes(op="placeholder")
    saved = dict(zip(placeholders, results[outputs:], strict=False))
    dropped = compute_where_read(backward.graph, saved)
    kept = tuple(node for placeholder, node in saved.items() if placeholder not in dropped)
    forward.graph.output_node().args = ((*results[:outputs], *kept),)


def _copy(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, so that changes of a half do not change the step, which may be split again."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    copied.output_node().meta = dict(graph.output_node().meta)
    return copied


def _reduction(
    unreduced: PendingReductions, ends: fx.GraphModule | GraphPart, compile: bool, dynamic: bool
) -> GradientReduction:
    """Return the reduction of gradients in the last run of `ends`: the backward half, or its second part."""
    if isinstance(ends, GraphPart):
        whole, makes = ends.graph, ends.makes
    else:
        whole, makes = ends, tuple(range(len(ends.graph.output_node().args[0])))  # type: ignore[arg-type]
    places = [makes.index(place) for place in unreduced.places]
    alone = fx.GraphModule(whole, unreduced.scheduled_graph())
    write_code(alone, take_list=True)
    graph = fx.GraphModule(whole, reduce_with_sums(whole.graph, unreduced, places))
    if compile:
        # Compiled code is not split at waits, so `last` does everything.
        lower_shifts(graph.graph)
        keep_joins(graph.graph)
        write_code(graph, take_list=True)
        takes = tuple(range(len(graph.graph.find_nodes(op="placeholder"))))
        last = GraphPart(compile_graph(graph, dynamic=dynamic), takes, makes)
        return GradientReduction(unreduced.places, last, alone, None)
    parts = split_at_waits(graph, places)
    last, end = (replace(part, makes=tuple(makes[place] for place in part.makes)) for part in parts)
    for half in (last, end):
        write_code(half.graph, take_list=True)
    return GradientReduction(unreduced.places, last, alone, end)


def _changed_inputs(step: LocalStep, forward: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the placeholders of inputs and buffers that a step changes, and the nodes of their new values."""
    placeholders = forward.graph.find_nodes(op="placeholder")
    sources = {border.name: node for border, node in zip(step.inputs, placeholders, strict=False)}
    for border, value in zip(step.forward_outputs, _results(forward), strict=False):
        if border.kind == "mutation":
            yield sources[border.name], value


def _gradients_of(step: LocalStep, kind: str) -> list[int]:
    """Return the positions, among the gradients of a step, of those of one kind of input."""
    names = {border.name for border in step.inputs if border.kind == kind}
    return [place for place, border in enumerate(step.gradients) if border.name in names]


def take_sizes(graph: fx.Graph) -> tuple[sympy.Expr, ...]:
    """Make every number that depends on dynamic sizes an input of the graph, after all others; return expressions."""
    last = list(graph.find_nodes(op="placeholder"))[-1]
    taken: dict[sympy.Expr, fx.Node] = {}

    # Equal numbers are one input.
    def number(value: Any) -> Any:
        nonlocal last
        if not is_dynamic(value):
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
    """Return True, and warn, if ranks exchange data-dependent numbers of rows."""
    if not joint.graph.find_nodes(op="call_function", target=exchange_ops.exchange.default):
        return False
    warn_caller(
        "compile=True has no effect on this program, which runs operator by operator: it sends rows to the ranks of "
        "their groups, such as tokens to their experts, as many as the data says, and compiled code knows one size "
        "only. To have it compiled, place the groups' weights otherwise by a hint, such as Shard(1) for the weights of "
        "experts.",
    )
    return True
