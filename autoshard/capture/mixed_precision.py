"""Mixed precision as part of the graph: casts of parameters, inputs, outputs and gradients, planned like any operator.

A cast of a sharded parameter is local, and half as many bytes are gathered after it. A cast of a partial gradient says
in which dtype the ranks' partial sums are added. No other part of the library needs to know of precisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture._torch import pytree
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.joint_graph import JointOutput

aten = torch.ops.aten

REDUCED = "reduced"
"""Key of a node's meta: `"here"`: the gradient is reduced as the result of this node; `"before"`: it was before."""


class LoweredModule:
    """A fake copy of a module whose parameters and inputs are cast for export.

    The casts are those of `fully_shard(module, mp_policy=policy)` on a whole module: floating parameters (not buffers),
    the inputs of `forward`, its outputs, and gradients on their way to the optimizer.

    Args:
        twin: the fake copy; its parameters are replaced.
        policy: the precisions, as for FSDP2.
    """

    def __init__(self, twin: nn.Module, policy: MixedPrecisionPolicy) -> None:
        self.policy = policy
        self.originals: dict[str, torch.dtype] = {}
        dtype = policy.param_dtype
        lowered: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(twin.named_parameters(remove_duplicate=False)):
            if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if parameter not in lowered:  # a parameter of several names stays one
                    lowered[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                owner, _, leaf = name.rpartition(".")
                setattr(twin.get_submodule(owner), leaf, lowered[parameter])
                self.originals[name] = parameter.dtype

    def inputs(self, call: Any) -> Any:
        """Return the arguments of a call with floating tensors in the dtype in which `forward` gets them."""
        if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
            return call
        return pytree.tree_map_only(torch.Tensor, self._to_param_dtype, call)

    def _to_param_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(self.policy.param_dtype).requires_grad_(tensor.requires_grad)

    def with_casts(self, exported: Exported, call: Sequence[torch.Tensor]) -> Exported:
        """Return the exported graph with the callers' dtypes as inputs, and a cast at the first use of each.

        Args:
            exported: the forward graph of the fake copy, on cast tensors.
            call: the tensors of the call before the casts, in order.
        """
        graph = exported.graph
        tensors = iter(call)
        inputs = []
        for node, item in exported.placeholders.items():
            dtype = item.fake.dtype
            if item.kind == "parameter":
                dtype = self.originals.get(item.name, dtype)
            elif item.kind == "input":
                dtype = next(tensors).dtype
            inputs.append(item if dtype == item.fake.dtype else _cast_at_first_use(graph, node, item, dtype))
        output_dtype = self.policy.output_dtype
        outputs = tuple(
            _cast(graph, node, output_dtype, _last(graph))
            if output_dtype is not None and node.meta["val"].is_floating_point()
            else node
            for node in exported.outputs
        )
        return replace(exported, inputs=tuple(inputs), outputs=outputs)


def _last(graph: fx.Graph) -> fx.Node:
    return next(reversed(graph.nodes))


def _cast_at_first_use(graph: fx.Graph, node: fx.Node, item: ExportedInput, dtype: torch.dtype) -> ExportedInput:
    """Give the placeholder the dtype that callers pass, insert a cast before its first user, and return its input."""
    users = list(node.users)
    fake = item.fake.detach().to(dtype).requires_grad_(item.fake.requires_grad)
    node.meta["val"] = fake
    if users:
        first = min(users)
        cast = _cast(graph, node, item.fake.dtype, first)
        cast.meta["val"] = item.fake
        for user in users:
            user.replace_input_with(node, cast)
    return replace(item, fake=fake)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    """Return `node` in another dtype, cast in the module of the node that it is cast for."""
    if node.meta["val"].dtype == dtype:
        return node
    with graph.inserting_before(before):
        cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta.update({key: before.meta[key] for key in ("nn_module_stack",) if key in before.meta})
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


def reduce_gradients(
    graph: fx.Graph, outputs: Sequence[JointOutput], policy: MixedPrecisionPolicy
) -> list[JointOutput]:
    """Insert the casts around the reduction of parameter gradients, and mark the nodes by `REDUCED` in their meta.

    Args:
        graph: the joint graph; its output node names the nodes of `outputs`.
        outputs: the outputs of the step.
        policy: its `reduce_dtype` is that of the reduction; without one, gradients are reduced as autograd made them.

    Returns:
        The outputs with the cast gradients.
    """
    if policy.param_dtype is None and policy.reduce_dtype is None:
        return list(outputs)
    reduced: dict[fx.Node, fx.Node] = {}
    result = []
    for output in outputs:
        node = output.node
        if output.kind == "gradient" and node is not None and node.meta["val"].is_floating_point():
            if node not in reduced:
                reduced[node] = _cast_for_reduction(graph, node, policy)
            output = replace(output, node=reduced[node])
        result.append(output)
    _last(graph).args = (tuple(output.node for output in result),)
    for node in reduced:
        if not node.users:
            graph.erase_node(node)  # autograd's own cast, in whose place another one stands
    return result


def _cast_for_reduction(graph: fx.Graph, node: fx.Node, policy: MixedPrecisionPolicy) -> fx.Node:
    """Return the gradient `node`, reduced in the dtype of the policy and cast back to its own."""
    # Autograd makes the gradient of a cast parameter in `param_dtype` and casts it: it can be reduced before that cast.
    source, final_dtype = node, node.meta["val"].dtype
    if node.target is aten._to_copy.default and node.all_input_nodes[0].meta["val"].dtype == policy.param_dtype:
        source = node.all_input_nodes[0]
    dtype = policy.reduce_dtype or source.meta["val"].dtype
    if dtype == final_dtype:
        reduced = node
    else:
        reduced = source if source.meta["val"].dtype == dtype else _cast_after(graph, source, dtype, node)
    if reduced is not source:
        reduced.meta[REDUCED] = "here"
    if dtype == final_dtype:
        return reduced
    restored = node if reduced is source else _cast_after(graph, reduced, final_dtype, node)
    restored.meta[REDUCED] = "before"
    return restored


def _cast_after(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Return a cast of `source` right behind it, with the meta of `like`."""
    with graph.inserting_after(source):
        cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    cast.meta.update({key: like.meta[key] for key in ("partitioner_tag", "module_path", "sizes") if key in like.meta})
    cast.meta["val"] = source.meta["val"].to(dtype)
    return cast
