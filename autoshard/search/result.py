"""`SearchResult`: the best mesh and its plan, and a table of all meshes; and the state of a mesh during the search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.errors import BudgetError, PlanError
from autoshard.options import SearchOption
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.shape_planner import PipelineShape, PlannedShape
from autoshard.planner.planner import Planner
from autoshard.plans import picture
from autoshard.plans.candidate_chart import CandidateRow, candidates_chart, speed_up_plot
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.report import Chart, Fact, Facts, HasReport, Note, Plot, Report, Section, Table, numbers, texts
from autoshard.search.shapes import Shape
from autoshard.solver.candidate_search import Candidate
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes, format_seconds

BEST = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCandidate:
    """A mesh of a search.

    Attributes:
        shape: the mesh and its pipeline axis.
        least_seconds: lower bound of the seconds of its step.
        least_bytes: lower bound of the bytes that every device holds.
        seconds: predicted time of its fastest plan's step; None without a plan.
        peak: peak bytes of a device with that plan; None without a plan.
        plan: the plan, if it is the best of all meshes with the same number of devices.
        verdict: `"best"`, or the reason why not.
    """

    shape: Shape
    least_seconds: float
    least_bytes: int
    seconds: float | None = None
    peak: int | None = None
    plan: ShardingPlan | PipelinePlan | None = field(default=None, repr=False)
    verdict: str = ""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.shape.mesh.size

    @property
    def text(self) -> str:
        """The mesh as text, with the name of its pipeline axis."""
        return f"{self.shape} (pipeline {self.shape.axis})" if self.shape.axis else str(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(HasReport):
    """The result of `autoshard.search`.

    Attributes:
        option: the option of the search.
        cluster: name of the cluster whose prices were used.
        memory_limit: bytes that a device may hold.
        candidates: all meshes, by number of devices, the fastest first, those without a plan last.
        notes: the reasons why the search ended early, or why a number of devices has no plan.
        seconds: seconds of the search, capture included.
    """

    option: SearchOption
    cluster: str
    memory_limit: int
    candidates: tuple[MeshCandidate, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def best(self) -> MeshCandidate:
        """The best mesh: with `"mini-parallelism"` that with the fewest devices, else that with the shortest step."""
        best = self.by_devices.values()
        return next(iter(best)) if self.option == "mini-parallelism" else min(best, key=_seconds)

    @property
    def plan(self) -> ShardingPlan | PipelinePlan:
        """The plan for `mesh`, to be passed to `autoshard.parallelize(plan=...)`."""
        assert self.best.plan is not None, "the best candidate has a plan"
        return self.best.plan

    @property
    def mesh(self) -> MeshShape:
        """All axes of the best mesh, for `init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names)`."""
        return self.best.shape.mesh

    @property
    def pipeline_axis(self) -> str | None:
        """The pipeline axis of `mesh`; None if the best plan has no pipeline."""
        return self.best.shape.axis

    @property
    def by_devices(self) -> dict[int, MeshCandidate]:
        """The best mesh for every number of devices with a plan, the fewest devices first."""
        best = (candidate for candidate in self.candidates if candidate.verdict == BEST)
        return {candidate.devices: candidate for candidate in sorted(best, key=lambda candidate: candidate.devices)}

    def __repr__(self) -> str:
        best = self.best
        return (
            f"SearchResult({len(self.candidates)} meshes, best {best.shape} at {format_seconds(_seconds(best))} per "
            f"step)"
        )

    def report(self) -> Report:
        """Return the best mesh, the best for every number of devices, all meshes, and the best plan."""
        counts = sorted({candidate.devices for candidate in self.candidates})
        best = self.best
        facts = Facts(
            (
                Fact("best mesh", best.text, f"on cluster {self.cluster}", is_key=True),
                Fact("predicted step", _time(best.seconds), is_key=True),
                Fact("peak per device", _bytes(best.peak), f"of {format_bytes(self.memory_limit)}", is_key=True),
                Fact("meshes", str(len(self.candidates)), f"of {', '.join(map(str, counts))} devices", is_key=True),
            )
        )
        by_devices: list[Section] = []
        if len(counts) > 1:
            chart = Chart("devices", "Shortest step of every number of devices", (self._speed_up(),), 400)
            by_devices.append(Section("By number of devices", (chart, self._devices_table(counts))))
        charts = candidates_chart([self._candidate_row(candidate) for candidate in self.candidates], "mesh-")
        meshes = Section("Meshes", (*charts, self._mesh_table(), *map(Note, self.notes)))
        return Report.of(f"Search: {self.mesh}", (facts, *by_devices, meshes, *self.plan.report().details()))

    def _candidate_row(self, candidate: MeshCandidate) -> CandidateRow:
        name = candidate.text
        if len({other.devices for other in self.candidates}) > 1:
            name = f"{candidate.devices}: {name}"
        return CandidateRow(
            name,
            candidate.seconds,
            candidate.least_seconds,
            candidate.peak,
            self.memory_limit,
            candidate.verdict,
            candidate is self.best,
        )

    def _mesh_table(self) -> Table:
        rows = (
            (
                str(line.devices),
                line.text,
                *(_time(line.seconds), _time(line.least_seconds), _bytes(line.peak), _bytes(line.least_bytes)),
                line.verdict,
            )
            for line in self.candidates
        )
        amounts = numbers("step", "at least", "peak", "at least")
        return Table.of((*numbers("devices"), *texts("mesh"), *amounts, *texts("verdict")), rows, most=100)

    def _devices_table(self, counts: Sequence[int]) -> Table:
        """Return the step, the speed-up and the device seconds for every number of devices."""
        best = self.by_devices
        # Speed-ups are relative to the fewest devices with a plan: one device may be too small.
        fewest = next(iter(best.values()))
        rows = []
        for count in counts:
            if count in best:
                line = best[count]
                speed_up = f"{_seconds(fewest) / _seconds(line):.2f}"
                amounts = (_time(line.seconds), speed_up, _time(_seconds(line) * count), _bytes(line.peak))
                rows.append((str(count), *amounts, str(line.shape)))
            else:
                rows.append((str(count), "", "", "", "", "nothing fits"))
        labels = ("devices", "step", "speed-up", "device seconds", "peak")
        return Table.of((*numbers(*labels), *texts("mesh")), rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the shortest step for every number of devices, with perfect speed-up, to a file.

        Args:
            path: the path of the picture; its suffix is the format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            PlanError: the search had only one number of devices, or matplotlib is not installed.

        Source: TensorOpt 4.1, "profiling".
        """
        if self.option != "profiling":
            raise PlanError(
                f'a search with option={self.option!r} has no step for every number of devices: use option="profiling".'
            )
        picture.save(self._speed_up(), path, f"on cluster {self.cluster}")

    def _speed_up(self) -> Plot:
        return speed_up_plot([(count, _seconds(line), str(line.shape)) for count, line in self.by_devices.items()])


def _seconds(candidate: MeshCandidate) -> float:
    assert candidate.seconds is not None, "only a mesh with a plan is the best"
    return candidate.seconds


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _bytes(amount: int | None) -> str:
    return "" if amount is None else format_bytes(amount)


@dataclass(frozen=True, slots=True)
class UnlimitedResult:
    """Seconds and bytes of a plan without a memory limit that needs too much memory."""

    seconds: float
    peak: int


@dataclass(slots=True, kw_only=True, eq=False)
class Row(Candidate):
    """The state of one mesh in the search. `seconds` and `peak` are of its fastest plan, even if it does not fit.

    Attributes:
        shape: the mesh and its pipeline axis.
        least_bytes: a lower bound of the bytes of each device.
        peak: peak bytes of a device.
        plan: the fastest plan that fits.
        planner: the planner of the plan without a memory limit; its results are reused for other plans on the mesh.
        planned_shapes: for a pipeline, the planned shapes, by effort.
        unlimited: the result of the plan without a memory limit, if it needs too much memory.
        smallest_peak: the smallest known peak, if no plan fits.
        covers_all_shapes: True if only more effort could improve the plan.
        estimate: the estimated seconds of a pipeline before it was planned.
        took: planning seconds of its last plan.
    """

    shape: Shape
    least_bytes: int
    peak: int | None = None
    plan: ShardingPlan | PipelinePlan | None = None
    planner: Planner | None = None
    planned_shapes: dict[str, dict[PipelineShape, PlannedShape]] = field(default_factory=dict)
    unlimited: UnlimitedResult | None = None
    smallest_peak: int | None = None
    covers_all_shapes: bool = True
    estimate: float | None = None
    took: float = 0.0

    def next_planning_seconds(self, effort: str) -> float:
        """Return the expected seconds of another plan: those of the last one, or of another pipeline shape."""
        return max((planned.took for planned in self.planned_shapes.get(effort, {}).values()), default=self.took)

    def add_plan(self, plan: ShardingPlan | PipelinePlan) -> None:
        """Keep a plan, unless the present one is faster."""
        # Without a plan that fits, `seconds` belong to one that does not.
        if self.plan is None or plan.step_seconds < self.step_seconds:
            self.plan, self.seconds = plan, plan.step_seconds
            self.peak = plan.memory.peak if isinstance(plan, ShardingPlan) else max(plan.peaks)


def no_mesh_fits_error(rows: Sequence[Row], devices: int, limit: int) -> BudgetError | None:
    """Return the error that names the smallest need of all meshes; None if no mesh is known to need too much."""
    large = [row for row in rows if row.smallest_peak is not None or row.least_bytes > limit]
    if not large:
        return None
    # A known peak takes precedence over a bound, which no plan may reach.
    leanest = min(large, key=lambda row: row.smallest_peak or row.least_bytes)
    needs = leanest.smallest_peak or leanest.least_bytes
    how = "the smallest peak found is" if leanest.smallest_peak else "at least"
    return BudgetError(
        f"no mesh of {devices} devices fits in {format_bytes(limit)} per device: {how} {format_bytes(needs)}, on "
        f"{leanest.shape}. Raise memory_limit to {needs} bytes, use more devices or ones with more memory, or make the "
        f"batch smaller.",
        needs,
    )
