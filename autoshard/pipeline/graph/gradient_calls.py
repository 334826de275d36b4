"""Calls of Python code that no stage may be cut through, as they need what autograd knows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from autoshard.capture.python_calls import PythonCall
from autoshard.errors import CaptureError


def gradient_groups(graph: fx.Graph) -> Iterator[set[fx.Node]]:
    """Groups of nodes that have to run on one stage: hooks with what they are set on, gradients with what lies between.

    Raises:
        CaptureError: a hook is on a parameter or input, whose gradient comes from several stages; or on a function,
            as those of modules are, which may run on several.
    """
    for node in graph.nodes:
        if isinstance(node.target, PythonCall) and node.target.history:
            operands: Any = node.args[0]
            held = operands[: node.target.history]
            _check(node.target, held)
            yield _group(node, held)


def _check(call: PythonCall, operands: list[fx.Node]) -> None:
    if call.shares_state:
        raise CaptureError(
            f"the hook at {call.where} is of a module or function, and a pipeline may cut through what it is of. Set "
            "hooks on tensors (tensor.register_hook(hook) in forward), or use a mesh without a pipeline axis."
        )
    if call.has_effect and operands[0].op == "placeholder":
        raise CaptureError(
            f"{call.__name__} at {call.where} is on a parameter or an input of the model, which a pipeline may need on "
            "several stages. Set it on the parameter outside of forward, or use a mesh without a pipeline axis."
        )


def _group(call: fx.Node, operands: list[fx.Node]) -> set[fx.Node]:
    """A call, its operands, and what lies between operands, or between them and the call."""
    behind = _closure(operands, lambda node: node.users)
    ahead = _closure([call], lambda node: node.all_input_nodes)
    return {node for node in behind & ahead if node.op == "call_function"}


def _closure(nodes: list[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    reached = set(nodes)
    waiting = list(nodes)
    while waiting:
        new = [node for node in following(waiting.pop()) if node not in reached]
        reached.update(new)
        waiting.extend(new)
    return reached
