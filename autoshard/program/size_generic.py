"""A program with dynamic sizes is compared with the one for other sizes: nothing in it may be the example's number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.patterns.decisions import Flow
from autoshard.patterns.generic import generic_sizes
from autoshard.program.localize import Localizer, LocalStep
from autoshard.reshard.path import Resharder
from autoshard.size import Sizes, at, plain
from autoshard.specs.shared_axis import SharedAxis


def size_generic_step(
    flow: Flow, resharder: Resharder, groups: Sequence[str], home: torch.device, shared: SharedAxis | None
) -> LocalStep:
    """The program of a plan; of a graph of dynamic sizes, one that is the same at all of them.

    Args:
        flow: the graph, and what was decided.
        resharder: for the collectives.
        groups: for every mesh axis, the name of its process group.
        home: the device of the program's tensors.
        shared: the mesh axis of which ranks hold shares of their own, if there is one.

    Raises:
        PlanError: an operator can't have shares of its own as the plan has it.
        RuleError: the program would be another one at other sizes.
    """
    step = Localizer(flow, resharder, groups, home, shared=shared).run()
    if flow.graph.dynamic is not None:
        others = generic_sizes(flow.graph, flow.mesh, flow.rules.generic)
        other = Localizer(flow, resharder, groups, home, others, shared).run()
        check_size_generic(step, other, others if shared is None else shared.example(others))
    return step


def check_size_generic(step: LocalStep, other: LocalStep, sizes: Sizes) -> None:
    """Refuse a program that is not, with its sizes taken at `sizes`, the `other` one, which was made for these.

    Raises:
        RuleError: an operator's arguments hold a number that came from a dynamic size, or there are other operators.
    """
    place = {node: index for half in (step, other) for index, node in enumerate(half.graph_module.graph.nodes)}

    def call_texts(node: fx.Node) -> Any:
        def leaf(value: Any) -> Any:
            return f"%{place[value]}" if isinstance(value, fx.Node) else plain(at(value, sizes))

        return node.op, str(node.target), fx.node.map_aggregate((node.args, node.kwargs), leaf)

    pairs = zip(step.graph_module.graph.nodes, other.graph_module.graph.nodes, strict=False)  # the first difference
    for ours, theirs in pairs:
        one, two = call_texts(ours), call_texts(theirs)
        if one != two:
            raise RuleError(
                f"a program for all sizes cannot be made: at {_sizes_text(sizes)} it would call {one[1]}{one[2]}, and "
                f"should call {two[1]}{two[2]}. A rule, or the local program of a rule, has made a plain number of a "
                "dynamic size: let it compute with +, -, *, // and %. Until then, leave that size out of dynamic."
            )


def _sizes_text(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())
