"""The operators of a step that compute something else on shards, found one by one on the numbers of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard import RuleError
from autoshard.capture.joint import JointGraph
from autoshard.capture.nodes import is_random
from autoshard.patterns import Finding, check
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.decisions import Flow
from autoshard.patterns.registry import is_of_user, op_call
from autoshard.patterns.rule import OpCall, leaves
from autoshard.patterns.soundness import compare, run_all_ranks
from autoshard.patterns.strategy import describe, offered_factors, result_spec
from autoshard.tools.verify.graph_walk import Call, run_graph
from autoshard.tools.verify.report import OperatorFault

Tensors = Mapping[tuple[str, str], Tensor]
"""Whole tensors by the kinds and names of the inputs of a joint graph."""


def user_rule_findings(graph: JointGraph, tensors: Tensors) -> list[Finding]:
    """Check the rules that were registered by `autoshard.register_rule` on all their calls in a step.

    Args:
        graph: the captured step.
        tensors: the whole parameters, buffers, inputs and tangents, by kind and name.

    Returns:
        The strategies of these rules that do not compute what the operator does, on small meshes.
    """
    findings: dict[Finding, None] = {}
    seen: set[OpCall] = set()
    if not any(map(_has_user_rule, graph.graph.nodes)):
        return []

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if _has_user_rule(node):
            described = op_call(node)
            if described not in seen:
                seen.add(described)
                findings.update(dict.fromkeys(_check(node, args, kwargs)))
        return result

    _run_whole(graph, tensors, call)
    return list(findings)


def operator_faults(flow: Flow, tensors: Tensors) -> list[OperatorFault]:
    """Run every operator of a plan on all ranks, on shards of the operands that one device has, and compare.

    Args:
        flow: the graph and the decisions.
        tensors: as for `user_rule_findings`.
    """
    faults: list[OperatorFault] = []

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if _is_comparable(flow, node):
            operands = list(leaves([*args, *kwargs.values()], Tensor))
            faults.extend(_faults(flow, node, operands, result))
        return result

    _run_whole(flow.graph, tensors, call)
    return faults


def _run_whole(graph: JointGraph, tensors: Tensors, call: Call) -> None:
    arguments = [item.value if item.kind == "constant" else tensors[item.kind, item.name] for item in graph.inputs]
    with torch.no_grad():
        run_graph(graph.graph_module, arguments, call)


def _has_user_rule(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_of_user(node.target)


def _check(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Finding]:
    try:
        return check(node.target, (tuple(args), dict(kwargs)))  # type: ignore[arg-type]
    except RuleError:
        return []  # the rule declines this call, which is replicated


def _is_comparable(flow: Flow, node: fx.Node) -> bool:
    """Return True if the results of an operator follow from its operands, whatever rank it runs on."""
    choices = flow.decisions.choices.get(node.name)
    if choices is None or node not in flow.rules.rules or flow.rules.pin_spec(node, flow.mesh) is not None:
        return False
    if is_random(node) or "empty" in str(node.target):
        return False
    factors = offered_factors(flow.rules.rules[node])
    # Which rows a rank holds is decided by a route from end to end.
    return not any(factors[choice].routed for choice in choices if choice >= 0)


def _faults(flow: Flow, node: fx.Node, operands: list[Tensor], result: Any) -> Iterator[OperatorFault]:
    rule, choices, mesh = flow.rules.rules[node], flow.decisions.choices[node.name], flow.mesh
    problems = []
    try:
        held = run_all_ranks(flow.rules.calls[node], rule, choices, mesh, operands)
    except Exception as error:  # whatever the operator raises on shards is its fault
        problems.append(f"the local program fails with {type(error).__name__}: {error}")
    else:
        results = result if isinstance(result, (tuple, list)) else (result,)
        for position, (shards, whole) in enumerate(zip(held, results, strict=True)):
            if shards is not None and isinstance(whole, Tensor):
                problem = compare(shards, result_spec(rule, choices, mesh, position), mesh, whole)
                problems += [] if problem is None else [f"result {position}: {problem}"]
    path, strategy = flow.graph.module_path(node), describe(rule, choices, mesh)
    of_user = _has_user_rule(node)
    yield from (OperatorFault(str(node.target), path, strategy, problem, of_user) for problem in problems)
