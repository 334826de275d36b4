"""Marks in a traced step: the operator of `forward` that a node belongs to, and the value that a gradient is of.

A pipeline cuts a step by them. Autograd's sequence numbers are not enough: the gradient of a sum is that of its
operands, without a node in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.capture._torch import OpOverload, pytree, storage_of, traced_nodes, traced_value
from autoshard.capture.export import Exported, has_storage
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.nodes import is_in_place
from autoshard.operator_library import define

GRADIENT_OF: OpOverload = define(
    "gradient_of(Tensor gradient, int value) -> Tensor",
    lambda gradient, value: gradient.clone(),
    # In the layout of the gradient, even where it is expanded: what is traced behind it depends on that.
    lambda gradient, value: gradient.new_empty_strided(gradient.shape, gradient.stride()),
)
"""The whole gradient of a value, by its number, on its way to the operator that made the value."""

# Keys in the meta of traced nodes: the operator of the forward graph that ran it; the tensor of the forward graph that
# it makes; the numbers of the values that it makes.
_OPERATOR, _TENSOR, _VALUES = "autoshard_operator", "autoshard_tensor", "autoshard_values"


@dataclass(frozen=True, slots=True, eq=False)
class MarkedStep:
    """A step with marks, before it is simplified.

    Attributes:
        exported: the forward graph that was traced.
        joint: the step. `GRADIENT_OF` stands in it behind the gradient of every value.
        makers: by the number of a value, the name of the operator that made it; empty for parameters.
    """

    exported: Exported
    joint: JointGraph
    makers: tuple[str, ...]

    @property
    def values(self) -> dict[int, fx.Node]:
        """The nodes of the values, by number: of the forward half, or placeholders of parameters.

        A view that was taken before a change in place has none: it is taken again where it is read.
        """
        return {number: node for node in self.joint.graph.nodes for number in node.meta.get(_VALUES, ())}


def value_number(mark: fx.Node) -> int:
    """Return the number of the value whose gradient a mark stands behind."""
    number = mark.args[1]
    assert isinstance(number, int)
    return number


def operator_of(node: fx.Node) -> str | None:
    """Return the name of the operator of the forward graph that a node of the forward half belongs to."""
    name: str | None = node.meta.get(_OPERATOR)
    return name


def tensor_name(node: fx.Node) -> str:
    """Return the name of a node's tensor in the forward graph; where it has none there, one that is no other's."""
    name: str = node.meta.get(_TENSOR) or f"{operator_of(node)}__{node.name}"
    return name


class StepMarks:
    """Function that a graph calls behind its operators while it is traced, and at the end: it notes what they made."""

    def __init__(self) -> None:
        self.makers: list[str] = []
        self._in_forward = True
        # The nodes of autograd whose results are marked.
        self._histories = WeakTensorKeyDictionary()
        self.__name__ = "note_step"  # the name of the function in the code of the graph

    def insert(self, graph: fx.Graph) -> list[fx.Node]:
        """Add the calls to an exported graph, and return them: they have to be erased after the trace."""
        self.makers.clear()
        placeholders = graph.find_nodes(op="placeholder")
        operators = [node for node in graph.nodes if node.op == "call_function"]
        added = []
        if placeholders:
            with graph.inserting_after(placeholders[-1]):
                added.append(graph.call_function(self, ("", tuple(placeholders), ())))
        in_memory: dict[int, list[fx.Node]] = {}
        for node in operators:
            value, changed = node.meta.get("val"), []
            # What runs inside of a transform such as vmap belongs to the operator behind it.
            if isinstance(value, torch.Tensor) and not has_storage(value):
                continue
            if isinstance(value, torch.Tensor):
                others = in_memory.setdefault(storage_of(value), [])
                # A change in place gives all tensors in that memory another history.
                changed = [*others] if is_in_place(node) else []
                others.append(node)
            with graph.inserting_after(node):
                added.append(graph.call_function(self, (node.name, node, tuple(changed))))
        return [*added, graph.call_function(self, (None, (), ()))]

    def __call__(self, name: str | None, value: Any, changed: Sequence[torch.Tensor]) -> None:
        """Note what an operator made, and the tensors that lie where it wrote; without a name, the end of `forward`."""
        self._in_forward = name is not None
        if name is None:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            node = self._watch(tensor, name)
            if name and node is not None and tensor is value:
                node.meta.setdefault(_TENSOR, name)
        for tensor in changed:
            self._watch(tensor, name)
        for node in traced_nodes():
            if node.op == "placeholder" or _OPERATOR in node.meta:
                break
            node.meta[_OPERATOR] = name

    def _watch(self, tensor: torch.Tensor, maker: str) -> fx.Node | None:
        """Return the node of a tensor, and have its gradient marked if it has one."""
        node = traced_value(tensor)
        # An operator such as a cast to the same dtype returns its operand, which has its mark.
        if node is not None and tensor.requires_grad and self._histories.get(tensor, ()) != (tensor.grad_fn,):
            self._histories[tensor] = (tensor.grad_fn,)
            number = len(self.makers)
            self.makers.append("" if node.op == "placeholder" else node.meta.get(_OPERATOR, maker))
            node.meta.setdefault(_VALUES, []).append(number)
            tensor.register_hook(lambda gradient: self._mark(gradient, number))
        return node

    def _mark(self, gradient: torch.Tensor | None, number: int) -> torch.Tensor | None:
        # Of several results, those that nothing reads have no gradient. `forward` may compute gradients of its own.
        return None if gradient is None or self._in_forward else GRADIENT_OF(gradient, number)
