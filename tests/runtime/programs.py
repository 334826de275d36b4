"""Local steps with real process groups, and their run on all ranks in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture._torch import outside_modes
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.planner.planning_problem import Constraints
from autoshard.program.localize import LocalStep, localize
from autoshard.runtime.shards import cut
from autoshard.runtime.step import Ranks
from autoshard.specs.axes import MeshShape
from tests.planner.steps import flow_of, planner_of


def step_on(
    graph: JointGraph,
    mesh: DeviceMesh,
    constraints: Constraints | None = None,
    cluster: Cluster | None = None,
    effort: str = "full",
) -> LocalStep:
    """The program of the plan for a graph."""
    shape = MeshShape.of(mesh)
    planner = planner_of(graph, dict(zip(shape.names, shape.sizes, strict=True)), constraints, cluster, effort=effort)
    groups = Ranks(mesh, torch.device("cpu")).groups
    with outside_modes():
        return localize(flow_of(planner, planner.plan()), planner.resharder, groups)


def locals_of(step: LocalStep, module: nn.Module, inputs: Mapping[str, Any], mesh: DeviceMesh) -> list[torch.Tensor]:
    """What a rank passes to a step: its shards of parameters, buffers and inputs, its coordinates, and a seed."""
    tensors = []
    for border in step.inputs:
        if border.kind == "parameter":
            tensors.append(cut(module.get_parameter(border.name), mesh, border.spec))
        elif border.kind == "buffer":
            tensors.append(cut(module.get_buffer(border.name), mesh, border.spec))
        elif border.kind == "input":
            tensors.append(cut(inputs[border.name], mesh, border.spec))
    ranks = Ranks(mesh, torch.device("cpu"))
    return [*tensors, *ranks.arguments(ranks.seed(True))]


def run_halves(
    halves: Sequence[fx.GraphModule], step: LocalStep, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of the forward half, and gradients with ones for tangents."""
    results = list(halves[0](*tensors))
    outputs, saved = results[: len(step.forward_outputs)], results[len(step.forward_outputs) :]
    tangents = [torch.ones(border.shape, dtype=border.dtype) for border in step.tangents]
    return outputs, list(halves[1](*saved, *tangents))
