"""The graphs that are captured to plan a model as a pipeline, each once: of microbatches, and of stages."""

from __future__ import annotations

import math

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture.joint import JointGraph, capture
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.options.target import Target
from autoshard.pipeline.graph.forward_export import ExportedModule, export_forward
from autoshard.pipeline.graph.forward_graph import read_stage_graph
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.pipeline.plan.stage_reuse import has_same_names, rename_capture, structural_text
from autoshard.planner import hints as hint_rules
from autoshard.specs.axes import MeshShape


class StageCaptures:
    """The captured steps of stages of one model; of stages that are equal but for names, one is captured.

    Args:
        mp_policy: the precisions of the stages.
    """

    def __init__(self, mp_policy: MixedPrecisionPolicy | None = None) -> None:
        self._mp_policy = mp_policy
        self._known: dict[tuple[str, bool], list[tuple[StageModule, JointGraph]]] = {}

    def joint_graph(self, stage: StageModule, dynamic: bool = False) -> JointGraph:
        """Return the step of a stage with one microbatch, with the stage's dynamic sizes if `dynamic`."""
        known = self._known.setdefault((structural_text(stage), dynamic), [])
        for like, graph in known:
            if has_same_names(like, stage):
                return graph
        renamed = rename_capture(known[0][1], known[0][0], stage) if known else None
        known.append((stage, renamed or self._capture(stage, dynamic)))
        return known[-1][1]

    def _capture(self, stage: StageModule, dynamic: bool) -> JointGraph:
        sizes = stage.dynamic if dynamic else None
        return capture(stage.module, *stage.example, dynamic=sizes, mp_policy=self._mp_policy)


class PipelineCaptures:
    """The forward graphs of one call, for all meshes, and the captured steps of the stages that they are cut into.

    Args:
        call: the call that is planned.
        target: as the user gave it.
        dynamic: True if the number of samples in a microbatch is a dynamic size of the graphs.

    Attributes:
        call: as given.
        stage_captures: the captured steps.
    """

    def __init__(self, call: BatchCall, target: Target, dynamic: bool = False) -> None:
        self.call = call
        self._dynamic = dynamic
        self.stage_captures = StageCaptures(target.options.mp_policy)
        self._target = target
        self._exported: dict[int, ExportedModule] = {}
        self._graphs: dict[int, list[tuple[Cluster, StageGraph]]] = {}
        self._with_dynamic_batch: PipelineCaptures | None = None

    @property
    def with_dynamic_batch(self) -> PipelineCaptures:
        """The captures of the same call with dynamic samples of a microbatch, which ranks can take shares of."""
        if self._with_dynamic_batch is None:
            self._with_dynamic_batch = PipelineCaptures(self.call, self._target, dynamic=True)
        return self._with_dynamic_batch

    def export(self, number: int) -> ExportedModule:
        """Return the forward graph of one of `number` microbatches."""
        if number not in self._exported:
            part = self.call.split(number)[0]
            sizes = part.dynamic_sizes if self._dynamic else None
            hinted = hint_rules.task_graphs(self._target.hints, [name for name, _ in part.module.named_modules()])
            self._exported[number] = export_forward(
                part.module,
                part.args,
                part.kwargs,
                grad=torch.is_grad_enabled(),
                task_graphs=hinted,
                mp_policy=self._target.options.mp_policy,
                dynamic=sizes,
            )
        return self._exported[number]

    def stage_graph(self, number: int, cluster: Cluster) -> StageGraph:
        """Return the graph to assign to stages, by the prices of a cluster of equal devices."""
        priced = self._graphs.setdefault(number, [])
        for known, graph in priced:
            if known == cluster:
                return graph
        cost = CostModel(cluster, MeshShape.of({"device": 1}))
        graph = read_stage_graph(self.export(number), cost, optimizer=self._target.settings.optimizer)
        priced.append((cluster, graph))
        return graph

    def nearest_number(self, number: int) -> int:
        """Return the number of microbatches nearest to `number` whose graph has been exported."""
        return min(self._exported, key=lambda known: (abs(math.log(known / number)), known))
