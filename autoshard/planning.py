"""From what a user asked of a captured step to its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate

from autoshard import hints as hint_rules
from autoshard.capture.joint import JointGraph
from autoshard.errors import HintError, PlanError
from autoshard.options import Options, Placements
from autoshard.plan import ShardingPlan
from autoshard.planner.planner import Planner
from autoshard.planner.problem import Wishes
from autoshard.planner.recompute import planned
from autoshard.progress import watched
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, padded_segments_of
from autoshard.specs.spec import Spec


def planned_with(planner: Planner, capture_seconds: float, options: Options) -> ShardingPlan:
    """What a planner decides, with a line about the search where somebody watches."""
    with watched(options.verbose) as planner.progress:
        return told(planned(planner), capture_seconds, options)


def told(result: ShardingPlan, capture_seconds: float, options: Options) -> ShardingPlan:
    """A plan with what the planner does not know of it."""
    return replace(
        result,
        timings={"capture": capture_seconds, **result.timings},
        hints=hint_rules.describe(options.hints),
        options={
            "inputs": options.inputs,
            "memory_limit": options.settings.memory_limit,
            "method": options.settings.method,
        },
    )


def planner_for(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    options: Options,
    placed: Mapping[str, tuple[Placement, ...]] | None = None,
    placed_inputs: Mapping[str, tuple[Placement, ...]] | None = None,
) -> Planner:
    """A planner for one graph.

    Args:
        module, graph, mesh, options: what is planned, and how.
        placed: placements of parameters that are not to move.
        placed_inputs: placements in which local inputs were asked for before, and arrive.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    modules = [name for name, _ in module.named_modules()]
    pinned: dict[str, tuple[Placement | None, ...]] = {}
    if placed is None:
        pinned.update(hint_rules.resolve(options.hints, shapes, graph.aliases, modules, mesh))
    else:
        pinned.update({source.name: placed[source.name] for source in graph.inputs if source.name in placed})
    pinned.update(_input_pins(graph, mesh, options, placed_inputs or {}))
    planned = options.output_placements == "planned"
    wishes = Wishes(
        pinned=pinned,
        planned_outputs=planned,
        outputs={} if planned else _output_specs(graph, mesh, options.output_placements),
        local_inputs=options.inputs == "local",
    )
    return Planner(graph, mesh, options.cluster, wishes, options.settings)


def _input_pins(
    graph: JointGraph, mesh: MeshShape, options: Options, before: Mapping[str, tuple[Placement, ...]]
) -> dict[str, tuple[Placement | None, ...]]:
    shapes = {s.name: tuple(s.node.meta["val"].shape) for s in graph.inputs if s.kind == "input"}
    if options.input_placements and options.inputs == "global":
        raise PlanError('input_placements is for inputs="local": global inputs are sliced by the program, for free.')
    asked: dict[str, tuple[Placement | None, ...]] = {
        name: _spec_of(f"input_placements[{name!r}]", value, shapes[name], mesh).placements
        for name, value in options.input_placements.items()
        if _known(name, shapes, "input")
    }
    return {**{name: placements for name, placements in before.items() if name in shapes}, **asked}


def _output_specs(graph: JointGraph, mesh: MeshShape, wanted: Placements) -> dict[str, Spec]:
    shapes = {
        o.name: tuple(o.node.meta["val"].shape) for o in graph.outputs if o.kind == "output" and o.node is not None
    }
    if wanted is None or isinstance(wanted, str):
        return {}
    return {
        name: _spec_of(f"output_placements[{name!r}]", value, shapes[name], mesh)
        for name, value in wanted.items()
        if _known(name, shapes, "output")
    }


def _known(name: str, shapes: Mapping[str, Any], kind: str) -> bool:
    if name not in shapes:
        raise HintError(f"there is no {kind} {name!r}; the {kind}s are {', '.join(shapes) or 'none'}.")
    return True


def _spec_of(what: str, value: Any, shape: tuple[int, ...], mesh: MeshShape) -> Spec:
    placements = (value,) if isinstance(value, Placement) else tuple(value)
    if len(placements) > mesh.ndim:
        raise HintError(f"{what} has {len(placements)} placements, the mesh has the axes {mesh}.")
    try:
        spec = canonical(shape, Spec.of(*placements, *[Replicate()] * (mesh.ndim - len(placements))), mesh)
        padded_segments_of(shape, spec, mesh)
    except ValueError as error:
        raise HintError(f"{what} does not fit a tensor of shape {list(shape)}: {error}") from error
    return spec
