"""The program of a planned graph: made for all sizes, split into halves, with scheduled collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture import outside_modes
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cost import CostModel
from autoshard.errors import RuleError
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import generic_sizes
from autoshard.program.localize import LocalStep, localize
from autoshard.program.split import Halves, split
from autoshard.reshard.path import Resharder
from autoshard.reshard.reductions import DeferredReduction
from autoshard.size import Sizes, at, plain
from autoshard.specs.axes import SharedAxis


def size_generic_step(
    flow: Flow, resharder: Resharder, groups: Sequence[str], home: torch.device, shared: SharedAxis | None
) -> LocalStep:
    """Return the program of a plan; for a graph with dynamic sizes, it is valid at all sizes.

    The arguments are those of `localize`.

    Raises:
        PlanError: an operator can't have unequal shares as the plan has it.
        RuleError: the program would differ at other sizes.
    """
    step = localize(flow, resharder, groups, home, shared=shared)
    if flow.graph.dynamic is not None:
        sizes = generic_sizes(flow.graph, flow.mesh, flow.rules.generic)
        expected = localize(flow, resharder, groups, home, sizes, shared)
        check_size_generic(step, expected, sizes if shared is None else shared.example(sizes))
    return step


def check_size_generic(step: LocalStep, expected: LocalStep, sizes: Sizes) -> None:
    """Check that a program, with its sizes replaced by `sizes`, equals the program made for these.

    Raises:
        RuleError: an operator's arguments contain a plain number from a dynamic size, or operators differ.
    """
    nodes, expected_nodes = (list(each.graph_module.graph.nodes) for each in (step, expected))
    place = {node: index for both in (nodes, expected_nodes) for index, node in enumerate(both)}

    def call_texts(node: fx.Node) -> Any:
        def leaf(value: Any) -> Any:
            return f"%{place[value]}" if isinstance(value, fx.Node) else plain(at(value, sizes))

        return node.op, str(node.target), fx.node.map_aggregate((node.args, node.kwargs), leaf)

    # A longer program differs before the other one ends, in its output at the latest.
    for node, expected_node in zip(nodes, expected_nodes, strict=False):
        call, expected_call = call_texts(node), call_texts(expected_node)
        if call != expected_call:
            given = ", ".join(f"{name} = {value}" for name, value in sizes.items())
            raise RuleError(
                f"a program for all sizes cannot be made: at {given} it would call {call[1]}{call[2]}, and should call "
                f"{expected_call[1]}{expected_call[2]}. A rule, or the local program of a rule, has made a plain "
                "number of a dynamic size: let it compute with +, -, *, // and %. Until then, leave that size out of "
                "dynamic."
            )


@dataclass(frozen=True, slots=True, eq=False)
class PlannedGraph:
    """A captured step and the decisions for it.

    Attributes:
        graph: the captured step, in which dims may be in parts; in that of `flow`, layers may be recomputed, too.
        flow: the graph, its rules and the decisions.
        resharder: finds the reshards; the one that priced them.
        cost: prices of kernels and collectives.
        shared: the axis whose ranks hold unequal shares, if any.
    """

    graph: JointGraph
    flow: Flow
    resharder: Resharder
    cost: CostModel
    shared: SharedAxis | None


def build_program(
    planned: PlannedGraph,
    groups: Sequence[str],
    home: torch.device,
    *,
    compile: bool,
    in_parts: bool,
    reduced: DeferredReduction | None,
    in_place: bool = False,
) -> tuple[LocalStep, Halves]:
    """Make the program of a rank.

    Args:
        planned: the graph and the decisions.
        groups: for every mesh axis, the name of the process group of this rank's line along it.
        home: the device of the program's tensors.
        compile, in_parts, reduced: as for `split`.
        in_place: True if the program may write into inputs that it changes, as for `split`. If the graph has checks of
            its results, inputs change only after these.

    Raises:
        PlanError: an operator can't have unequal shares as the plan has it.
        RuleError: the program would differ at other sizes.
    """
    with outside_modes():
        step = size_generic_step(planned.flow, planned.resharder, groups, home, planned.shared)
        in_place = in_place and not planned.graph.result.checks
        return step, split(step, compile, in_parts, reduced, in_place)


def split_again(step: LocalStep, compile: bool, reduced: DeferredReduction | None) -> Halves:
    """Split a program again, with arguments as for `split`: to compile it, or to sum gradients over several runs."""
    with outside_modes():
        return split(step, compile, reduced=reduced)
