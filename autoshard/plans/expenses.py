"""What a plan spends where: seconds of compute and of collectives, bytes sent and held; in all, and by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rich.table import Table
from rich.text import Text

from autoshard.display import WIDTH, plain
from autoshard.names import group_names
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_text import memory_parts, memory_text, number_table, summary_table
from autoshard.units import format_bytes, format_seconds

COMPUTE = "compute"
"""The kind of a term that is no collective."""

_ROWS = 30  # modules that the table lists; the others are summed up in one row
_DIGITS = 12  # of the step: equal layers differ in their seconds by rounding


@dataclass(frozen=True, slots=True)
class Term:
    """The work of one kind at one place of the model.

    Attributes:
        kind: `"compute"`, or the kind of a collective, such as `"all_reduce"`.
        axis: the mesh axis of a collective; `""` for compute.
        module: path of the module, `""` for the root.
    """

    kind: str
    axis: str
    module: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Work of one device in a step.

    Attributes:
        count: of operators or collectives.
        bytes: that one device holds before the collectives, together; 0 for compute.
        seconds: predicted, before overlap.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.bytes + other.bytes, self.seconds + other.seconds)


@dataclass(frozen=True)
class Expenses:
    """What the step of a plan spends on one device.

    The predicted seconds of the step are `compute + sum(communication.values()) - overlap + other`.

    Attributes:
        mesh_axes: names of the mesh axes.
        step_seconds: predicted time of the step.
        exposed: seconds in which the device communicates and does not compute.
        terms: the work by kind, axis and module.
        memory: bytes held at the moment of the peak, by kind.
        peak: bytes held at that moment.
        memory_text: the same for people.
    """

    mesh_axes: tuple[str, ...]
    step_seconds: float
    exposed: float
    terms: Mapping[Term, Amount]
    memory: Mapping[str, int]
    peak: int
    memory_text: str

    @staticmethod
    def of(plan: PlanContents) -> Expenses:
        """Return the expenses of a plan."""
        terms: defaultdict[Term, Amount] = defaultdict(Amount)
        for choice in plan.choices:
            terms[Term(COMPUTE, "", choice.module)] += Amount(1, 0, choice.seconds)
        for sent in plan.collectives:
            amount = Amount(sent.count, sent.count * sent.bytes, sent.count * sent.seconds)
            terms[Term(sent.kind, sent.axis, sent.module)] += amount
        exposed = plan.exposed_seconds
        if exposed is None:
            # A plan of an older version: all that is no compute counts as exposed.
            exposed = max(0.0, plan.step_seconds - sum(choice.seconds for choice in plan.choices))
        return Expenses(
            plan.mesh.names,
            plan.step_seconds,
            exposed,
            dict(terms),
            memory_parts(plan.memory),
            plan.memory.peak,
            memory_text(plan),
        )

    @cached_property
    def compute(self) -> float:
        """Seconds of compute of operators."""
        return sum(amount.seconds for term, amount in self.terms.items() if term.kind == COMPUTE)

    @cached_property
    def communication(self) -> dict[str, float]:
        """Mesh axis -> seconds of the collectives over it, before overlap."""
        return {axis: amount.seconds for axis, amount in self._by_axis.items()}

    @cached_property
    def sent(self) -> dict[str, int]:
        """Mesh axis -> bytes that the device holds before the collectives over it, together."""
        return {axis: amount.bytes for axis, amount in self._by_axis.items()}

    @cached_property
    def _by_axis(self) -> dict[str, Amount]:
        sums = dict.fromkeys(self.mesh_axes, Amount())
        for term, amount in self.terms.items():
            if term.axis:
                sums[term.axis] += amount
        return sums

    @property
    def overlap(self) -> float:
        """Seconds of communication that cost no time: compute hides them, or collectives that are joined save them."""
        return sum(self.communication.values()) - self.exposed

    @property
    def other(self) -> float:
        """Seconds besides compute and exposed communication: waits for the host, copies, and compute slowed down."""
        return self.step_seconds - self.compute - self.exposed

    @cached_property
    def modules(self) -> dict[str, dict[Term, Amount]]:
        """Path of every module that works itself -> its part of `terms`."""
        modules: dict[str, dict[Term, Amount]] = {}
        for term, amount in self.terms.items():
            modules.setdefault(term.module, {})[term] = amount
        return modules

    def __str__(self) -> str:
        return plain(self.tables(), WIDTH)

    def tables(self) -> list[Table | Text]:
        """Return the sums, and the expenses by module, those that take most time first; equal layers are one row."""
        facts = [
            ("step", format_seconds(self.step_seconds)),
            (COMPUTE, format_seconds(self.compute)),
            ("communication", self._communication_text()),
            ("other", f"{format_seconds(self.other)} (waits for the host, copies, compute slowed by communication)"),
            ("memory", self.memory_text),
        ]
        return [summary_table("Expenses of a step", facts), self._module_table()]

    def _communication_text(self) -> str:
        by_axis = ", ".join(
            f"{axis} {format_seconds(seconds)} ({format_bytes(self.sent[axis])})"
            for axis, seconds in self.communication.items()
        )
        total = format_seconds(sum(self.communication.values()))
        return f"{total}: {by_axis}; exposed {format_seconds(self.exposed)}, overlap {format_seconds(self.overlap)}"

    def _module_table(self) -> Table:
        rows = []
        for group in group_names({path: self._key(terms) for path, terms in self.modules.items()}):
            sums: defaultdict[str, Amount] = defaultdict(Amount)
            for path in group.names:
                for term, amount in self.modules[path].items():
                    sums[term.axis] += amount
            rows.append((group.text or "(root)", len(group.names), sums))
        rows.sort(key=lambda row: -sum(amount.seconds for amount in row[2].values()))
        if len(rows) > _ROWS:
            rest: defaultdict[str, Amount] = defaultdict(Amount)
            for _, _, sums in rows[_ROWS:]:
                for axis, amount in sums.items():
                    rest[axis] += amount
            number = sum(count for _, count, _ in rows[_ROWS:])
            rows[_ROWS:] = [(f"{len(rows) - _ROWS} more", number, rest)]
        axes = [axis for axis, amount in self._by_axis.items() if amount.count]
        labels = ("modules", COMPUTE, *(f"{axis} {unit}" for axis in axes for unit in ("time", "bytes")))
        body = []
        for path, count, sums in rows:
            sent = (
                text for axis in axes for text in (format_seconds(sums[axis].seconds), format_bytes(sums[axis].bytes))
            )
            body.append((path, str(count), format_seconds(sums[""].seconds), *sent))
        return number_table(["module"], labels, body)

    def _key(self, terms: Mapping[Term, Amount]) -> tuple[object, ...]:
        """Return what is equal for modules that may be one row."""
        total = self.step_seconds or 1.0
        return tuple(
            sorted(
                (term.kind, term.axis, amount.count, amount.bytes, round(amount.seconds / total, _DIGITS))
                for term, amount in terms.items()
            )
        )
