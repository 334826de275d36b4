"""Marks in a traced step: the operator of `forward` that a node belongs to, and the value that a gradient is of.

A pipeline cuts a step by them. Autograd's sequence numbers are not enough: the gradient of a sum is that of its
operands, without a node in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.capture._torch import OpOverload, pytree, storage_of, traced_nodes, traced_value
from autoshard.capture.export import Exported, has_storage
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.nodes import closure, is_in_place, is_view
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
        """The nodes of the values, by number: of the forward half, or placeholders of parameters."""
        return {number: node for node in reversed(self.joint.graph.nodes) for number in node.meta.get(_VALUES, ())}


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
        # For tensors with gradients, the node of autograd that made them, and the number of the value.
        self._values = WeakTensorKeyDictionary()
        self._last: fx.Node | None = None  # of the nodes that were noted
        self.__name__ = "note_step"  # the name of the function in the code of the graph

    def insert(self, exported: Exported) -> list[fx.Node]:
        """Add the calls behind operators to an exported graph, and return them: they are erased after the trace."""
        self.makers.clear()
        graph = exported.graph
        placeholders = graph.find_nodes(op="placeholder")
        operators = [node for node in graph.nodes if node.op == "call_function"]
        added = []
        if placeholders:
            with graph.inserting_after(placeholders[-1]):
                added.append(graph.call_function(self, ("", tuple(placeholders), (), ())))
        in_memory: dict[int, list[fx.Node]] = {}
        for node in operators:
            value, changed, unchanged = (
                node.meta.get("val"),
                [],
                [each for each in node.all_input_nodes if _in_memory(each)],
            )
            # What runs inside of a transform such as vmap belongs to the operator behind it.
            if isinstance(value, torch.Tensor) and not has_storage(value):
                continue
            if isinstance(value, torch.Tensor):
                memory = storage_of(value)
                others = in_memory.setdefault(memory, [])
                # A change in place gives all tensors in that memory another history.
                if is_in_place(node):
                    changed = [*others]
                    unchanged = [each for each in unchanged if storage_of(each.meta["val"]) != memory]
                others.append(node)
            with graph.inserting_after(node):
                added.append(graph.call_function(self, (node.name, node, tuple(changed), tuple(unchanged))))
        return added

    def end(self, exported: Exported) -> fx.Node:
        """Add the call at the end, behind all that reads the outputs, and return it."""
        outputs = tuple(node for node in exported.outputs if _in_memory(node))
        return exported.graph.call_function(self, (None, (), (), outputs))

    def __call__(
        self,
        name: str | None,
        value: Any,
        changed: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
    ) -> None:
        """Note an operator.

        Args:
            name: of the operator; None at the end of `forward`.
            value: what it made.
            changed: tensors in the memory that it changed.
            read: tensors that it read, or those that `forward` returns.
        """
        for tensor in read:
            self._note_views(tensor)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                node = self._watch(tensor, name or "")
                if name and node is not None and tensor is value:
                    node.meta.setdefault(_TENSOR, name)
        for tensor in changed:
            self._watch(tensor, name or "")
        for node in self._new_nodes():
            if name is not None:
                node.meta.setdefault(_OPERATOR, name)
        self._last = next(traced_nodes(), None)
        self._in_forward = name is not None

    def _new_nodes(self) -> Iterator[fx.Node]:
        """Yield the nodes that were traced since the last call, the last first."""
        for node in traced_nodes():
            if node is self._last or node.op == "placeholder":
                return
            yield node

    def _watch(self, tensor: torch.Tensor, maker: str) -> fx.Node | None:
        """Return the node of a tensor, and have its gradient marked if it has one."""
        node = traced_value(tensor)
        if node is None or not tensor.requires_grad:
            return node
        # An operator such as a cast to the same dtype returns its operand, which has its mark.
        made, _ = self._values.get(tensor, ((), 0))
        if made != (tensor.grad_fn,):
            number = len(self.makers)
            self.makers.append("" if node.op == "placeholder" else node.meta.get(_OPERATOR, maker))
            self._values[tensor] = (tensor.grad_fn,), number
            node.meta.setdefault(_VALUES, []).append(number)
            tensor.register_hook(lambda gradient: self._mark(gradient, number))
        return node

    def _note_views(self, tensor: torch.Tensor) -> None:
        """Note that a view was taken again, as torch does at every read once its memory was changed.

        It belongs to the operator that took the view first.
        """
        view = traced_value(tensor)
        _, number = self._values.get(tensor, ((), None))
        if view is None or number is None or view.op == "placeholder":
            return
        new = {*self._new_nodes()}
        for node in new:
            if node is not view and _is_same(node, view) and number not in node.meta.get(_VALUES, ()):
                node.meta.setdefault(_VALUES, []).append(number)
                for each in closure([node], lambda node: new.intersection(node.all_input_nodes)):
                    each.meta.setdefault(_OPERATOR, self.makers[number])

    def _mark(self, gradient: torch.Tensor | None, number: int) -> torch.Tensor | None:
        # Of several results, those that nothing reads have no gradient. `forward` may compute gradients of its own.
        return None if gradient is None or self._in_forward else GRADIENT_OF(gradient, number)


def _is_same(node: Any, other: Any) -> bool:
    """Return True if two nodes are one operator on the same memory, through equal views."""
    if node is other or not isinstance(node, fx.Node) or not isinstance(other, fx.Node):
        return bool(node == other)
    return (
        (node.target, len(node.args), node.kwargs) == (other.target, len(other.args), other.kwargs)
        and is_view(node)
        and all(map(_is_same, node.args, other.args))
    )


def _in_memory(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and has_storage(value)


def merge_views(joint: JointGraph) -> JointGraph:
    """Return a step in which a view that was taken several times is one node, the first."""
    first: dict[int, fx.Node] = {}
    for node in list(joint.graph.nodes):
        numbers = node.meta.get(_VALUES, ())
        known = next((first[number] for number in numbers if number in first), None)
        for number in numbers:
            first.setdefault(number, known or node)
        if known is not None:
            node.replace_all_uses_with(known)
            joint.graph.erase_node(node)
    nodes: Any = joint.graph.output_node().args[0]
    outputs = (replace(output, node=node) for output, node in zip(joint.outputs, nodes, strict=True))
    return replace(joint, outputs=tuple(outputs))
