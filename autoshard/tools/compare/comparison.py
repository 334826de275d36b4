"""`Comparison`: a plan beside other layouts of the same step, and the nearest standard one with its flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard import Expenses, MeshShape, PlanDifference, PlanError, ShardingPlan, hint_text
from autoshard.names import suggestion
from autoshard.options import Hints
from autoshard.report import Fact, Facts, HasReport, Note, Part, Report, Section, Table, numbers, texts
from autoshard.units import format_bytes, format_seconds

PLAN = "autoshard"
"""The name of the plan in its comparison."""


@dataclass(frozen=True, slots=True)
class ComparedLayout:
    """A layout of a comparison.

    Attributes:
        name: of the layout.
        kind: `"plan"`, `"standard"`, or `"own"` for one that the user gave.
        plan: with its predicted seconds and bytes; None if the layout cannot be had.
        reason: why it cannot be had; empty otherwise.
        hints: force the layout: `autoshard.parallelize(model, mesh, hints=...)`; of the plan, the user's.
    """

    name: str
    kind: Literal["plan", "standard", "own"]
    plan: ShardingPlan | None = field(default=None, repr=False)
    reason: str = ""
    hints: Hints = field(default_factory=dict, repr=False)

    @property
    def expenses(self) -> Expenses:
        """What the layout spends where; it prints as tables by module.

        Raises:
            PlanError: the layout cannot be had.
        """
        return self.made.expenses()

    @property
    def made(self) -> ShardingPlan:
        """The plan.

        Raises:
            PlanError: the layout cannot be had.
        """
        if self.plan is None:
            raise PlanError(f"there is no layout {self.name}: {self.reason}")
        return self.plan


@dataclass(frozen=True, slots=True)
class NearestLayout(HasReport):
    """The standard layout with the shortest step of all that fit; of equal ones, that of the smallest peak.

    Attributes:
        name: of the layout.
        seconds_lost: seconds that its step takes longer than that of the plan; negative if it is shorter.
        percent_lost: the same in percent of the plan's step.
        fits: True if it fits the memory limit; if no standard layout does, it is the one of the smallest peak.
        torchtitan: flags of torchtitan's trainer.
        megatron: flags of Megatron-LM.
        fsdp2: Python code with torch's `fully_shard` and `parallelize_module`.
    """

    name: str
    seconds_lost: float
    percent_lost: float
    fits: bool
    torchtitan: str = field(repr=False)
    megatron: str = field(repr=False)
    fsdp2: str = field(repr=False)

    def report(self) -> Report:
        """Return the loss and the flags."""
        if self.seconds_lost >= 0:
            loss = f"it loses {format_seconds(self.seconds_lost)} a step, {self.percent_lost:.1f} %"
        else:
            loss = f"it is {format_seconds(-self.seconds_lost)} a step faster, {-self.percent_lost:.1f} %"
        fit = "" if self.fits else "; no standard layout fits, and it has the smallest peak"
        flags = (("torchtitan", self.torchtitan), ("Megatron-LM", self.megatron), ("torch", self.fsdp2))
        sections = (Section(title, (Note(text, "code"),)) for title, text in flags)
        return Report.of(f"Nearest standard layout: {self.name}", [Note(f"beside the plan {loss}{fit}"), *sections])


@dataclass(frozen=True, slots=True)
class Comparison(HasReport):
    """The result of `autoshard.compare`. `to_html` writes the page of the plan, with the layouts in it.

    Attributes:
        mesh: the mesh axes.
        cluster: name of the cluster that all layouts are priced on.
        memory_limit: bytes that a device may hold.
        layouts: the plan first, then the standard layouts and those of the user.
        nearest: the nearest standard layout; None if there is no standard layout.
        seconds: of the comparison, capture included.
    """

    mesh: MeshShape
    cluster: str
    memory_limit: int
    layouts: tuple[ComparedLayout, ...]
    nearest: NearestLayout | None = None
    seconds: float = 0.0

    @property
    def plan(self) -> ShardingPlan:
        """The plan, for `autoshard.parallelize(plan=...)`."""
        return self.layouts[0].made

    def __getitem__(self, name: str) -> ComparedLayout:
        """Return a layout by its name, such as `"FSDP2 x TP"`; `"autoshard"` is the plan.

        Raises:
            PlanError: there is no layout of that name.
        """
        for layout in self.layouts:
            if layout.name == name:
                return layout
        raise PlanError(
            f"no layout {name!r} was compared. {suggestion(name, [layout.name for layout in self.layouts])}"
        )

    def __iter__(self) -> Iterator[ComparedLayout]:
        return iter(self.layouts)

    def difference(self, name: str) -> PlanDifference:
        """Return the difference of the plan to a layout, term by term.

        Raises:
            PlanError: there is no layout of that name, or it cannot be had.
        """
        return PlanDifference.of(self[name].made, self.plan)

    def __repr__(self) -> str:
        near = f", nearest {self.nearest.name} at {self.nearest.percent_lost:+.1f} %" if self.nearest else ""
        return f"Comparison({len(self.layouts)} layouts on {self.mesh}{near}; print it to see more)"

    def report(self) -> Report:
        """Return the layouts as a table, what cannot be had and why, the nearest standard layout, and the plan."""
        sent = (f"{axis} bytes" for axis in self._axes)
        amounts = numbers("step", "to plan", "compute", "exposed", *sent, "peak")
        rows = [list(self._cells(layout.name, layout.plan)) for layout in self.layouts if layout.plan is not None]
        table = Table.of((*texts("layout"), *amounts, *texts("")), rows, most=100)
        layouts = Section("Layouts", (table, *map(Note, self._left_out())))
        near: list[Part] = []
        if self.nearest is not None:
            flags = self.nearest.report()
            near.append(Section(flags.title, flags.parts, is_folded=True))
        plan = self.plan.report(is_compared=True)
        head = Facts((Fact("mesh", str(self.mesh), self._devices, is_key=True),))
        return Report.of(f"Comparison on {self.mesh}", (head, layouts, *near, *plan.details()))

    @property
    def _devices(self) -> str:
        limit = format_bytes(self.memory_limit)
        return f"{self.mesh.size} devices on cluster {self.cluster}, {limit} per device"

    @property
    def _axes(self) -> list[str]:
        return [axis.name for axis in self.mesh.axes if axis.size > 1]

    def _left_out(self) -> list[str]:
        """Return a line for every reason why layouts cannot be had."""
        reasons: dict[str, list[str]] = {}
        for layout in self.layouts:
            if layout.plan is None:
                reasons.setdefault(layout.reason, []).append(layout.name)
        return [f"no {', '.join(names)}: {reason}" for reason, names in reasons.items()]

    def _cells(self, name: str, plan: ShardingPlan) -> Iterator[str]:
        expenses = plan.expenses()
        yield name
        yield format_seconds(plan.step_seconds)
        yield f"{100 * (plan.step_seconds / self.plan.step_seconds - 1):+.1f} %" if name != PLAN else ""
        yield format_seconds(expenses.compute)
        yield format_seconds(expenses.exposed)
        yield from (format_bytes(expenses.sent[axis]) for axis in self._axes)
        yield format_bytes(plan.memory.peak)
        notes = [f"{expenses.rerun} recomputed"] if plan.recomputed else []
        yield ", ".join([*(["does not fit"] if plan.memory.peak > self.memory_limit else []), *notes])

    def to_json(self) -> str:
        """Return the figures of all layouts, and the nearest one with its flags, as a JSON text.

        Seconds are of a step, bytes of one device; `sent` has by axis the bytes held before the collectives over it.
        """
        nearest = None
        if self.nearest is not None:
            names = ("name", "seconds_lost", "percent_lost", "fits", "torchtitan", "megatron", "fsdp2")
            nearest = {name: getattr(self.nearest, name) for name in names}
        data = {
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "cluster": self.cluster,
            "memory_limit": self.memory_limit,
            "seconds": self.seconds,
            "layouts": [self._figures(layout) for layout in self.layouts],
            "nearest": nearest,
        }
        return json.dumps(data, indent=1, allow_nan=False)

    def _figures(self, layout: ComparedLayout) -> dict[str, Any]:
        hints = {glob: hint_text(value) for glob, value in layout.hints.items()}
        head: dict[str, Any] = {"name": layout.name, "kind": layout.kind, "hints": hints}
        plan = layout.plan
        if plan is None:
            return {**head, "reason": layout.reason}
        expenses = plan.expenses()
        return head | {
            "step_seconds": plan.step_seconds,
            "update_seconds": plan.update_seconds,
            "compute_seconds": expenses.compute,
            "exposed_seconds": expenses.exposed,
            "communication_seconds": expenses.communication,
            "sent": expenses.sent,
            "peak": plan.memory.peak,
            "memory": expenses.memory,
            "fits": plan.memory.peak <= self.memory_limit,
            "recomputed": list(plan.recomputed),
        }
