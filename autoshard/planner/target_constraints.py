"""The constraints of a plan, from the options of a target and one captured step."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.capture.call_layout import without_omitted_arguments
from autoshard.capture.joint import JointGraph
from autoshard.capture.marks import assign_task_graphs, defaults_of
from autoshard.capture.recomputation import forms_of
from autoshard.errors import HintError, PlanError, reason_of
from autoshard.options.placements import OUTPUTS, Pins, fill, names_reached, unknown_name_error
from autoshard.options.target import Target
from autoshard.planner import hints as hint_rules
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.task_graph_restrictions import axes_of, whole_parameters
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.data_axes import row_placements
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
        graph: a captured step of it; the task graphs of hints are marked in it.
        mesh: the mesh axes.
        target: the options.
        placed: fixed placements of parameters; those of buffers follow from their calls.
        input_pins: the placements of some inputs, None where the planner decides. Other global inputs are whole.

    Raises:
        HintError: a hint or a placement of inputs or outputs does not fit the module or the mesh.
        PlanError: the options do not fit the graph.
    """
    modules = [name for name, _ in module.named_modules()]
    # The graph already has the marks in the code of the module; those of hints are added.
    by_hints = hint_rules.task_graphs(target.hints, modules)
    if by_hints:
        for form in forms_of(graph):
            assign_task_graphs(form.graph, {**defaults_of(module), **by_hints})
    task_graphs = axes_of(graph, mesh)
    pinned: dict[str, Pins] = {}
    if placed is None:
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        pinned.update(whole_parameters(graph, task_graphs, mesh))
        for name, pins in hint_rules.resolve(target.hints, shapes, graph.aliases, modules, mesh).items():
            # A hint on the parameter itself overrides the task graph.
            defaults = pinned.get(name, (None,) * mesh.ndim)
            pinned[name] = tuple(default if pin is None else pin for pin, default in zip(pins, defaults, strict=True))
    else:
        # The placements of an earlier call, which followed the hints.
        pinned.update({source.name: placed[source.name] for source in graph.parameters if source.name in placed})
    shared = shared_axis(graph, mesh, target)
    if shared is not None:
        # Before the pins of inputs, which are no DTensors and may be in shares.
        pinned = {name: _replicate_if_shared(graph, name, pins, shared) for name, pins in pinned.items()}
    first = placed is None
    pinned.update(_input_pins(module, graph, mesh, target, input_pins or {}, shared, first))
    return Constraints(
        pinned=pinned,
        placed=not first,
        planned_outputs=leaves_outputs(graph, target),
        outputs=_output_specs(graph, mesh, target, first),
        row_axes=tuple(map(mesh.index, target.data_axes)) if target.outputs == "local" else (),
        local_inputs=target.inputs == "local",
        shared=shared,
        task_graphs=task_graphs,
        hosted=_hosted_parameters(graph, target),
    )


def _hosted_parameters(graph: JointGraph, target: Target) -> frozenset[str]:
    """Return the parameters whose optimizer state is always on the host."""
    asked = target.settings.offload_optimizer
    if isinstance(asked, str):
        return frozenset(source.name for source in graph.parameters if asked == "all")
    return frozenset(source.name for source in graph.parameters if asked & {*graph.aliases[source.name]})


def leaves_outputs(graph: JointGraph, target: Target) -> bool:
    """Return True if outputs are returned in the plan's specs, not gathered."""
    if target.output_placements == "auto":
        return bool(graph.outputs_beside_loss)
    return target.output_placements == "planned"


def shared_axis(graph: JointGraph, mesh: MeshShape, target: Target) -> SharedAxis | None:
    """Return the mesh axis whose ranks have shares, with the shared size; None without shares.

    The size is that of dim 0 of dynamic inputs, or the unit of the dims of a static graph in equal parts. A graph with
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
    """Return the pins of a parameter, replicated if ranks would hold shares of it: no `DTensor` has such shards."""
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
    first: bool,
) -> dict[str, Pins]:
    """Return the given pins of inputs and those of local inputs; the program slices other global ones."""
    shapes = {s.name: tuple(s.node.meta["val"].shape) for s in graph.inputs if s.kind == "input"}
    given = {name: row for name, row in given.items() if name in shapes}
    if target.inputs == "global":
        return dict(given)
    # Labels may be left out, and a later call may lack what the first one had.
    for glob in without_omitted_arguments(module, target.input_placements, ()) if first else ():
        if not names_reached(glob, shapes):
            raise unknown_name_error("input", glob, shapes)
    pins = target.input_pins(mesh, shapes)
    named = {name for glob in target.input_placements for name in names_reached(glob, shapes)}
    if shared is not None:
        assert graph.dynamic is not None
        for name, dims in graph.dynamic.dims.items():
            dim = next((dim for dim, size in dims.items() if size == shared.whole), None)
            if dim is not None and name not in named:
                row = pins[name]
                pins[name] = (*row[: shared.axis], Shard(dim), *row[shared.axis + 1 :])
    # The first call decided the placements of inputs by the same options; a later batch may be too small to tell.
    return {name: _check_spec("input", name, shapes[name], row, mesh).placements for name, row in pins.items()} | given


def _output_specs(graph: JointGraph, mesh: MeshShape, target: Target, first: bool) -> dict[str, Spec]:
    """Return the specs of the outputs that `output_placements` names."""
    if target.output_placements is None or isinstance(target.output_placements, str):
        return {}
    shapes = {name: tuple(node.meta["val"].shape) for name, node in graph.tensor_outputs.items()}
    # Calls without training also have the outputs that training does not read.
    known = {*shapes, *(graph.unread or ())}
    for glob in target.output_placements if first else ():
        if not names_reached(glob, known):
            raise unknown_name_error("output", glob, shapes)
    pins = OUTPUTS.resolve(target.output_placements, lambda glob: names_reached(glob, shapes), shapes, mesh)
    open_axes = target.row_placements(mesh) if target.outputs == "local" else row_placements(mesh, ())
    return {name: _check_spec("output", name, shapes[name], fill(row, open_axes), mesh) for name, row in pins.items()}


def _check_spec(
    kind: str, name: str, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: MeshShape
) -> Spec:
    """Return the spec of the placements of an input or output; raise a `HintError` if the tensor can't have it."""
    try:
        spec = canonical(shape, Spec.of(*placements), mesh)
        padded_segments_of(shape, spec, mesh)
    except ValueError as error:
        raise HintError(
            f"the {kind} {name} of shape {list(shape)} cannot lie as {Spec.of(*placements)}, as {kind}_placements or "
            f"data_axes ask: {reason_of(error)}"
        ) from error
    return spec
