"""Variants of rules that the graph around an operator allows, such as those that split routed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from autoshard.patterns.rule import OpCall, Rule

Place = tuple[fx.Node, int]
"""A tensor of a graph: a node, and which of its results; `graph_rules.Value` is one."""

Rules = Mapping[fx.Node, Rule]
Calls = Mapping[fx.Node, OpCall]
Operands = Mapping[fx.Node, Sequence[Place]]
Variants = Callable[[Rules, Calls, Operands, Iterable[Place]], dict[fx.Node, Rule]]
_functions: list[Variants] = []


def graph_variants(function: Variants) -> Variants:
    """Register a function that adds variants to the rules of a graph; arguments as of `with_variants`."""
    _functions.append(function)
    return function


def with_variants(rules: Rules, calls: Calls, operands: Operands, outputs: Iterable[Place]) -> dict[fx.Node, Rule]:
    """Return the rules of a graph with the variants of all registered functions.

    Args:
        rules: of every node.
        calls: of every operator, in execution order.
        operands: the tensors that every operator takes.
        outputs: the tensors that the graph returns.
    """
    found, outputs = dict(rules), tuple(outputs)
    for function in _functions:
        found = function(found, calls, operands, outputs)
    return found
