"""`PipelinePlan`: which stage everything runs on, how every stage is sharded, and in which order stages run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoshard.errors import PlanError
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.plan import plan_data, plan_tables
from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_search import ScheduleCandidate
from autoshard.pipeline.schedule.simulation import Simulation, simulate
from autoshard.pipeline.schedule.tasks import step_task_graph
from autoshard.plans import plan_file
from autoshard.plans.gantt import gantt
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.plans.trace import trace
from autoshard.reshard.deferred_reductions import DeferredReduction
from autoshard.specs.axes import MeshShape
from autoshard.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """A model as a pipeline on a mesh.

    A plan is data: it holds no tensor and no process group, compares by value, and round-trips through JSON.

    Attributes:
        mesh: all axes, the pipeline's among them.
        axis: name of the axis along which stages lie.
        stage_of: the stage of every operator of one microbatch's forward graph, by the name of its node.
        recomputed: values by the name of their node, and the stages that make them once more instead of receiving them.
        schedule: the order on every pipeline rank; with it the rank of every stage, the number of microbatches, and
            that of stages per rank.
        stages: how every stage is sharded, on the mesh that its ranks make up (`layout.stage`).
        reduced: of every stage, when gradients are reduced that are smaller then, such as those of parameters that are
            sharded over data-parallel ranks: `"step"`, once, or `"microbatch"`, every time; all once where it is empty.
            Other gradients are added up over the microbatches, and reduced once.
        modules: of every stage, paths of the first and the last module that it runs operators of.
        costs: of every stage, for one microbatch; none where nobody worked them out.
        step_seconds: predicted time of one step: all microbatches forward and backward, without the optimizer's step.
        bubble: share of all pipeline ranks' time in which they do not compute.
        peaks: the most bytes that a device of every pipeline rank holds at once.
        capacities: the bytes that a device of every pipeline rank may hold; 0 where that is not known.
        table: the schedules that there were to choose from.
        cluster: name of the cluster it was priced on.
        contention: seconds that a second of communication costs the computation beside it there.
        fingerprint: of one microbatch's forward graph.
        timings: phase of planning -> seconds that it took.
        versions: `"autoshard"` and `"torch"` -> version that made it.
        devices: for every pipeline rank, how many devices along the axis are its own; empty where each has one.
    """

    mesh: MeshShape
    axis: str
    stage_of: Mapping[str, int]
    recomputed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    schedule: Schedule
    stages: tuple[ShardingPlan, ...]
    reduced: tuple[DeferredReduction, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    costs: tuple[StageCosts, ...] = ()
    step_seconds: float = 0.0
    bubble: float = 0.0
    peaks: tuple[int, ...] = ()
    capacities: tuple[int, ...] = ()
    table: tuple[ScheduleCandidate, ...] = ()
    cluster: str = ""
    contention: float = 0.0
    fingerprint: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        places = self.mesh.sizes[self.mesh.index(self.axis)]
        if self.devices and sum(self.devices) != places:
            raise PlanError(
                f"pipeline ranks have {' + '.join(map(str, self.devices))} of the devices along axis {self.axis} of "
                f"the mesh {self.mesh}, which has {places}: each device is one rank's."
            )
        ranks = self.layout.ranks
        if self.schedule.ranks != ranks:
            raise PlanError(
                f"the schedule is for {self.schedule.ranks} ranks, and pipeline axis {self.axis} of the mesh "
                f"{self.mesh} has {ranks}: a plan needs an order for every rank."
            )
        counts = {"stages": len(self.stages), "costs": len(self.costs), "reduced": len(self.reduced)}
        for what, count in counts.items():
            if count != self.schedule.stages and (count or what == "stages"):
                raise PlanError(
                    f"the schedule has {self.schedule.stages} stages, and there are {what} of {count}: one each is "
                    "needed."
                )

    @property
    def layout(self) -> PipelineMesh:
        """Which devices every pipeline rank has."""
        return PipelineMesh.of(self.mesh, self.axis, self.devices)

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return self.schedule.microbatches

    @property
    def virtual(self) -> int:
        """Stages per pipeline rank."""
        return self.schedule.virtual

    @property
    def in_shares(self) -> bool:
        """Whether the ranks of some stage take shares of their own of every microbatch."""
        return any(stage.shares for stage in self.stages)

    def reduced_at(self, stage: int) -> DeferredReduction:
        """When a stage reduces gradients that are smaller then."""
        return self.reduced[stage] if self.reduced else "step"

    @property
    def fits(self) -> bool:
        """Whether every peak is within its capacity; True where that is not known."""
        return all(not room or peak <= room for peak, room in zip(self.peaks, self.capacities, strict=False))

    @property
    def simulation(self) -> Simulation:
        """The predicted step, event by event, on one device of every pipeline rank."""
        return simulate(step_task_graph(self.schedule, self.costs), self.contention)

    def __repr__(self) -> str:
        return (
            f"PipelinePlan({self.schedule.stages} stages on {self.mesh}, {self.microbatches} microbatches, "
            f"{format_seconds(self.step_seconds)} per step; print it to see more)"
        )

    def __str__(self) -> str:
        return plan_tables.render(self)

    def explain(self, path_glob: str) -> str:
        """Why the parameters and modules that a glob matches lie as they do, stage by stage.

        Args:
            path_glob: glob over parameter names and module paths; what lies below a matching module belongs to it.

        Returns:
            What `ShardingPlan.explain` says of every stage where something matches.

        Raises:
            PlanError: nothing in any stage matches.
        """
        return plan_tables.explain(self, path_glob)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as a trace that Perfetto and chrome://tracing load."""
        step = self.simulation
        Path(path).write_text(trace(step.graph.tasks, step.starts, step.ends, step.memory), "utf-8")

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as an SVG picture: a row per pipeline rank, a colour per kind of task."""
        step = self.simulation
        title = f"{plan_tables.schedule_text(self)}: {plan_tables.step_text(self)}"
        Path(path).write_text(gantt(step.graph.tasks, step.starts, step.ends, title), "utf-8")

    def check(self, mesh: MeshShape, fingerprint: str) -> None:
        """Make sure that the plan was made for this model, cut into such microbatches, on this mesh.

        Args:
            mesh: all axes of the mesh that it is to be applied on.
            fingerprint: of the forward graph of one microbatch (`places.forward_fingerprint`).

        Raises:
            PlanError: naming every difference found.
        """
        differences = []
        if mesh != self.mesh:
            differences.append(f"it was made for the mesh {self.mesh}; this mesh is {mesh}")
        if fingerprint != self.fingerprint:
            made = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "unknown versions"
            differences.append(
                f"the forward graph of one of its {self.microbatches} microbatches is another ({fingerprint[:12]} "
                f"here, {self.fingerprint[:12]} planned): another model or mode of it, other sizes, or other versions "
                f"(planned with {made})"
            )
        if differences:
            listed = "".join(f"\n  - {difference}" for difference in differences)
            raise PlanError(f"this pipeline plan does not fit:{listed}\nPlan this model on this mesh again.")

    def to_json(self) -> str:
        """The plan as a JSON text with a checksum of its content."""
        return plan_file.encode(plan_data.to_data(self), plan_data.PIPELINE)

    @staticmethod
    def from_json(text: str, what: str = "the plan") -> PipelinePlan:
        """The plan that `to_json` wrote; `what` names the text in errors.

        Raises:
            PlanError: the text is cut short, was edited, is of another format or version, or is no pipeline's plan.
        """
        return PipelinePlan(**plan_data.from_data(plan_file.decode(text, what, plan_data.PIPELINE)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), "utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PipelinePlan:
        """The plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or `from_json` refuses it.
        """
        return PipelinePlan.from_json(*plan_file.read(path))
