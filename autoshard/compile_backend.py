"""`torch.compile(model, backend="autoshard")`: the planner, reached through torch's own door.

Dynamo calls the backend while it compiles the model's first call, and checks afterwards that nothing has changed. So
nothing is done then: the graph that the backend hands back parallelizes the model when it is run, in the midst of that
first call, and gives this call its results. From then on the model's `forward` is that of `autoshard.parallelize`,
which Dynamo leaves alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard._torch import ModuleCall, break_reason, leave_dynamo, module_call, output_values, pytree
from autoshard.api import parallelize
from autoshard.errors import CaptureError, MeshError, PlanError
from autoshard.names import suggestion
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.use_mesh import current_mesh

OPTIONS = (
    "mesh",
    *(name for name, one in inspect.signature(parallelize).parameters.items() if one.kind is one.KEYWORD_ONLY),
)
"""What `torch.compile(..., options={...})` may hold: the mesh, and the keyword options of `parallelize`."""


def autoshard(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """The backend. Use it by name: `torch.compile(model, backend="autoshard", options={"mesh": mesh})`.

    Args:
        graph: Dynamo's graph of the model's `forward`.
        example_inputs: Dynamo's, not needed.
        options: `mesh`, and any keyword option of `autoshard.parallelize`. Without `mesh`, the mesh is that of
            `autoshard.use_mesh` around the first call.
        others: what else torch.compile was told, such as `mode`.

    Returns:
        A function of the graph's inputs. The first call of the compiled model runs it, and it may raise:
        MeshError (there is no mesh), PlanError (an option that is unknown, or is refused by `parallelize`),
        CaptureError (the graph is not the whole `forward` of the compiled module), and what `parallelize` raises.
    """

    def first_call(*inputs: Any) -> Sequence[Any]:
        known = _check_options({**(options or {}), **others})
        mesh = known.pop("mesh", None) or current_mesh()
        if mesh is None:
            raise MeshError(
                'torch.compile(..., backend="autoshard") needs a device mesh: pass options={"mesh": mesh}, or make the '
                "compiled model's first call under `with autoshard.use_mesh(mesh):`."
            )
        call = _whole_call(graph, inputs)
        if call.part == "hook":
            results: Sequence[Any] = graph(*inputs)  # of whole tensors, as hooks see them
            return results
        return _parallelize(call, graph, inputs, mesh, known)

    return first_call


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in OPTIONS:
            raise PlanError(
                f"the backend autoshard has no option {name!r}. {suggestion(name, OPTIONS)} It knows "
                f"{', '.join(OPTIONS)}."
            )
    return dict(options)


def _whole_call(graph: fx.GraphModule, inputs: Sequence[Any]) -> ModuleCall:
    """The module call that this graph is the whole of, or of a hook of which that needs no parameter."""
    reason = break_reason(graph)
    call = None if reason else module_call()
    if call is not None and (call.part != "hook" or not any(isinstance(one, nn.Parameter) for one in inputs)):
        return call
    told = f" The first one ends at {reason[1]}: {reason[0]}" if reason else ""
    raise CaptureError(
        "the backend autoshard plans the whole forward of the module that is given to torch.compile, and Dynamo hands "
        "it a part of that, or of a function around it. Compile the module itself, not a function that calls it. If "
        "its forward breaks into several graphs, call autoshard.parallelize(module, mesh) in the place of "
        "torch.compile (it captures through such places where it can), or mend what breaks the graph; "
        f"torch.compile(..., fullgraph=True) shows it.{told}"
    )


def _parallelize(
    call: ModuleCall, graph: fx.GraphModule, inputs: Sequence[Any], mesh: DeviceMesh, options: dict[str, Any]
) -> Sequence[Any]:
    """Parallelize the module in place; the graph's outputs for this call."""
    module = call.module
    before = {name: parameter for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    names = {id(tensor): name for name, tensor in (*before.items(), *module.named_buffers())}
    parallelize(module, mesh, call.args, call.kwargs, **options)
    leave_dynamo(call)
    wanted = output_values(graph)
    plan: ShardingPlan | None = module.sharding_plan  # type: ignore[assignment]
    hooked = call.part == "all" and bool(module._forward_hooks or module._forward_pre_hooks)
    if plan is not None and not hooked and _are_distinct(wanted) and len(wanted) == len(plan.output_placements):
        return _order_results(module.forward(*call.args, **call.kwargs), wanted)
    return _parallelize_graph(module, graph, inputs, names, mesh, options)


def _are_distinct(values: Sequence[Any]) -> bool:
    """Whether no two of the graph's outputs look alike, so that each can be found among the module's results."""
    looks = [_tensor_key(value) for value in values if isinstance(value, Tensor)]
    return len(looks) == len(values) == len(set(looks))


def _tensor_key(tensor: Tensor) -> tuple[torch.dtype, int]:
    """What is known of a tensor on both sides; Dynamo's sizes may be symbols, or a shard's."""
    return tensor.dtype, tensor.ndim


def _order_results(result: Any, wanted: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the module's result in the order of the graph's outputs."""
    tensors = {_tensor_key(leaf): leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
    assert tensors.keys() == {_tensor_key(value) for value in wanted}, "Dynamo and torch.export give other results"
    return [tensors[_tensor_key(value)] for value in wanted]


class _GraphModule(nn.Module):
    """Dynamo's graph as a module that owns some of the graph's inputs, and is called with the others.

    It is made without numbers, like a model on the meta device, and `hold` gives it the tensors.
    """

    def __init__(self, graph: fx.GraphModule, held: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        self.owned = dict(held)
        for index, tensor in held.items():
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(_input_name(index), nn.Parameter(like, tensor.requires_grad))
            else:
                self.register_buffer(_input_name(index), like)

    def set_owned(self) -> None:
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
    """The graph's outputs, by a plan for the graph itself under the placements that the module's parameters have.

    It serves this one call, where which of the module's results is which output of the graph can't be told.
    """
    if options.get("inputs") == "local" or isinstance(options.get("output_placements"), Mapping):
        raise CaptureError(
            f"the results of {type(module).__name__} can't be told apart in Dynamo's graph, which inputs='local' and "
            "named output_placements need. Call autoshard.parallelize(module, mesh, ...) in the place of torch.compile."
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = {index: tensors[names[id(value)]] for index, value in enumerate(inputs) if id(value) in names}
    alone = _GraphModule(graph, held)
    pins = {_input_name(index): tensor.placements for index, tensor in held.items() if isinstance(tensor, DTensor)}
    others = tuple(value for index, value in enumerate(inputs) if index not in held)
    parallelize(alone, mesh, others, **{**options, "hints": pins, "plan": None})
    alone.set_owned()
    results: Sequence[Any] = alone(*others)
    return results
