"""Captured steps for planning a pipeline, each captured once, and reuse between stages that differ only in names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture.capture_errors import node_line
from autoshard.capture.joint_graph import JointGraph, fingerprint
from autoshard.capture.marks import marked_regions
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import PlanError
from autoshard.options.target import Target
from autoshard.patterns.decisions import Decisions
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, capture_microbatch
from autoshard.pipeline.graph.operator_costs import read_stage_graph
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.planner import hints as hint_rules
from autoshard.planner.regions import mark_regions
from autoshard.specs.axes import MeshShape


def structural_fingerprint(graph: JointGraph) -> str:
    """Return a hash that is equal for graphs that differ only in the names of parameters, buffers and inputs."""
    # Names of inputs become their indices, so that tied tensors remain tied.
    number = {item.name: str(place) for place, item in enumerate(graph.inputs)}
    inputs = [replace(item, name=number[item.name]) for item in graph.inputs]
    outputs = [replace(item, name=number.get(item.name, item.name), tangent=None) for item in graph.outputs]
    return fingerprint(inputs, outputs, graph.graph)


def task_graph_marks(graph: JointGraph) -> tuple[tuple[str, int] | None, ...]:
    """Return the primitive of every operator, and the index of its task graph in order of occurrence."""
    task_graphs = [graph.task_graph(node) for node in graph.graph.nodes]
    number = {task_graph: place for place, task_graph in enumerate(dict.fromkeys(task_graphs))}
    return tuple(None if mark is None else (", ".join(map(str, mark.primitives)), number[mark]) for mark in task_graphs)


def rename_decisions(decisions: Decisions, source: JointGraph, target: JointGraph) -> Decisions:
    """Rename the decisions for one graph to those for another with the same `structural_fingerprint`."""
    # The fingerprints are equal, so the nodes correspond one by one.
    nodes = {node.name: like.name for node, like in zip(source.graph.nodes, target.graph.nodes, strict=True)}
    outputs = {output.name: like.name for output, like in zip(source.outputs, target.outputs, strict=True)}
    return Decisions(
        choices={nodes[name]: choices for name, choices in decisions.choices.items()},
        rest={nodes[name]: spec for name, spec in decisions.rest.items()},
        outputs={outputs[name]: spec for name, spec in decisions.outputs.items()},
        hubs={_rename_hub(key, nodes): spec for key, spec in decisions.hubs.items()},
    )


def _rename_hub(key: str, nodes: Mapping[str, str]) -> str:
    # A hub's key is "node@phase" or, for one of several results, "node:index@phase".
    value, at, phase = key.partition("@")
    node, colon, index = value.partition(":")
    return f"{nodes[node]}{colon}{index}{at}{phase}"


def captured_microbatch(
    call: BatchCall, number: int, target: Target, *, dynamic: bool, grad: bool = True
) -> MicrobatchStep:
    """Capture one of `number` microbatches of a call.

    Args:
        call: the call of the whole model.
        number: the number of microbatches.
        target: the target given by the user.
        dynamic: True if the number of samples in a microbatch is a dynamic size.
        grad: True if gradients are needed.

    Raises:
        InputError: the batch is not divisible.
        HintError: a hint of task graphs or regions is not valid.
        PlanError: the model's code moves tensors to the host.
        CaptureError: as for `capture_microbatch`.
    """
    part = call.split(number)[0]
    # Hints name modules of the whole model: stages have no modules.
    modules = [name for name, _ in part.module.named_modules()]

    def mark(graph: fx.Graph) -> None:
        mark_regions(graph, target.hints, modules)
        for node in graph.nodes:
            for region in marked_regions(node):
                if region.kind == "offload":
                    raise PlanError(
                        f"a pipeline can not have {region.origin} around {node_line(node)}: its stages keep their "
                        "tensors on the device. Leave it out, or use a mesh without a pipeline axis."
                    )

    return capture_microbatch(
        part.module,
        part.args,
        part.kwargs,
        grad=grad,
        task_graphs=hint_rules.task_graphs(target.hints, modules),
        mp_policy=target.options.mp_policy,
        dynamic=part.dynamic_sizes if dynamic else None,
        mark=mark,
    )


class PipelineCaptures:
    """The steps of one call's microbatches, for all meshes.

    Args:
        call: the call to plan.
        target: the target given by the user.
        dynamic: True if the number of samples in a microbatch is a dynamic size of the graphs.

    Attributes:
        call: as given.
    """

    def __init__(self, call: BatchCall, target: Target, dynamic: bool = False) -> None:
        self.call = call
        self._dynamic = dynamic
        self._target = target
        self._steps: dict[int, MicrobatchStep] = {}
        self._graphs: dict[tuple[int, Cluster], StageGraph] = {}
        self._with_dynamic_batch: PipelineCaptures | None = None

    @property
    def with_dynamic_batch(self) -> PipelineCaptures:
        """The captures of the same call with a dynamic number of samples, of which ranks can take shares."""
        if self._with_dynamic_batch is None:
            self._with_dynamic_batch = PipelineCaptures(self.call, self._target, dynamic=True)
        return self._with_dynamic_batch

    def step(self, number: int) -> MicrobatchStep:
        """Return the step of one of `number` microbatches."""
        if number not in self._steps:
            grad = torch.is_grad_enabled()
            self._steps[number] = captured_microbatch(self.call, number, self._target, dynamic=self._dynamic, grad=grad)
        return self._steps[number]

    def stage_graph(self, number: int, cluster: Cluster) -> StageGraph:
        """Return the graph to assign to stages, with prices of a cluster of equal devices."""
        key = number, cluster
        if key not in self._graphs:
            cost = CostModel(cluster, MeshShape.of({"device": 1}))
            self._graphs[key] = read_stage_graph(self.step(number), cost, optimizer=self._target.settings.optimizer)
        return self._graphs[key]

    def nearest_number(self, number: int) -> int:
        """Return the captured number of microbatches nearest to `number`."""
        # By `log`, so that half and twice as many are equally far.
        return min(self._steps, key=lambda known: (abs(math.log(known / number)), known))
