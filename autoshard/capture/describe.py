"""Checks of a captured graph before it is planned.

Conversion of a graph that torch traced to a `JointGraph`: inputs and outputs named, nodes simplified and checked.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture._torch import (
    FakeTensor,
    GradAOTOutput,
    InputMutationAOTOutput,
    OpOverload,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    free_unbacked_symbols,
    pytree,
)
from autoshard.capture.capture_errors import node_place, shape_error
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.fake_module import fake_like
from autoshard.capture.joint_graph import JointGraph, JointInput, JointOutput, fingerprint
from autoshard.capture.marks import TaskGraph, assign_task_graphs
from autoshard.capture.mixed_precision import reduce_gradients
from autoshard.capture.nodes import closure
from autoshard.capture.simplify import keep_old_values, refresh_views, simplify
from autoshard.capture.symbols import with_sizes
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


def describe(
    traced: fx.GraphModule,
    exported: Exported,
    signature: Hashable,
    mp_policy: MixedPrecisionPolicy | None = None,
    defaults: Mapping[str, TaskGraph] | None = None,
) -> JointGraph:
    """Return the joint graph of a traced graph.

    Args:
        traced: forward and backward in one graph; changed.
        exported: the forward graph that was traced.
        signature: of the call.
        mp_policy: whose dtype of reductions gradients get.
        defaults: the task graphs of modules that have one, by their paths.

    Raises:
        CaptureError: the graph does something that no plan can keep.
    """
    graph = traced.graph
    constants = _lift_constants(traced)
    _complete_metadata(graph)
    assign_task_graphs(graph, defaults or {})
    check_effects(graph)
    _forget_devices(graph)
    inputs = tuple(
        constants[node] if node in constants else _joint_input(node, exported)
        for node in graph.find_nodes(op="placeholder")
    )
    sizes = None
    if exported.dynamic:
        named = [(item.name, item.node) for item in inputs if item.kind == "input"]
        sizes = with_sizes(graph, named, exported.dynamic)
    tangents = {item.name for item in inputs if item.kind == "tangent"}
    node = next(reversed(graph.nodes))
    outputs = [
        output
        for value, description in zip(node.args[0], node.meta["desc"], strict=True)
        if (output := _joint_output(value, description, exported, tangents)) is not None
    ]
    graph.erase_node(node)
    # Tracing left a code generator for nested arguments; the graph is called with flat ones.
    graph.set_codegen(fx.graph.CodeGen())
    graph.output(tuple(output.node for output in outputs))
    simplify(graph)
    parameters = {item.node for item in inputs if item.kind == "parameter"}
    refresh_views(graph, parameters, lambda node: "backward" in node.meta["partitioner_tag"])
    keep_old_values(graph, inputs, outputs)
    # The passes above replaced nodes, in the graph's output too, and not in the descriptions.
    nodes = next(reversed(graph.nodes)).args[0]
    outputs = [replace(output, node=node) for output, node in zip(outputs, nodes, strict=True)]
    if mp_policy is not None:
        outputs = reduce_gradients(graph, outputs, mp_policy)
    check_gradients(exported, outputs, tangents)
    graph.lint()
    traced.recompile()
    return JointGraph(
        graph_module=traced,
        inputs=inputs,
        outputs=tuple(outputs),
        aliases=exported.aliases,
        signature=signature,
        fingerprint=fingerprint(inputs, outputs, graph),
        call=exported.call,
        result=exported.result,
        dynamic=sizes,
        state=exported.state,
    )


def _lift_constants(traced: fx.GraphModule) -> dict[fx.Node, JointInput]:
    """Replace constants that the trace added by inputs of the graph, before its tangents."""
    # The export makes constants of exported code inputs itself. Code with its own backward runs in the trace alone.
    graph = traced.graph
    placeholders = graph.find_nodes(op="placeholder")
    tangents = (node for node in placeholders if isinstance(node.meta["desc"], TangentAOTInput))
    after = next(tangents, placeholders[-1].next)
    lifted: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(traced, str(node.target))
        if not isinstance(value, torch.Tensor):
            continue
        name = str(node.target)
        if name not in lifted:
            with graph.inserting_before(after):
                lifted[name] = graph.placeholder(name)
            fake = fake_like(value, placeholders[0].meta["val"].fake_mode)
            lifted[name].meta = {"val": fake, "desc": None}
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    values = {name: getattr(traced, name) for name in lifted}
    return {
        node: JointInput("constant", name, node, None if isinstance(values[name], FakeTensor) else values[name])
        for name, node in lifted.items()
    }


def _complete_metadata(graph: fx.Graph) -> None:
    """Give every node a phase and a module path, which is that of its latest operand where tracing recorded none."""
    backward = False
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        tag = node.meta.get("partitioner_tag")
        if node.op == "placeholder":
            tag = "is_backward" if isinstance(node.meta["desc"], TangentAOTInput) else "is_forward"
        else:
            # Nodes without a tag belong to the half in which they stand.
            tag = tag or ("is_backward" if backward else "is_forward")
            backward = backward or "backward" in tag
        node.meta["partitioner_tag"] = tag
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            node.meta["module_path"], _ = next(reversed(stack.values()))
        else:
            latest = max(node.all_input_nodes, key=position.__getitem__, default=None)
            node.meta["module_path"] = "" if latest is None else latest.meta["module_path"]


def _forget_devices(graph: fx.Graph) -> None:
    """Remove device arguments: the program that runs the graph decides where tensors are made."""
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}


def _joint_input(node: fx.Node, exported: Exported) -> JointInput:
    description = node.meta["desc"]
    if not isinstance(description, TangentAOTInput):
        item = _exported_input(description, exported)
        return JointInput(item.kind, item.name, node, item.value)
    output = description.output
    if isinstance(output, InputMutationAOTOutput):
        raise CaptureError(
            f"{_exported_input(output.mutated_input, exported).name} is updated in place with a value that requires a "
            "gradient. Update it under torch.no_grad(), or with the detached value."
        )
    assert isinstance(output, PlainAOTOutput)
    return JointInput("tangent", exported.result.names[output.idx], node)


def _joint_output(
    value: fx.Node | None, description: object, exported: Exported, tangents: set[str]
) -> JointOutput | None:
    """Return the description of an output; None for one that the joint graph does not have."""
    if description is None:  # the place of a gradient that is not wanted
        return None
    assigned = [name for name, _ in exported.assigned]
    if isinstance(description, InputMutationAOTOutput):
        name = _exported_input(description.mutated_input, exported).name
        # Such a buffer is assigned: its new value is an output of its own.
        return None if name in assigned else JointOutput("mutation", name, value)
    if isinstance(description, GradAOTOutput):
        item = _exported_input(description.grad_of, exported)
        return JointOutput("gradient", item.name, value) if item.fake.requires_grad else None
    assert isinstance(description, PlainAOTOutput)
    assert value is not None
    # Every output was cloned for the trace, which needs distinct tensors; the clone's operand is the output.
    assert value.target is aten.clone.default
    names = exported.result.names
    if description.idx >= len(names):
        return JointOutput("mutation", assigned[description.idx - len(names)], value.all_input_nodes[0])
    name = names[description.idx]
    return JointOutput("output", name, value.all_input_nodes[0], name if name in tangents else None)


def _exported_input(description: object, exported: Exported) -> ExportedInput:
    assert isinstance(description, PlainAOTInput), f"{description}: the exported graph has plain inputs only"
    return exported.inputs[description.idx]
