"""`SearchResult`: the best mesh and its plan, and a table of all that were looked at."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from autoshard.errors import PlanError
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.mesh_candidate import BEST, MeshCandidate
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.pipeline.plan.pipeline_plan import PipelinePlan

Option = Literal["mini-time", "mini-parallelism", "profiling"]

_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What `autoshard.search` found.

    Attributes:
        option: what was looked for.
        cluster: name of the cluster that plans were priced on.
        memory_limit: bytes that a device may hold.
        candidates: all meshes that were looked at: by number of devices, the fastest first, those without a plan last.
        notes: what cut the search short, if anything did.
        seconds: that the search took, capture included.
    """

    option: Option
    cluster: str
    memory_limit: int
    candidates: tuple[MeshCandidate, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def best(self) -> MeshCandidate:
        """The mesh that was looked for: with `"mini-parallelism"` of the fewest devices, else of the shortest step."""
        best = self.by_devices.values()
        return next(iter(best)) if self.option == "mini-parallelism" else min(best, key=_seconds)

    @property
    def plan(self) -> ShardingPlan | PipelinePlan:
        """The plan for `mesh`: one that `autoshard.parallelize(plan=...)` takes."""
        assert self.best.plan is not None, "the best candidate has a plan"
        return self.best.plan

    @property
    def mesh(self) -> MeshShape:
        """All axes of the best mesh: `init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names)` makes it."""
        return self.best.shape.mesh

    @property
    def pipeline_axis(self) -> str | None:
        """The axis of `mesh` that is a pipeline; None where the best plan has none."""
        return self.best.shape.axis

    @property
    def by_devices(self) -> dict[int, MeshCandidate]:
        """The best mesh of every number of devices that has one, the fewest devices first."""
        best = (candidate for candidate in self.candidates if candidate.verdict == BEST)
        return {candidate.devices: candidate for candidate in sorted(best, key=lambda one: one.devices)}

    def __repr__(self) -> str:
        best = self.best
        return (
            f"SearchResult({len(self.candidates)} meshes, best {best.shape} at {format_seconds(_seconds(best))} per "
            f"step)"
        )

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")

    def table(self) -> Group:
        """The best of every number of devices where there are several, all meshes, and the notes."""
        counts = sorted({candidate.devices for candidate in self.candidates})
        parts: list[Table | Text] = []
        if len(counts) > 1:
            parts.append(self._devices_table(counts))
        best = f"the best of {len(self.candidates)} meshes on cluster {self.cluster} is {self.best.shape}"
        table = Table(title=best, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for title in ("devices", "mesh", "step", "at least", "peak", "at least"):
            table.add_column(title, justify="left" if title == "mesh" else "right", no_wrap=True)
        table.add_column("", overflow="fold")
        for one in self.candidates:
            name = f"{one.shape} (pipeline {one.shape.axis})" if one.shape.axis else str(one.shape)
            amounts = (_time(one.seconds), _time(one.least_seconds), _bytes(one.peak), _bytes(one.least_bytes))
            table.add_row(*map(Text, (str(one.devices), name, *amounts, one.verdict)))
        return Group(*parts, table, *map(Text, self.notes))

    def _devices_table(self, counts: Iterable[int]) -> Table:
        """What every number of devices gives: the step, and what a second of all devices together is worth."""
        best = self.by_devices
        fewest = next(iter(best.values()))
        table = Table(title="by number of devices", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for title in ("devices", "step", "speed-up", "device seconds"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("peak", justify="right", no_wrap=True)
        table.add_column("mesh", overflow="fold")
        for count in counts:
            if count in best:
                one = best[count]
                gained = f"{_seconds(fewest) / _seconds(one):.2f}"
                amounts = (_time(one.seconds), gained, _time(_seconds(one) * count), _bytes(one.peak))
                table.add_row(*map(Text, (str(count), *amounts, str(one.shape))))
            else:
                table.add_row(str(count), "", "", "", "", "nothing fits")
        return table

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the shortest step of every number of devices to a file, beside that of perfect speed-up.

        Args:
            path: of the picture; its suffix says the format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            PlanError: the search was of one number of devices alone, or matplotlib is not installed.

        Source: TensorOpt 4.1, "profiling".
        """
        if self.option != "profiling":
            raise PlanError(
                f'a search with option={self.option!r} has no step for every number of devices: use option="profiling".'
            )
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise PlanError(
                "drawing a search needs matplotlib, which is not installed: pip install 'autoshard[plot]', or print "
                "the result."
            ) from error
        best = tuple(self.by_devices.values())
        counts, steps = [one.devices for one in best], [1e3 * _seconds(one) for one in best]
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xticks=counts, xticklabels=list(map(str, counts)))
        axes.minorticks_off()
        axes.plot(counts, steps, "o-", color="tab:blue", label="fastest plan")
        axes.plot(counts, [steps[0] * counts[0] / n for n in counts], ":", color="grey", label="perfect speed-up")
        for one, step in zip(best, steps, strict=True):
            axes.annotate(str(one.shape), (one.devices, step), textcoords="offset points", xytext=(4, 6), fontsize=8)
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
