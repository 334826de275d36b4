"""Mixed precision as part of the graph: casts of parameters, inputs, outputs and gradients, planned like any operator.

A cast of a sharded parameter is local, and half as much is gathered behind it; a cast of a gradient that is still
partial says in which dtype the ranks' shares are added. So nothing else of the library needs to know of precisions.
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
"""Key of a node's meta: `"here"`: the gradient is reduced as this node's result; `"before"`: it has been by then."""


class LoweredModule:
    """A fake twin whose parameters and inputs are cast for export, and the graph with these casts in it.

    What is cast is what `fully_shard(module, mp_policy=policy)` casts on a whole module: its floating parameters (not
    its buffers), the inputs of `forward`, its outputs, and gradients on their way to the optimizer.

    Args:
        twin: changed: its parameters are replaced.
        policy: FSDP2's.
    """

    def __init__(self, twin: nn.Module, policy: MixedPrecisionPolicy) -> None:
        self.policy = policy
        self.originals: dict[str, torch.dtype] = {}
        if policy.param_dtype is not None:
            self._lower_parameters(twin, policy.param_dtype)

    def _lower_parameters(self, twin: nn.Module, dtype: torch.dtype) -> None:
        lowered: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(twin.named_parameters(remove_duplicate=False)):
            if parameter.is_floating_point() and parameter.dtype != dtype:
                if parameter not in lowered:
                    cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    lowered[parameter] = cast
                owner, _, leaf = name.rpartition(".")
                setattr(twin.get_submodule(owner), leaf, lowered[parameter])
                self.originals[name] = parameter.dtype

    def inputs(self, call: Any) -> Any:
        """A call with its floating tensors cast as `forward` is to get them."""
        if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
            return call
        return pytree.tree_map_only(torch.Tensor, self._to_param_dtype, call)

    def _to_param_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(self.policy.param_dtype).requires_grad_(tensor.requires_grad)

    def with_casts(self, exported: Exported, call: Sequence[torch.Tensor]) -> Exported:
        """The exported graph taking what callers have, cast where it is used first.

        Args:
            exported: the forward graph of the twin, on lowered tensors.
            call: the tensors of the call before they were cast, in order.
        """
        graph = exported.graph_module.graph
        given = iter(call)
        inputs = []
        for node, item in zip(graph.find_nodes(op="placeholder"), exported.inputs, strict=True):
            dtype = item.fake.dtype
            if item.kind == "parameter":
                dtype = self.originals.get(item.name, dtype)
            elif item.kind == "input":
                dtype = next(given).dtype
            inputs.append(item if dtype == item.fake.dtype else _cast_at_first_use(graph, node, item, dtype))
        wanted = self.policy.output_dtype
        outputs = tuple(
            node if wanted is None or not _is_floating(node) else _cast(graph, node, wanted, _last(graph))
            for node in exported.outputs
        )
        return replace(exported, inputs=tuple(inputs), outputs=outputs)


def _is_floating(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _last(graph: fx.Graph) -> fx.Node:
    return next(reversed(graph.nodes))


def _cast_at_first_use(graph: fx.Graph, node: fx.Node, item: ExportedInput, dtype: torch.dtype) -> ExportedInput:
    """The placeholder as its caller holds it, and a cast before its first user."""
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
    """`node` in another dtype, in the module of the node that it is cast for."""
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
    """Gradients of parameters with the casts around their reduction, marked by `REDUCED` in their meta.

    Args:
        graph: the joint graph; its output node names the nodes of `outputs`.
        outputs: what the step hands back.
        policy: its `reduce_dtype` is that of the reduction; without one, that in which autograd made the gradient.
    """
    if policy.param_dtype is None and policy.reduce_dtype is None:
        return list(outputs)
    made: dict[fx.Node, fx.Node] = {}
    result = []
    for output in outputs:
        node = output.node
        if output.kind == "gradient" and node is not None and node.meta["val"].is_floating_point():
            if node not in made:
                made[node] = _cast_for_reduction(graph, node, policy)
            output = replace(output, node=made[node])
        result.append(output)
    _last(graph).args = (tuple(output.node for output in result),)
    for node in made:
        if not node.users:
            graph.erase_node(node)  # the cast that another one took the place of
    return result


def _cast_for_reduction(graph: fx.Graph, node: fx.Node, policy: MixedPrecisionPolicy) -> fx.Node:
    """The gradient `node`, reduced in the dtype that the policy says and then in its own again."""
    source, wanted = node, node.meta["val"].dtype
    if node.target is aten._to_copy.default and node.all_input_nodes[0].meta["val"].dtype == policy.param_dtype:
        source = node.all_input_nodes[0]
    dtype = policy.reduce_dtype or source.meta["val"].dtype
    if dtype == wanted:
        reduced = node
    else:
        reduced = source if source.meta["val"].dtype == dtype else _cast_after(graph, source, dtype, node)
    if reduced is not source:
        reduced.meta[REDUCED] = "here"
    if dtype == wanted:
        return reduced
    restored = node if reduced is source else _cast_after(graph, reduced, wanted, node)
    restored.meta[REDUCED] = "before"
    return restored


def _cast_after(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """A cast of `source` right behind it, described as `like` is."""
    with graph.inserting_after(source):
        cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    cast.meta.update({key: like.meta[key] for key in ("partitioner_tag", "module_path", "sizes") if key in like.meta})
    cast.meta["val"] = source.meta["val"].to(dtype)
    return cast
