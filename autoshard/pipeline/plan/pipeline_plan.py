"""`PipelinePlan`: the stage of every operator, the sharding of every stage, and the schedule."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.errors import PlanError
from autoshard.pipeline.plan.pipeline_devices import PipelineMesh
from autoshard.pipeline.plan.pipeline_expenses import PipelineExpenses, StageWork
from autoshard.pipeline.plan.pipeline_report import schedules_section, stages_section, step_sections
from autoshard.pipeline.schedule.actions import Action, Schedule
from autoshard.pipeline.schedule.costs import Simulation, StageCosts, simulate
from autoshard.pipeline.schedule.schedule_search import ScheduleCandidate
from autoshard.plans import plan_data, plan_explanation
from autoshard.plans.alternative import Alternative, forgotten_error
from autoshard.plans.plan_data import COUNT, NUMBER, SHARDING, TEXT, Format, list_of, record, table
from autoshard.plans.plan_report import sources_section
from autoshard.plans.plan_summary import made_text, shares_text
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.plans.step_trace import trace
from autoshard.report import Fact, Facts, HasReport, Part, Report, Section
from autoshard.reshard.reductions import DeferredReduction
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes, format_seconds

_SIZE = {"type": "integer", "minimum": 1}
_OPTIONAL = {"type": ["number", "null"]}
_COSTS = record(**{item.name: NUMBER if item.type == "float" else COUNT for item in dataclasses.fields(StageCosts)})
# Files of older versions lack them.
_COSTS["required"] = [name for name in _COSTS["required"] if name not in ("tied_bytes", "tied_seconds")]
_SCHEMA = record(
    mesh={**table(_SIZE), "minProperties": 1},
    axis=TEXT,
    stage_of=table(COUNT),
    recomputed=table(list_of(COUNT)),
    schedule=record(name=TEXT, microbatches=_SIZE, orders=list_of(list_of(TEXT))),
    stages=list_of(SHARDING.schema),
    reduced=list_of({"enum": ["step", "microbatch"]}),
    modules=list_of({**list_of(TEXT), "minItems": 2, "maxItems": 2}),
    costs=list_of(_COSTS),
    step_seconds=NUMBER,
    bubble=NUMBER,
    peaks=list_of(COUNT),
    capacities=list_of(COUNT),
    table=list_of(
        record(
            schedule=TEXT,
            microbatches=_SIZE,
            virtual=_SIZE,
            seconds=_OPTIONAL,
            bubble=_OPTIONAL,
            peak=_OPTIONAL,
            verdict=TEXT,
        )
    ),
    cluster=TEXT,
    contention=NUMBER,
    fingerprint=TEXT,
    timings=table(NUMBER),
    versions=table(TEXT),
    devices=list_of(_SIZE),
)


# The schema of stages is part of the pipeline's; checks beyond a schema are made here.
def _check_stages(data: Mapping[str, Any], what: str) -> None:
    for index, stage in enumerate(data["stages"]):
        SHARDING.check(stage, f"stage {index} of {what}")


FORMAT = Format("autoshard pipeline plan", 2, "a pipeline's plan", _SCHEMA, _check_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan(HasReport):
    """A model as a pipeline on a mesh.

    A plan is data: it holds no tensor and no process group, compares by value, and round-trips through JSON.

    Attributes:
        mesh: all axes, including the pipeline axis.
        axis: the name of the pipeline axis.
        stage_of: the stage of every operator in the forward graph of one microbatch, by node name.
        recomputed: values by node name, and the stages that recompute them instead of receiving them.
        schedule: the order on every pipeline rank, including the rank of every stage, and the numbers of microbatches
            and of stages per rank.
        stages: the plan of every stage, on the mesh of its ranks (`layout.stage`).
        reduced: for every stage, when it reduces the gradients that become smaller by reduction, such as those of
            parameters sharded over data-parallel ranks: `"step"`, once, or `"microbatch"`, every time; empty means once
            for all stages. Other gradients are summed over the microbatches, and reduced once.
        modules: for every stage, paths of the first and the last module whose operators it runs.
        costs: the costs of every stage for one microbatch; empty if they were not computed.
        step_seconds: predicted time of one step: all microbatches forward and backward, without the optimizer's step.
        bubble: fraction of all pipeline ranks' time in which they do not compute.
        peaks: for every pipeline rank, the peak bytes of one of its devices.
        capacities: for every pipeline rank, the memory of one of its devices in bytes; 0 if unknown.
        table: the candidates for the schedule, with their verdicts.
        cluster: name of the cluster whose prices were used.
        contention: seconds by which one second of communication slows down concurrent compute there.
        fingerprint: the fingerprint of one microbatch's forward graph.
        timings: seconds of every planning phase.
        versions: the versions of `"autoshard"` and `"torch"` that made the plan.
        devices: for every pipeline rank, its number of devices along the axis; empty if each has one.
        replanner: answers `why_not`; None if the plan does not remember how it was made. It holds the example call, for
            a model on the meta device also its captures, and no weights. It is not part of the plan's value, file or
            pickle.
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
    replanner: (
        Callable[[PipelinePlan, Mapping[str, Any], Mapping[str, str | int]], Alternative[PipelinePlan]] | None
    ) = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A plan may come from a file written by hand.
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
        # Costs and times of reduction may be missing, but not plans of stages.
        counts = {"stages": len(self.stages), "costs": len(self.costs), "reduced": len(self.reduced)}
        for what, count in counts.items():
            if count != self.schedule.stages and (count or what == "stages"):
                raise PlanError(
                    f"the schedule has {self.schedule.stages} stages, and there are {what} of {count}: one each is "
                    "needed."
                )

    @property
    def layout(self) -> PipelineMesh:
        """The devices of every pipeline rank."""
        return PipelineMesh.of(self.mesh, self.axis, self.devices)

    @property
    def microbatches(self) -> int:
        """Microbatches per step."""
        return self.schedule.microbatches

    @property
    def virtual(self) -> int:
        """Stages per pipeline rank."""
        return self.schedule.virtual

    @property
    def in_shares(self) -> bool:
        """True if the ranks of some stage take unequal shares of every microbatch."""
        return any(stage.shares for stage in self.stages)

    def reduced_at(self, stage: int) -> DeferredReduction:
        """Return when a stage reduces the gradients that become smaller by reduction."""
        return self.reduced[stage] if self.reduced else "step"

    @property
    def fits(self) -> bool:
        """True if every peak is within its capacity, or capacities are unknown."""
        return all(
            not capacity or peak <= capacity for peak, capacity in zip(self.peaks, self.capacities, strict=False)
        )

    @property
    def simulation(self) -> Simulation:
        """The predicted step, event by event, on one device per pipeline rank."""
        return simulate(self.schedule, self.costs, self.contention)

    def expenses(self) -> PipelineExpenses:
        """Return the expenses of a step: seconds and bytes by mesh axis, kind and module; it prints as tables.

        Raises:
            PlanError: the plan was built without costs of its stages.
        """
        if not self.costs:
            raise PlanError("this plan has no costs of its stages: make it by autoshard.plan.")
        parts = zip(self.stages, self.costs, self.stage_modules, strict=True)
        stages = tuple(
            StageWork(stage, costs, first, last, self.reduced_at(index))
            for index, (stage, costs, (first, last)) in enumerate(parts)
        )
        return PipelineExpenses(
            self.mesh, self.axis, stages, self.simulation, self.contention, self.capacities, self._schedule_text()
        )

    def why_not(
        self,
        asked: Mapping[str, Any] | None = None,
        *,
        schedule: str | None = None,
        microbatches: int | None = None,
        virtual: int | None = None,
    ) -> Alternative[PipelinePlan]:
        """Find the best plan with requested properties, and its cost compared to this plan, term by term.

        It takes about as long as this plan took; for a model on the meta device, without the captures. Other options
        are those of this plan: if they left the schedule open, another number of microbatches may come with another
        schedule. Of the plan's hints, those with the same globs are replaced.

        Args:
            asked: placements and primitives, as for `ShardingPlan.why_not`; axes are those inside stages.
            schedule, microbatches, virtual: as in `Pipeline`.

        Raises:
            PlanError: the plan was loaded from a file, or belongs to a parallelised module, so that it does not
                remember how it was made (`autoshard.why_not` takes the model); or the model no longer exists, or has
                changed; or a number is not valid.
            HintError: nothing is requested, or a hint names something that the model or the mesh does not have.
            PipelineError: there is no schedule with that name.
        """
        if self.replanner is None:
            raise forgotten_error()
        requests = {"schedule": schedule, "microbatches": microbatches, "virtual": virtual}
        return self.replanner(self, asked or {}, {name: value for name, value in requests.items() if value is not None})

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles contain only the value.
        return PipelinePlan._of_values, (self._values(),)

    @staticmethod
    def _of_values(values: Mapping[str, Any]) -> PipelinePlan:
        return PipelinePlan(**values)

    def _values(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.compare}

    def __repr__(self) -> str:
        return (
            f"PipelinePlan({self.schedule.stages} stages on {self.mesh}, {self.microbatches} microbatches, "
            f"{format_seconds(self.step_seconds)} per step; print it to see more)"
        )

    def report(self) -> Report:
        """Return the plan as a tree: key figures, its step, stages, ranks, schedules, and all stage plans."""
        parts: list[Part] = [self._facts()]
        # Plans built by hand may have no costs, and then no predicted step.
        if self.costs:
            parts += step_sections(self.simulation, self.capacities, self.stage_modules, self.costs)
        parts.append(sources_section(list(self.stages)))
        parts.append(schedules_section(self.schedule, self.table, self.capacities))
        parts.append(stages_section(self.stages, self.stage_modules))
        return Report.of(f"PipelinePlan on {self.mesh}", parts)

    @property
    def stage_modules(self) -> tuple[tuple[str, str], ...]:
        """For every stage, its first and last module; the root module for plans without `modules`."""
        return self.modules or (("", ""),) * len(self.stages)

    def _facts(self) -> Facts:
        """Return the key facts of the plan."""
        cluster = f" on cluster {self.cluster}" if self.cluster else ""
        ranks = f", ranks of {', '.join(map(str, self.devices))} devices" if self.devices else ""
        subject = self.stages[0].subject if self.stages else {}
        # Stages with equal shares share a line.
        stages_by_shares: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            stages_by_shares.setdefault(shares_text(stage), []).append(index)
        spent = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.timings.items())
        return Facts.of(
            [
                *((label, subject[label]) for label in ("precision", "optimizer", "device") if label in subject),
                Fact(
                    "mesh", str(self.mesh), f"{self.mesh.size} devices{cluster}, pipeline axis {self.axis}{ranks}", True
                ),
                Fact("schedule", self._schedule_text(), f"{self.schedule.stages} stages", is_key=True),
                ("gradients", self._gradients_text()),
                *(
                    ("shares", f"stages {', '.join(map(str, stages))}: {text}" if text else "")
                    for text, stages in stages_by_shares.items()
                ),
                Fact(
                    "predicted step", format_seconds(self.step_seconds), f"ranks do not compute {self.bubble:.1%}", True
                ),
                self._memory_fact(),
                ("made on", made_text(subject["made on"], self.versions) if "made on" in subject else ""),
                ("planned in", spent),
            ]
        )

    def _schedule_text(self) -> str:
        """Return `"1F1B, 8 microbatches, 1 stage per rank"`."""
        stages = "1 stage" if self.virtual == 1 else f"{self.virtual} stages"
        batches = "1 microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        return f"{self.schedule.name}, {batches}, {stages} per rank"

    def _gradients_text(self) -> str:
        if self.microbatches == 1:
            return "reduced as they are made"
        stages = [str(stage) for stage in range(self.schedule.stages) if self.reduced_at(stage) == "microbatch"]
        often = f"; with every microbatch those that are smaller then, of stages {', '.join(stages)}" if stages else ""
        return f"added up over the microbatches, reduced once per step{often}"

    def _memory_fact(self) -> Fact:
        if not self.peaks:
            return Fact("memory per device", "not known")
        rank = max(range(len(self.peaks)), key=self.peaks.__getitem__)
        capacity = self.capacities[rank] if self.capacities else 0
        of = f" of {format_bytes(capacity)}" if capacity else ""
        value = f"peak {format_bytes(self.peaks[rank])}{of} on rank {rank}{'' if self.fits else ': does not fit'}"
        return Fact("memory per device", value, is_key=True, is_alarm=not self.fits)

    def explain(self, path_glob: str) -> str:
        """Explain the placements of the parameters and modules that a glob matches, stage by stage.

        Args:
            path_glob: glob over parameter names and module paths; a matching module includes everything below it.

        Returns:
            The text of `ShardingPlan.explain` for every stage where something matches.

        Raises:
            PlanError: nothing in any stage matches.
        """
        return str(self.explanation(path_glob))

    def explanation(self, path_glob: str) -> Report:
        """Return the report that `explain` prints."""
        sections = tuple(
            Section(f"stage {index}", stage.explanation(path_glob).parts)
            for index, stage in enumerate(self.stages)
            if plan_explanation.matches(stage, path_glob)
        )
        if not sections:
            known = set().union(*map(plan_explanation.paths, self.stages))
            raise plan_explanation.no_match_error(path_glob, known)
        return Report.of("", sections)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as a trace for Perfetto and chrome://tracing."""
        step = self.simulation
        Path(path).write_text(trace(step.tasks, step.starts, step.ends, step.memory), "utf-8")

    def check(self, mesh: MeshShape, fingerprint: str) -> None:
        """Check that the plan was made for this model, with these microbatches, on this mesh.

        Args:
            mesh: all axes of the mesh to apply the plan to.
            fingerprint: the fingerprint of one microbatch's forward graph (`pipeline_devices.forward_fingerprint`).

        Raises:
            PlanError: the plan does not fit; the message names every difference.
        """
        # All differences in one error: the user knows best which of them matters.
        differences = []
        if mesh != self.mesh:
            differences.append(f"it was made for the mesh {self.mesh}; this mesh is {mesh}")
        if fingerprint != self.fingerprint:
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "unknown versions"
            differences.append(
                f"the forward graph of one of its {self.microbatches} microbatches is another ({fingerprint[:12]} "
                f"here, {self.fingerprint[:12]} planned): another model or mode of it, other sizes, or other versions "
                f"(planned with {versions})"
            )
        if differences:
            listed = "".join(f"\n  - {difference}" for difference in differences)
            raise PlanError(f"this pipeline plan does not fit:{listed}\nPlan this model on this mesh again.")

    def to_json(self) -> str:
        """Return the plan as a JSON text with a checksum of its content."""
        # Fields in their order; tuples are lists in JSON.
        data = self._values() | {
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "schedule": {
                "name": self.schedule.name,
                "microbatches": self.schedule.microbatches,
                "orders": [[str(action) for action in order] for order in self.schedule.orders],
            },
            "stages": [plan_data.to_data(stage) for stage in self.stages],
            "costs": [dataclasses.asdict(cost) for cost in self.costs],
            "table": [dataclasses.asdict(line) for line in self.table],
        }
        return plan_data.encode(data, FORMAT)

    @staticmethod
    def from_json(text: str, what: str = "the plan") -> PipelinePlan:
        """Read the text of `to_json`; `what` names the text in errors.

        Raises:
            PlanError: the text is truncated, edited, of another format or version, or not a pipeline plan.
            PipelineError: the orders do not form a schedule.
        """
        data = plan_data.decode(text, what, FORMAT)
        schedule = data["schedule"]
        # `Schedule` checks the orders: those in an edited file may not form a schedule.
        orders = tuple(tuple(map(Action.parse, order)) for order in schedule["orders"])
        attributes = dict(data) | {
            "mesh": MeshShape.of(data["mesh"]),
            "recomputed": {name: tuple(stages) for name, stages in data["recomputed"].items()},
            "schedule": Schedule(schedule["name"], schedule["microbatches"], orders),
            "stages": tuple(ShardingPlan.from_data(stage) for stage in data["stages"]),
            "reduced": tuple(data["reduced"]),
            "modules": tuple((first, last) for first, last in data["modules"]),
            "costs": tuple(StageCosts(**cost) for cost in data["costs"]),
            "peaks": tuple(data["peaks"]),
            "capacities": tuple(data["capacities"]),
            "devices": tuple(data["devices"]),
            "table": tuple(ScheduleCandidate(**line) for line in data["table"]),
        }
        return PipelinePlan(**attributes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), "utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PipelinePlan:
        """Read the file of `save`.

        Raises:
            PlanError: the file cannot be read, or `from_json` refuses it.
        """
        return PipelinePlan.from_json(*plan_data.read(path))
