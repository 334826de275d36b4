"""`SearchResult`: the best mesh and its plan, and a table of all meshes; and the state of a mesh during the search."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard import display
from autoshard.errors import BudgetError, PlanError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.shape_planner import PipelineShape, PlannedShape
from autoshard.planner.planner import Planner
from autoshard.plans.candidate_figures import CandidateRow, candidates_figure, speed_up_figure
from autoshard.plans.html import HasPage, Section, cards, document, text_table
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.shapes import Shape
from autoshard.solver.candidate_search import Candidate
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes, format_seconds

Option = Literal["mini-time", "mini-parallelism", "profiling"]

BEST = "best"
_LABELS = ("devices", "mesh", "step", "at least", "peak", "at least", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCandidate:
    """A mesh of a search.

    Attributes:
        shape: the mesh, and its pipeline axis.
        least_seconds: lower bound of the seconds of its step.
        least_bytes: lower bound of the bytes that every device holds.
        seconds: predicted time of the step of its fastest plan; None where it has no plan.
        peak: bytes that a device holds under that plan at most; None likewise.
        plan: the plan, if it is the best of all meshes of as many devices.
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
class SearchResult(HasPage):
    """The result of `autoshard.search`.

    Attributes:
        option: of the search.
        cluster: name of the cluster that plans were priced on.
        memory_limit: bytes that a device may hold.
        candidates: all meshes: by number of devices, the fastest first, those without a plan last.
        notes: the reasons why the search ended early, or why a number of devices has no plan.
        seconds: of the search, capture included.
    """

    option: Option
    cluster: str
    memory_limit: int
    candidates: tuple[MeshCandidate, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def best(self) -> MeshCandidate:
        """The best mesh: with `"mini-parallelism"` that of the fewest devices, else that of the shortest step."""
        best = self.by_devices.values()
        return next(iter(best)) if self.option == "mini-parallelism" else min(best, key=_seconds)

    @property
    def plan(self) -> ShardingPlan | PipelinePlan:
        """The plan for `mesh`, for `autoshard.parallelize(plan=...)`."""
        assert self.best.plan is not None, "the best candidate has a plan"
        return self.best.plan

    @property
    def mesh(self) -> MeshShape:
        """All axes of the best mesh: `init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names)` makes it."""
        return self.best.shape.mesh

    @property
    def pipeline_axis(self) -> str | None:
        """The axis of `mesh` that is a pipeline; None where the best plan is no pipeline."""
        return self.best.shape.axis

    @property
    def by_devices(self) -> dict[int, MeshCandidate]:
        """The best mesh of every number of devices that has a plan, the fewest devices first."""
        best = (candidate for candidate in self.candidates if candidate.verdict == BEST)
        return {candidate.devices: candidate for candidate in sorted(best, key=lambda candidate: candidate.devices)}

    def __repr__(self) -> str:
        best = self.best
        return (
            f"SearchResult({len(self.candidates)} meshes, best {best.shape} at {format_seconds(_seconds(best))} per "
            f"step)"
        )

    def __str__(self) -> str:
        return display.plain([self.table()], display.WIDTH)

    def _repr_html_(self) -> str:
        return display.html(self.table())

    def _page(self) -> str:
        plan, counts = self.plan, sorted({candidate.devices for candidate in self.candidates})
        lead = cards(
            [
                ("Best mesh", str(self.mesh), f"pipeline {self.pipeline_axis}" if self.pipeline_axis else ""),
                ("Predicted step", format_seconds(_seconds(self.best)), f"on cluster {self.cluster}"),
                ("Peak of one device", _bytes(self.best.peak), f"of {format_bytes(self.memory_limit)}"),
                ("Meshes", str(len(self.candidates)), f"of {', '.join(map(str, counts))} devices"),
            ]
        )
        lines = list(map(self._texts, self.candidates))
        meshes = [*candidates_figure([self._candidate_row(candidate) for candidate in self.candidates], "mesh-")]
        sections = [
            Section(
                "Meshes",
                [
                    *meshes,
                    text_table(_LABELS, lines, texts=("mesh", "verdict")),
                    *(f"<p>{escape(note)}</p>" for note in self.notes),
                ],
            )
        ]
        if len(counts) > 1:
            points = [(count, _seconds(line), str(line.shape)) for count, line in self.by_devices.items()]
            sections.append(Section("Devices", [speed_up_figure(points)]))
        return document(f"Search: {self.mesh}", lead, [*sections, *plan.page_sections()])

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

    @staticmethod
    def _texts(line: MeshCandidate) -> tuple[str, ...]:
        """Return the texts of `_LABELS` for a mesh."""
        amounts = (_time(line.seconds), _time(line.least_seconds), _bytes(line.peak), _bytes(line.least_bytes))
        return (str(line.devices), line.text, *amounts, line.verdict)

    def table(self) -> Group:
        """Return a table per number of devices, if there are several, a table of all meshes, and the notes."""
        counts = sorted({candidate.devices for candidate in self.candidates})
        parts: list[Table | Text] = []
        if len(counts) > 1:
            parts.append(self._devices_table(counts))
        best = f"the best of {len(self.candidates)} meshes on cluster {self.cluster} is {self.best.shape}"
        table = Table(title=best, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for title in _LABELS[:-1]:
            table.add_column(title, justify="left" if title == "mesh" else "right", no_wrap=True)
        table.add_column("", overflow="fold")
        for line in self.candidates:
            table.add_row(*map(Text, self._texts(line)))
        return Group(*parts, table, *map(Text, self.notes))

    def _devices_table(self, counts: Iterable[int]) -> Table:
        """Return a table of the step, the speed-up and the device seconds of every number of devices."""
        best = self.by_devices
        # Speed-ups are over the fewest devices that have a plan: one device may be too small.
        fewest = next(iter(best.values()))
        table = Table(title="by number of devices", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for title in ("devices", "step", "speed-up", "device seconds"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("peak", justify="right", no_wrap=True)
        table.add_column("mesh", overflow="fold")
        for count in counts:
            if count in best:
                line = best[count]
                speed_up = f"{_seconds(fewest) / _seconds(line):.2f}"
                amounts = (_time(line.seconds), speed_up, _time(_seconds(line) * count), _bytes(line.peak))
                table.add_row(*map(Text, (str(count), *amounts, str(line.shape))))
            else:
                table.add_row(str(count), "", "", "", "", "nothing fits")
        return table

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the shortest step of every number of devices to a file, beside that of perfect speed-up.

        Args:
            path: of the picture; its suffix is the format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            PlanError: the search was of one number of devices alone, or matplotlib is not installed.

        Source: TensorOpt 4.1, "profiling".
        """
        if self.option != "profiling":
            raise PlanError(
                f'a search with option={self.option!r} has no step for every number of devices: use option="profiling".'
            )
        # Imported here, as it is an optional dependency.
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise PlanError(
                "drawing a search needs matplotlib, which is not installed: pip install 'autoshard[plot]', or print "
                "the result."
            ) from error
        best = tuple(self.by_devices.values())
        counts, steps = [line.devices for line in best], [1e3 * _seconds(line) for line in best]
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xticks=counts, xticklabels=list(map(str, counts)))
        axes.minorticks_off()
        axes.plot(counts, steps, "o-", color="tab:blue", label="fastest plan")
        axes.plot(counts, [steps[0] * counts[0] / n for n in counts], ":", color="grey", label="perfect speed-up")
        for line, step in zip(best, steps, strict=True):
            axes.annotate(str(line.shape), (line.devices, step), textcoords="offset points", xytext=(4, 6), fontsize=8)
        axes.set(xlabel="devices", ylabel="predicted step [ms]", title=f"on cluster {self.cluster}")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150)


def _seconds(candidate: MeshCandidate) -> float:
    assert candidate.seconds is not None, "only a mesh with a plan is the best"
    return candidate.seconds


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _bytes(amount: int | None) -> str:
    return "" if amount is None else format_bytes(amount)


@dataclass(frozen=True, slots=True)
class UnlimitedResult:
    """Seconds and bytes of a plan that was made without a memory limit, and holds too much."""

    seconds: float
    peak: int


@dataclass(slots=True, kw_only=True, eq=False)
class Row(Candidate):
    """The state of one mesh in the search. `seconds` and `peak` are of its fastest plan, even if that holds too much.

    Attributes:
        shape: the mesh, and its pipeline axis.
        least_bytes: a lower bound of what each device holds.
        peak: bytes that a device holds at most.
        plan: the fastest plan that fits.
        planner: of the plan without a memory limit; what it has worked out serves other plans on the same mesh.
        planned_shapes: of a pipeline, those that were planned, by the effort.
        unlimited: the result of the plan without a memory limit, if that holds too much.
        smallest_peak: the smallest peak found, where no plan fits.
        covers_all_shapes: True if only more effort could make the plan better.
        estimate: seconds that a pipeline was estimated to take before it was planned.
        took: seconds in which its last plan was made.
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
        """Return the least seconds until another plan: those of the last one, or of another shape of a pipeline."""
        return max((planned.took for planned in self.planned_shapes.get(effort, {}).values()), default=self.took)

    def add_plan(self, plan: ShardingPlan | PipelinePlan) -> None:
        """Keep a plan, unless the present one is faster."""
        # Without a plan that fits, `seconds` are those of one that holds too much.
        if self.plan is None or plan.step_seconds < self.step_seconds:
            self.plan, self.seconds = plan, plan.step_seconds
            self.peak = plan.memory.peak if isinstance(plan, ShardingPlan) else max(plan.peaks)


def no_mesh_fits_error(rows: Sequence[Row], devices: int, limit: int) -> BudgetError | None:
    """Return the error that names the smallest need of all meshes; None where no mesh is known to need too much."""
    large = [row for row in rows if row.smallest_peak is not None or row.least_bytes > limit]
    if not large:
        return None
    # A known peak counts before a bound, which no plan may reach.
    leanest = min(large, key=lambda row: row.smallest_peak or row.least_bytes)
    needs = leanest.smallest_peak or leanest.least_bytes
    how = "the smallest peak found is" if leanest.smallest_peak else "at least"
    return BudgetError(
        f"no mesh of {devices} devices fits in {format_bytes(limit)} per device: {how} {format_bytes(needs)}, on "
        f"{leanest.shape}. Raise memory_limit to {needs} bytes, use more devices or ones with more memory, or make the "
        f"batch smaller.",
        needs,
    )
