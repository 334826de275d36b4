"""The constraints of a plan: what the options of a target ask of one captured step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.capture.call_layout import without_omitted_arguments
from autoshard.capture.joint import JointGraph
from autoshard.capture.marks import assign_task_graphs, defaults_of
from autoshard.errors import HintError, PlanError
from autoshard.options.target import Target
from autoshard.planner import hints as hint_rules
from autoshard.planner.hints import Pins
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.task_graph_restrictions import axes_of, whole_parameters
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.layout import canonical, dim_of, padded_segments_of
from autoshard.specs.spec import Spec, is_shard

PlacementsByName = Mapping[str, tuple[Placement, ...]]
PinsByName = Mapping[str, Pins]


def constraints_for(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    target: Target,
    placed: PlacementsByName | None = None,
    input_pins: PinsByName | None = None,
) -> Constraints:
    """Return the constraints of a plan.

    Args:
        module: the module.
        graph: a captured step of it; task graphs that hints ask for are marked in it.
        mesh: the mesh axes.
        target: the options.
        placed: placements of parameters that stay; those of buffers follow from their calls.
        input_pins: the placements of some inputs, None where the planner decides. Of the others, global ones are whole.

    Raises:
        HintError: a hint does not fit the module or the mesh.
        PlanError: the options do not fit the graph.
    """
    modules = [name for name, _ in module.named_modules()]
    # Marks in the code of the module are in the graph already; those of hints are added.
    by_hints = hint_rules.task_graphs(target.hints, modules)
    if by_hints:
        assign_task_graphs(graph.graph, {**defaults_of(module), **by_hints})
    task_graphs = axes_of(graph, mesh)
    pinned: dict[str, Pins] = {}
    if placed is None:
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        pinned.update(whole_parameters(graph, task_graphs, mesh))
        for name, pins in hint_rules.resolve(target.hints, shapes, graph.aliases, modules, mesh).items():
            # A hint on the parameter itself counts more than the task graph.
            defaults = pinned.get(name, (None,) * mesh.ndim)
            pinned[name] = tuple(default if pin is None else pin for pin, default in zip(pins, defaults, strict=True))
    else:
        # The parameters lie as an earlier call placed them: hints counted then.
        pinned.update({source.name: placed[source.name] for source in graph.parameters if source.name in placed})
    shared = shared_axis(graph, mesh, target)
    if shared is not None:
        # Before the pins of inputs: these are no DTensors, and may lie in shares.
        pinned = {name: _replicate_if_shared(graph, name, pins, shared) for name, pins in pinned.items()}
    pinned.update(_input_pins(module, graph, mesh, target, input_pins or {}, shared))
    return Constraints(
        pinned=pinned,
        planned_outputs=target.output_placements == "planned",
        outputs=_output_specs(graph, mesh, target),
        local_inputs=target.inputs == "local",
        shared=shared,
        task_graphs=task_graphs,
    )


def shared_axis(graph: JointGraph, mesh: MeshShape, target: Target) -> SharedAxis | None:
    """Return the mesh axis whose ranks have shares, with the size that it shares; None without shares.

    The size is that of dim 0 of dynamic inputs, or the unit of the dims of a static graph in equal parts. A graph of
    one size has neither.

    Raises:
        MeshError: the mesh has no such axis.
        PlanError: dim 0 of the dynamic inputs is not one size.
    """
    if not isinstance(target.shares, Mapping) or graph.dynamic is None:
        return None
    (name,) = target.shares
    axis = mesh.index(name)
    size = graph.dynamic.unit or batch_of(graph)
    if size is None:
        sizes = {str(dims[0]) for dims in graph.dynamic.dims.values() if 0 in dims}
        raise PlanError(
            f"shares are of the batch, the dynamic size of dim 0 of the inputs, and dynamic says "
            f"{', '.join(sorted(sizes)) or 'none'} of it: give that dim of all inputs one name."
        )
    return SharedAxis(axis, mesh.sizes[axis], size)


def batch_of(graph: JointGraph) -> sympy.Symbol | None:
    """Return the dynamic size of dim 0 of the dynamic inputs; None if that is not one symbol."""
    sizes = set() if graph.dynamic is None else {dims[0] for dims in graph.dynamic.dims.values() if 0 in dims}
    return sizes.pop() if len(sizes) == 1 and next(iter(sizes)).is_Symbol else None


def _replicate_if_shared(graph: JointGraph, name: str, pins: Pins, shared: SharedAxis) -> Pins:
    """Return the pins of a parameter, replicated where ranks would hold shares of it: no `DTensor` has such shards."""
    shapes = (source.node.meta.get("sizes", ((),))[0] for source in graph.inputs if source.name == name)
    shape, pin = next(shapes, ()), pins[shared.axis]
    if pin is None or not is_shard(pin) or not shape or not shared.is_of_whole(shape[dim_of(pin, len(shape))]):
        return pins
    return (*pins[: shared.axis], Replicate(), *pins[shared.axis + 1 :])


def _input_pins(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    target: Target,
    given: PinsByName,
    shared: SharedAxis | None,
) -> dict[str, Pins]:
    if target.input_placements and target.inputs == "global":
        raise PlanError('input_placements is for inputs="local": global inputs are sliced by the program, for free.')
    shapes = {s.name: tuple(s.node.meta["val"].shape) for s in graph.inputs if s.kind == "input"}
    shares: dict[str, Pins] = {}
    if shared is not None and target.inputs == "local":
        assert graph.dynamic is not None
        shares = {
            name: tuple(Shard(dim) if axis == shared.axis else None for axis in range(mesh.ndim))
            for name, dims in graph.dynamic.dims.items()
            for dim, size in dims.items()
            if size == shared.whole
        }
    # The user's placements count more than those of earlier calls and of `DTensor`s, and these more than shares.
    requested = without_omitted_arguments(module, target.input_placements, shapes)
    return {
        **shares,
        **{name: pins for name, pins in given.items() if name in shapes},
        **{name: spec.placements for name, spec in _specs_of("input", requested, shapes, mesh).items()},
    }


def _output_specs(graph: JointGraph, mesh: MeshShape, target: Target) -> dict[str, Spec]:
    if target.output_placements is None or isinstance(target.output_placements, str):
        return {}
    shapes = {name: tuple(node.meta["val"].shape) for name, node in graph.tensor_outputs.items()}
    return _specs_of("output", target.output_placements, shapes, mesh)


def _specs_of(
    kind: str, requested: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mesh: MeshShape
) -> dict[str, Spec]:
    """Return the specs of the placements that a user gave for inputs or outputs by name, which are checked."""
    specs = {}
    for name, value in requested.items():
        if name not in shapes:
            raise HintError(f"there is no {kind} {name!r}; the {kind}s are {', '.join(shapes) or 'none'}.")
        option, shape = f"{kind}_placements[{name!r}]", shapes[name]
        placements = (value,) if isinstance(value, Placement) else tuple(value)
        if len(placements) > mesh.ndim:
            raise HintError(f"{option} has {len(placements)} placements, the mesh has the axes {mesh}.")
        try:
            spec = canonical(shape, Spec.of(*placements, *[Replicate()] * (mesh.ndim - len(placements))), mesh)
            padded_segments_of(shape, spec, mesh)
        except ValueError as error:
            raise HintError(f"{option} does not fit a tensor of shape {list(shape)}: {error}") from error
        specs[name] = spec
    return specs
