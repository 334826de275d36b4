"""Simplification of the joint graph without a change of any number: identities, common subexpressions, dead code.

Forward values that the backward half reads: views of parameters are taken again, old values are copied.

Checks of a captured graph before it is planned.

Conversion of a graph that torch traced to a `JointGraph`: inputs and outputs named, nodes simplified and checked.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
from autoshard.capture.capture_errors import node_line, node_place, numbers_advice, shape_error
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.joint_graph import JointGraph, JointInput, JointOutput, fingerprint
from autoshard.capture.marks import TaskGraph, assign_task_graphs
from autoshard.capture.mixed_precision import reduce_gradients
from autoshard.capture.nodes import closure, is_random, is_view
from autoshard.capture.python.fake_module import fake_like
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
# Namespaces of functional collectives, and of those that change tensors in place.
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
                f"{node_place(node, 'has a size or value that depends on numbers that forward computes')}. "
                f"{numbers_advice(node_line(node), str(node.target))}."
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
    # The way back from the losses, as far as autograd would go it in the exported graph.
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
    is_differentiable = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
    return is_differentiable and node.target not in (aten.detach.default, aten.detach_.default)


def describe(
    traced: fx.GraphModule,
    exported: Exported,
    signature: Hashable,
    defaults: Mapping[str, TaskGraph] | None = None,
) -> JointGraph:
    """Return the joint graph of a traced graph, not yet simplified, and without a fingerprint.

    Args:
        traced: forward and backward in one graph; changed.
        exported: the forward graph that was traced.
        signature: of the call.
        defaults: the task graphs of modules that have one, by their paths.

    Raises:
        CaptureError: the graph does something that no plan can keep.
    """
    graph = traced.graph
    constants = _lift_constants(traced)
    _complete_metadata(graph)
    _conjugate_numbers(graph)
    assign_task_graphs(graph, defaults or {})
    check_effects(graph)
    _forget_devices(graph)
    inputs = tuple(
        constants[node] if node in constants else _joint_input(node, exported)
        for node in graph.find_nodes(op="placeholder")
    )
    # Symbols go before nodes are compared: two symbols are never just equal, they add conditions.
    sizes = None
    if exported.dynamic:
        named = [(item.name, item.node) for item in inputs if item.kind == "input"]
        sizes = with_sizes(graph, named, exported.dynamic)
    tangents = {item.name for item in inputs if item.kind == "tangent"}
    node: Any = graph.output_node()
    outputs = [
        output
        for value, description in zip(node.args[0], node.meta["desc"], strict=True)
        if (output := _joint_output(value, description, exported, tangents)) is not None
    ]
    check_gradients(exported, outputs, tangents)
    graph.erase_node(node)
    # Tracing left a code generator for nested arguments; the graph is called with flat ones.
    graph.set_codegen(fx.graph.CodeGen())
    graph.output(tuple(output.node for output in outputs))
    return JointGraph(
        graph_module=traced,
        inputs=inputs,
        outputs=tuple(outputs),
        aliases=exported.aliases,
        signature=signature,
        fingerprint="",
        call=exported.call,
        result=exported.result,
        dynamic=sizes,
        state=exported.state,
    )


def simplify_step(joint: JointGraph, mp_policy: MixedPrecisionPolicy | None = None) -> JointGraph:
    """Return a described step without identities, common subexpressions and dead code.

    Args:
        joint: the step; its graph is changed.
        mp_policy: whose dtype of reductions gradients get.
    """
    graph, outputs = joint.graph, list(joint.outputs)
    simplify(graph)
    parameters = {item.node for item in joint.inputs if item.kind == "parameter"}
    refresh_views(graph, parameters, lambda node: "backward" in node.meta["partitioner_tag"])
    keep_old_values(graph, joint.inputs, outputs)
    # The passes above replaced nodes, in the graph's output too, and not in the descriptions.
    nodes: Any = graph.output_node().args[0]
    outputs = [replace(output, node=node) for output, node in zip(outputs, nodes, strict=True)]
    if mp_policy is not None:
        outputs = reduce_gradients(graph, outputs, mp_policy)
    graph.lint()
    joint.graph_module.recompile()
    return replace(joint, outputs=tuple(outputs), fingerprint=fingerprint(joint.inputs, outputs, graph))


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


def _conjugate_numbers(graph: fx.Graph) -> None:
    """Replace conjugates of plain numbers by numbers, such as that of a complex factor in the gradient of a product."""
    for target in (aten._conj.default, aten.conj_physical.default):
        for node in graph.find_nodes(op="call_function", target=target):
            (number,) = node.args
            if isinstance(number, complex):
                node.replace_all_uses_with(number.conjugate())
                graph.erase_node(node)


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


_ALIASES = frozenset(
    {
        *(aten.detach.default, aten.alias.default, aten.lift_fresh.default),
        *(aten.resolve_conj.default, aten.resolve_neg.default),
    }
)
# Views that set a bit of a tensor instead of changing its numbers. Collectives, kernels of views and other languages
# read the memory alone: programs hold the numbers themselves.
_WRITTEN_OUT = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
_COPIES = frozenset({aten.clone.default, aten.lift_fresh_copy.default})
# Operators that are the identity when their second operand is 1. Adding 0 is none: -0.0 + 0 is 0.0.
_NEUTRAL_AT_ONE = frozenset(
    {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar}
)
_SAME_SHAPE = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor),
        *(aten.slice_backward.default, aten._to_copy.default),
    }
)
# Calls without a cost, which the backward half may share with the forward half.
_VIEWS = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor, aten.select.int),
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim),
        operator.getitem,
    }
)


def simplify(graph: fx.Graph) -> None:
    """Simplify a functional graph, whose nodes carry `meta["partitioner_tag"]`, in place."""
    for node in graph.nodes:
        node.target = _WRITTEN_OUT.get(node.target, node.target)
    # In this order: an operand less may make an identity, and identities hide that expressions are equal.
    _remove_empty_operands(graph)
    _remove_identities(graph)
    _merge_common(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or (
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    )


def _remove_empty_operands(graph: fx.Graph) -> None:
    """Drop operands of `cat` without elements, such as a key-value cache before its first token."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        kept = [operand for operand in node.args[0] if operand.meta["val"].numel()]
        types = {operand.meta["val"].dtype for operand in kept}
        if kept and types == {node.meta["val"].dtype}:  # an empty operand may be what promotes the result's dtype
            node.update_arg(0, kept)


def _remove_identities(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        source = _same_value(node)
        is_returned_copy = node.target in _COPIES and any(user.op == "output" for user in node.users)
        if source is not None and not is_returned_copy:  # the user gets a copy where the model makes one
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def is_identity(node: fx.Node) -> bool:
    """Return True if the node makes the numbers of its operand again, in the same layout."""
    return _same_value(node) is not None


def _same_value(node: fx.Node) -> fx.Node | None:
    """Return an earlier node with the same numbers in the same layout, if `node` is an identity."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    # A copy, or a view of the same shape, may still change strides: then it is no identity.
    source = node.args[0]
    if node.target in _ALIASES:
        return source
    if node.target in _COPIES | _SAME_SHAPE or _is_neutral(node):
        return source if _layout(node) == _layout(source) else None
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.all_input_nodes[0]
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        ndim = node.meta["val"].ndim
        dims = [{dim % ndim for dim in transpose.args[1:]} for transpose in (node, source)]
        return source.all_input_nodes[0] if dims[0] == dims[1] else None
    return None


def _is_neutral(node: fx.Node) -> bool:
    """Return True if the node multiplies by one or the like, which is exact for every number."""
    if node.target not in _NEUTRAL_AT_ONE or node.kwargs:
        return False
    factor = node.args[1]
    return isinstance(factor, (int, float)) and factor == 1


def _layout(node: fx.Node) -> Hashable:
    value = node.meta["val"]
    shape = node.meta.get("sizes", tuple(value.shape))
    return (shape, value.stride(), value.dtype, value.device, value.storage_offset() == 0)


def _merge_common(graph: fx.Graph) -> None:
    """Merge nodes of one task graph with equal operators and operands, except random ones."""
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        key = _expression(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _expression(node: fx.Node) -> Hashable | None:
    if node.op != "call_function" or is_random(node):
        return None
    if isinstance(node.target, OpOverload):
        if node.target._schema.is_mutable or node.target.namespace == "autoshard":
            return None
    elif node.target is not operator.getitem:
        return None
    # Across the halves only views are merged: an operator that the backward half repeats may be there to save memory.
    phase = None if node.target in _VIEWS else node.meta.get("partitioner_tag")
    return (node.target, phase, node.meta.get("task_graph"), freeze(node.args), freeze(node.kwargs))


def freeze(value: Any) -> Hashable:
    """Return a hashable copy of an argument, in which 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, freeze(value[key])) for key in sorted(value))
    if isinstance(value, slice):
        return ("slice", freeze(value.start), freeze(value.stop), freeze(value.step))
    return (type(value), value)


# Views of all numbers of a parameter: to take one again needs the parameter alone.
_PARAMETER_VIEWS = frozenset(
    {
        *(aten.t.default, aten.permute.default, aten.transpose.int, aten.expand.default, aten.alias.default),
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    }
)


def refresh_views(graph: fx.Graph, parameters: Collection[fx.Node], is_backward: Callable[[fx.Node], bool]) -> None:
    """Give backward nodes that read a forward view of a parameter a view of their own.

    Then whatever the backward half needs of a parameter starts at the parameter itself, and a plan may keep a
    gathered copy from the forward or gather it again (TensorOpt 4.2, tensor reuse).

    Args:
        graph: a joint graph.
        parameters: its parameter placeholders.
        is_backward: returns True for nodes of the backward half.
    """
    views: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        # Nodes are in topological order: the views that a view is taken of are in the set before it.
        if node.target in _PARAMETER_VIEWS and len(sources) == 1 and (sources[0] in views or sources[0] in parameters):
            views.add(node)
    # One copy of each view serves all backward nodes: it stands before the first of them.
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_backward(node):
            continue
        for source in node.all_input_nodes:
            if source in views and not is_backward(source):
                with graph.inserting_before(node):
                    node.replace_input_with(source, _copy_view_chain(source, views, copies, node))


def _copy_view_chain(view: fx.Node, views: set[fx.Node], copies: dict[fx.Node, fx.Node], user: fx.Node) -> fx.Node:
    """Return a copy of a view, and of the views that it is taken of, in the half of `user`."""
    if view not in views:
        return view  # the parameter itself
    if view not in copies:
        parent = _copy_view_chain(view.all_input_nodes[0], views, copies, user)
        copies[view] = copy = view.graph.node_copy(view, lambda _: parent)
        copy.meta["partitioner_tag"] = user.meta["partitioner_tag"]
    return copies[view]


def keep_old_values(graph: fx.Graph, inputs: Sequence[JointInput], outputs: Sequence[JointOutput]) -> None:
    """Copy every changed input whose old value the backward half or the caller reads.

    Args:
        graph: a joint graph without dead code; its output node names the nodes of `outputs`.
        inputs: the placeholders of the graph.
        outputs: the outputs of the step.
    """
    # New values are written into buffers and inputs at the end of the forward half, which a functional graph does not
    # show: simplification has removed copies that models make themselves, such as that of a queue of keys.
    changed = {output.name: output.node for output in outputs if output.kind == "mutation"}
    for source in inputs:
        if source.kind != "tangent" and source.name in changed and _is_read_late(source.node):
            with graph.inserting_after(inputs[-1].node):
                copy = graph.call_function(aten.clone.default, (source.node,))
            copy.meta = {key: value for key, value in source.node.meta.items() if key != "desc"}
            for user in [user for user in source.node.users if user is not copy]:
                user.replace_input_with(source.node, copy)


def _is_read_late(changed: fx.Node) -> bool:
    """Return True if the backward half or the caller reads an input, or a view of it."""
    views = closure([changed], lambda node: filter(is_view, node.users))
    users = (user for view in views for user in view.users)
    return any(user.op == "output" or "backward" in user.meta["partitioner_tag"] for user in users)
