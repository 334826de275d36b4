"""Checks of a captured graph before it is planned."""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import fx

from autoshard.capture._torch import OpOverload, free_unbacked_symbols, pytree
from autoshard.capture.capture_errors import node_place, shape_error
from autoshard.capture.export import Exported
from autoshard.capture.joint_graph import JointOutput
from autoshard.capture.nodes import closure
from autoshard.errors import CaptureError

logger = logging.getLogger(__name__)

aten = torch.ops.aten

_CHANGES_OF_SHAPE = frozenset(
    f"{name}_"
    for name in (
        *("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "resize", "resize_as", "set", "as_strided"),
    )
)
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional")


def check_sizes(graph: fx.Graph) -> None:
    """Refuse an exported graph with sizes that depend on the numbers in a tensor."""
    for node in graph.nodes:
        if any(
            free_unbacked_symbols(leaf)
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
        ):
            raise CaptureError(
                f"{node_place(node, 'has a size or value that depends on the numbers in a tensor')}. Use an operator "
                "of fixed size, such as torch.where in place of boolean indexing."
            )


def check_collectives(graph: fx.Graph) -> None:
    """Refuse an exported graph with collectives: it has to be the step of one device."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") in _COLLECTIVES:
            raise CaptureError(
                f"{node_place(node, 'is a collective')}. What is captured is the step of one device, of which "
                "autoshard makes the collectives: leave them out of forward, as in a program for one device."
            )


def check_shapes(graph: fx.Graph) -> None:
    """Refuse an exported graph that changes the shape of an input, parameter or buffer in place."""
    for node in graph.nodes:
        if _name(node) in _CHANGES_OF_SHAPE and _mutation_base(node).op == "placeholder":
            raise shape_error(partial(node_place, node))


def _name(node: fx.Node) -> str:
    """Return the name of an operator without its overload; an empty text for other nodes."""
    return node.target._schema.name.split("::")[1] if isinstance(node.target, OpOverload) else ""


def _mutation_base(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor that a node changes in place, before all of its changes."""
    # In-place operators return their first operand, so their nodes form a chain.
    while _name(node).endswith("_") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def check_effects(graph: fx.Graph) -> None:
    """Refuse a traced graph with operators that have effects besides their results."""
    # torch wraps such operators in `with_effects`, which keeps them in order by tokens.
    names = {str(node.args[1]) for node in graph.nodes if getattr(node.target, "__name__", "") == "with_effects"}
    if names:
        raise CaptureError(
            f"{', '.join(sorted(names))} has an effect besides its results, such as printing or raising an error that "
            "depends on numbers, and cannot be planned. Use a form without it (torch.linalg.inv_ex in place of "
            "torch.linalg.inv), or move it out of forward."
        )


def check_gradients(exported: Exported, outputs: list[JointOutput], tangents: set[str]) -> None:
    """Refuse a traced graph without any gradient of the parameters that the differentiated outputs depend on."""
    losses = [node for node, name in zip(exported.outputs, exported.result.names, strict=True) if name in tangents]
    reached = closure(filter(_passes_gradients, losses), lambda node: filter(_passes_gradients, node.all_input_nodes))
    expected = {
        item.name
        for node, item in exported.placeholders.items()
        if item.kind == "parameter" and item.fake.requires_grad and node in reached
    }
    actual = {output.name for output in outputs if output.kind == "gradient" and output.node is not None}
    missing = sorted(expected - actual)
    if missing and not actual:
        raise CaptureError(
            f"the traced graph has no gradient for any of {len(missing)} parameters that {', '.join(sorted(tangents))} "
            f"depends on (such as {missing[0]}). Check that forward does not detach the loss."
        )
    if missing:
        logger.info("no gradient flows to %s: autograd cuts the path from the loss", ", ".join(missing))


def _passes_gradients(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_differentiable = not isinstance(value, torch.Tensor) or value.is_floating_point()
    return is_differentiable and node.target not in (aten.detach.default, aten.detach_.default)
