"""The backend of `torch.compile(model, backend="autoshard")`.

Dynamo calls the backend while it compiles the model's first call, and checks afterwards that nothing has changed, so
the model cannot be parallelized then. The backend returns a function instead of the graph: when it runs, within that
first call, it parallelizes the model and returns the results of this call. From then on the model's `forward` is that
of `autoshard.parallelize`, which Dynamo does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.api import parallelize
from autoshard.compile_backend._torch import (
    ModuleCall,
    break_reason,
    leave_dynamo,
    module_call,
    output_values,
    pytree,
)
from autoshard.errors import CaptureError, MeshError, PlanError
from autoshard.names import suggestion
from autoshard.options import OptionKeywords
from autoshard.options.mesh_context import mesh_in_use
from autoshard.plans.sharding_plan import ShardingPlan

OPTIONS = ("mesh", *OptionKeywords.__annotations__, "plan")
"""The allowed names in `torch.compile(..., options={...})`: the mesh, and the keyword options of `parallelize`."""


def autoshard(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """The backend. Use it by name: `torch.compile(model, backend="autoshard", options={"mesh": mesh})`.

    Args:
        graph: Dynamo's graph of the model's `forward`.
        example_inputs: Dynamo's example inputs, not used.
        options: `mesh`, and any keyword option of `autoshard.parallelize`. Without `mesh`, the mesh of
            `autoshard.use_mesh` around the first call is used.
        others: further options of torch.compile, such as `mode`.

    Returns:
        A function of the graph's inputs. The first call of the compiled model runs it, and it may raise: MeshError (no
        mesh), PlanError (an option that is unknown, or refused by `parallelize`), CaptureError (the graph is not the
        whole `forward` of the compiled module), and the errors of `parallelize`.
    """

    def first_call(*inputs: Any) -> Sequence[Any]:
        # Errors are raised in the returned function: while Dynamo compiles, it would wrap them in its own errors.
        settings = {**(options or {}), **others}
        for name in settings:
            if name not in OPTIONS:
                raise PlanError(
                    f"the backend autoshard has no option {name!r}. {suggestion(name, OPTIONS)} It knows "
                    f"{', '.join(OPTIONS)}."
                )
        mesh = settings.pop("mesh", None) or mesh_in_use()
        if mesh is None:
            raise MeshError(
                'torch.compile(..., backend="autoshard") needs a device mesh: pass options={"mesh": mesh}, or make the '
                "compiled model's first call under `with autoshard.use_mesh(mesh):`."
            )
        call = _whole_call(graph, inputs)
        if call.part == "hook":
            # With whole tensors, as hooks see them in a parallelized model, too.
            results: Sequence[Any] = graph(*inputs)
            return results
        return _parallelize(call, graph, inputs, mesh, settings)

    return first_call


def _whole_call(graph: fx.GraphModule, inputs: Sequence[Any]) -> ModuleCall:
    """Return the call of which this graph is the whole module, or a hook; a hook must not use parameters."""
    reason = break_reason(graph)
    call = None if reason else module_call()
    if call is not None and (call.part != "hook" or not any(isinstance(value, nn.Parameter) for value in inputs)):
        return call
    place = f" The first one ends at {reason[1]}: {reason[0]}" if reason else ""
    raise CaptureError(
        "the backend autoshard plans the whole forward of the module that is given to torch.compile, and Dynamo hands "
        "it a part of that, or of a function around it. Compile the module itself, not a function that calls it. If "
        "its forward breaks into several graphs, call autoshard.parallelize(module, mesh) in the place of "
        "torch.compile (it captures through such places where it can), or mend what breaks the graph; "
        f"torch.compile(..., fullgraph=True) shows it.{place}"
    )


def _parallelize(
    call: ModuleCall, graph: fx.GraphModule, inputs: Sequence[Any], mesh: DeviceMesh, options: dict[str, Any]
) -> Sequence[Any]:
    """Parallelize the module in place and return the graph's outputs for this call."""
    module = call.module
    before = {name: parameter for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    names = {id(tensor): name for name, tensor in (*before.items(), *module.named_buffers())}
    parallelize(module, mesh, call.args, call.kwargs, **options)
    leave_dynamo(call)
    expected = output_values(graph)
    plan: ShardingPlan | None = module.sharding_plan  # type: ignore[assignment]
    hooked = call.part == "all" and bool(module._forward_hooks or module._forward_pre_hooks)
    # If outputs can be matched by dtype and number of dims, the module itself computes the results of this call.
    keys = [_tensor_key(value) for value in expected if isinstance(value, Tensor)]
    distinct = len(keys) == len(expected) == len(set(keys))
    if plan is not None and not hooked and distinct and len(expected) == len(plan.output_placements):
        result = module.forward(*call.args, **call.kwargs)
        tensors = {_tensor_key(leaf): leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
        assert tensors.keys() == set(keys), "Dynamo and torch.export give other results"
        return [tensors[key] for key in keys]
    return _parallelize_graph(module, graph, inputs, names, mesh, options)


def _tensor_key(tensor: Tensor) -> tuple[torch.dtype, int]:
    """Return the properties of a tensor that both sides know; Dynamo's sizes may be symbols, or those of a shard."""
    return tensor.dtype, tensor.ndim


class _GraphModule(nn.Module):
    """Dynamo's graph as a module that owns some of the graph's inputs, and takes the others as arguments.

    It is created on the meta device; `set_owned` sets the tensors.
    """

    def __init__(self, graph: fx.GraphModule, owned: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        self.owned = dict(owned)
        for index, tensor in owned.items():
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(_input_name(index), nn.Parameter(like, tensor.requires_grad))
            else:
                self.register_buffer(_input_name(index), like)

    def set_owned(self) -> None:
        """Set the tensors, which by now belong to the parallelized module."""
        for index, tensor in self.owned.items():
            setattr(self, _input_name(index), tensor)

    def forward(self, *others: Any) -> Any:
        rest = iter(others)
        count = len(self.owned) + len(others)
        return self.graph(*(getattr(self, _input_name(i)) if i in self.owned else next(rest) for i in range(count)))


def _input_name(index: int) -> str:
    return f"input_{index}"


def _parallelize_graph(
    module: nn.Module,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    names: Mapping[int, str],
    mesh: DeviceMesh,
    options: dict[str, Any],
) -> Sequence[Any]:
    """Return the graph's outputs, with a plan of the graph itself that keeps the placements of the module's parameters.

    Used for this one call if the module's results cannot be matched with the graph's outputs.
    """
    local = "local" in (options.get("inputs"), options.get("outputs"))
    if local or isinstance(options.get("output_placements"), Mapping):
        raise CaptureError(
            f"the results of {type(module).__name__} can't be told apart in Dynamo's graph, which inputs='local', "
            "outputs='local' and named output_placements need. Call autoshard.parallelize(module, mesh, ...) instead "
            "of torch.compile."
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    owned = {index: tensors[names[id(value)]] for index, value in enumerate(inputs) if id(value) in names}
    graph_module = _GraphModule(graph, owned)
    pins = {_input_name(index): tensor.placements for index, tensor in owned.items() if isinstance(tensor, DTensor)}
    arguments = tuple(value for index, value in enumerate(inputs) if index not in owned)
    parallelize(graph_module, mesh, arguments, **{**options, "hints": pins, "plan": None})
    graph_module.set_owned()
    results: Sequence[Any] = graph_module(*arguments)
    return results
