"""Expenses of a plan's step: seconds of compute and of collectives, bytes sent and held; in total and by module."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from autoshard.names import group_names
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_summary import KIND_NAMES, memory_fact, memory_parts
from autoshard.report import Fact, Facts, HasReport, Report, Table, names, numbers
from autoshard.units import format_bytes, format_seconds

COMPUTE = "compute"
"""The kind of a term that is not a collective."""

_ROWS = 30  # modules in the table; the others are summed in one row


@dataclass(frozen=True, slots=True)
class Term:
    """Work of one kind at one place of the model.

    Attributes:
        kind: `"compute"`, or the kind of a collective, such as `"all_reduce"`.
        axis: the mesh axis of a collective; `""` for compute.
        phase: `"forward"` or `"backward"`.
        module: path of the module, `""` for the root.
    """

    kind: str
    axis: str
    phase: str
    module: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Work of one device in a step.

    Attributes:
        count: the number of operators or collectives.
        bytes: total bytes that one device holds before the collectives; 0 for compute.
        seconds: predicted seconds, before overlap.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.bytes + other.bytes, self.seconds + other.seconds)


def count_rerun(plans: Sequence[PlanContents]) -> str:
    """Return how many layers, or single operators, the stages of a step recompute."""
    counts = Counter[str]()
    for plan in plans:
        seconds = {decision.node: decision.seconds for decision in plan.choices}
        for name in plan.recomputed:
            # Views take no time.
            counts["operators" if name in seconds else "layers"] += seconds.get(name, 1.0) > 0.0
    return " and ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "0 layers"


class StepExpenses(HasReport):
    """The expenses of a plan's step on one device.

    The predicted seconds of the step are `compute + sum(communication.values()) - overlap + bubble + other`.
    """

    @property
    @abstractmethod
    def step_seconds(self) -> float:
        """Predicted seconds of the step."""

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes."""

    @property
    @abstractmethod
    def terms(self) -> Mapping[Term, Amount]:
        """The work by kind, axis, half of the step, and module."""

    @property
    @abstractmethod
    def exposed(self) -> float:
        """Seconds in which the device communicates but does not compute."""

    @property
    @abstractmethod
    def slowdown(self) -> float:
        """Seconds by which communication slows down the compute that hides it."""

    @property
    def bubble(self) -> float:
        """Seconds in which the device waits for other pipeline ranks, and neither computes nor communicates."""
        return 0.0

    @property
    def schedule(self) -> str:
        """The order in which the stages of a pipeline run, as text; empty without a pipeline."""
        return ""

    @property
    @abstractmethod
    def rerun(self) -> str:
        """What the backward half recomputes, such as `"8 layers"` or `"96 operators"`; `"0 layers"` for nothing."""

    @property
    @abstractmethod
    def peak(self) -> int:
        """Bytes of one device at the moment of the peak."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that the device with this peak may hold; 0 if unknown."""

    @property
    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Kind -> bytes of one device at the moment of the peak."""

    @property
    @abstractmethod
    def held(self) -> Mapping[str, Mapping[str, int]]:
        """Path of a module -> its own part of `memory`; empty if unknown."""

    @cached_property
    def compute(self) -> float:
        """Seconds of compute of operators."""
        return sum(amount.seconds for term, amount in self.terms.items() if term.kind == COMPUTE)

    @cached_property
    def communication(self) -> dict[str, float]:
        """Mesh axis -> seconds of collectives over it, before overlap."""
        return {axis: amount.seconds for axis, amount in self._by_axis.items()}

    @cached_property
    def sent(self) -> dict[str, int]:
        """Mesh axis -> total bytes that the device holds before the collectives over it."""
        return {axis: amount.bytes for axis, amount in self._by_axis.items()}

    @cached_property
    def _by_axis(self) -> dict[str, Amount]:
        sums = dict.fromkeys(self.axes, Amount())
        for term, amount in self.terms.items():
            if term.axis:
                sums[term.axis] += amount
        return sums

    @property
    def overlap(self) -> float:
        """Seconds of communication without cost: hidden by compute, less the slow-down, or saved by joining."""
        return sum(self.communication.values()) - self.exposed - self.slowdown

    @property
    def other(self) -> float:
        """Seconds apart from operators, communication and bubble: waits for the host, copies, and updates on the host.

        With unequal shares, also the difference of the slowest rank, whose step it is, from a rank with an equal share.
        """
        return self.step_seconds - self.compute - self.exposed - self.slowdown - self.bubble

    @cached_property
    def modules(self) -> dict[str, dict[Term, Amount]]:
        """Path of every module with its own work or memory -> its part of `terms`."""
        modules: dict[str, dict[Term, Amount]] = {}
        for term, amount in self.terms.items():
            modules.setdefault(term.module, {})[term] = amount
        return modules | {path: {} for path in self.held if path not in modules}

    def report(self) -> Report:
        """Return the sums, and the expenses by module, the slowest first; equal layers share a row."""
        slowdown = f"; slows compute down by {format_seconds(self.slowdown)}" if self.slowdown else ""
        facts = Facts.of(
            [
                ("step", format_seconds(self.step_seconds)),
                (COMPUTE, format_seconds(self.compute)),
                ("communication", self._communication_text()),
                ("overlap", f"{format_seconds(self.overlap)}; exposed {format_seconds(self.exposed)}{slowdown}"),
                Fact("bubble", format_seconds(self.bubble) if self.bubble else "", "waits for other ranks"),
                Fact("other", format_seconds(self.other), "waits for the host, copies"),
                self.memory_fact(),
            ]
        )
        return Report.of(self.title, (facts, self._module_table()))

    @property
    def title(self) -> str:
        """The title of the sums."""
        return "Expenses of a step on one device"

    @abstractmethod
    def memory_fact(self) -> Fact:
        """Return the peak with its parts, and the capacity."""

    def _communication_text(self) -> str:
        by_axis = ", ".join(
            f"{axis} {format_seconds(seconds)} ({format_bytes(self.sent[axis])})"
            for axis, seconds in self.communication.items()
        )
        return f"{format_seconds(sum(self.communication.values()))}: {by_axis}"

    def _module_table(self) -> Table:
        rows = [
            _ModuleRow.of(group.text or "(root)", [self.modules[path] for path in group.names], group.key[1])
            for group in group_names({path: self._key(path) for path in self.modules})
        ]
        rows.sort(key=lambda row: -row.seconds)
        axes = [axis for axis, amount in self._by_axis.items() if amount.count]
        labels = ["modules", COMPUTE, *(f"{axis} {unit}" for axis in axes for unit in ("time", "bytes"))]
        if self.held:
            labels.append("held at the peak")
        others = [_ModuleRow.sum_of(f"{len(rows) - _ROWS} more", rows[_ROWS:])] if len(rows) > _ROWS else []
        cells = [row.cells(axes, held=bool(self.held)) for row in (*rows, *others)]
        listed, rest = cells[: len(rows)], cells[len(rows) :]
        return Table.of((*names("module"), *numbers(*labels)), listed, rest=rest[0] if rest else (), most=_ROWS)

    def _key(self, path: str) -> tuple[object, int]:
        """Return a key that is equal for modules that may share a row: their work, and their bytes."""
        # Seconds as printed, because equal layers differ in them by rounding. The number of compute operators is not
        # part of the key: a layer may have one more, such as the sum of two gradients.
        work = sorted(
            (term.kind, term.axis, sent.count if term.axis else 0, sent.bytes, format_seconds(sent.seconds))
            for term, sent in self.modules[path].items()
        )
        return tuple(work), sum(self.held.get(path, {}).values())


class HasExpenses(Protocol):
    """A plan, of one program or of a pipeline."""

    @property
    def fits(self) -> bool:
        """True if the peak is within the capacity, or the capacity is unknown."""

    def expenses(self) -> StepExpenses:
        """Return the expenses of a step."""


@dataclass(frozen=True)
class Expenses(StepExpenses):
    """The expenses of the step on one device, for a plan of one program.

    Attributes:
        plan: the plan.
    """

    plan: PlanContents

    @property
    def step_seconds(self) -> float:
        return self.plan.step_seconds

    @property
    def axes(self) -> tuple[str, ...]:
        return self.plan.mesh.names

    @cached_property
    def terms(self) -> dict[Term, Amount]:
        terms: defaultdict[Term, Amount] = defaultdict(Amount)
        for choice in self.plan.choices:
            terms[Term(COMPUTE, "", choice.phase, choice.module)] += Amount(1, 0, choice.seconds)
        for sent in self.plan.collectives:
            amount = Amount(sent.count, sent.count * sent.bytes, sent.count * sent.seconds)
            terms[Term(sent.kind, sent.axis, sent.phase, sent.module)] += amount
        return dict(terms)

    @property
    def exposed(self) -> float:
        if not self._is_replayed:
            # A plan of an older version: everything except compute counts as exposed.
            return max(0.0, self.step_seconds - self.compute)
        return self.plan.step_replay.exposed

    @property
    def slowdown(self) -> float:
        # The replay contains no slow-down. With unequal shares, the slow-down belongs to another rank.
        if not self._is_replayed or self.plan.shares:
            return 0.0
        # Updates on the host follow the replay.
        return max(0.0, self.step_seconds - self.plan.host_update_seconds - self.plan.step_replay.seconds)

    @property
    def _is_replayed(self) -> bool:
        return bool(self.plan.step_replay.compute)

    @property
    def rerun(self) -> str:
        return count_rerun([self.plan])

    @property
    def peak(self) -> int:
        return self.plan.memory.peak

    @property
    def capacity(self) -> int:
        return self.plan.capacity

    @property
    def memory(self) -> dict[str, int]:
        return memory_parts(self.plan.memory)

    @cached_property
    def held(self) -> dict[str, dict[str, int]]:
        modules = self.plan.memory.modules
        return {path: {KIND_NAMES[kind]: held for kind, held in kinds.items()} for path, kinds in modules.items()}

    def memory_fact(self) -> Fact:
        return memory_fact(self.plan)


@dataclass(frozen=True, slots=True)
class _ModuleRow:
    """The expenses of modules in one row; `by_axis` has compute under `""`."""

    text: str
    count: int
    by_axis: Mapping[str, Amount]
    held: int

    @staticmethod
    def of(text: str, modules: list[dict[Term, Amount]], held: int) -> _ModuleRow:
        """Return the row of modules, each of which holds `held` bytes."""
        work = ((term.axis, amount) for terms in modules for term, amount in terms.items())
        return _ModuleRow(text, len(modules), _sums(work), len(modules) * held)

    @staticmethod
    def sum_of(text: str, rows: list[_ModuleRow]) -> _ModuleRow:
        work = (item for row in rows for item in row.by_axis.items())
        return _ModuleRow(text, sum(row.count for row in rows), _sums(work), sum(row.held for row in rows))

    @property
    def seconds(self) -> float:
        return sum(amount.seconds for amount in self.by_axis.values())

    def cells(self, axes: list[str], *, held: bool) -> list[str]:
        cells = [self.text, str(self.count), format_seconds(self.by_axis.get("", Amount()).seconds)]
        for axis in axes:
            sent = self.by_axis.get(axis, Amount())
            cells += [format_seconds(sent.seconds), format_bytes(sent.bytes)] if sent.count else ["", ""]
        return [*cells, format_bytes(self.held)] if held else cells


def _sums(work: Iterable[tuple[str, Amount]]) -> dict[str, Amount]:
    sums: defaultdict[str, Amount] = defaultdict(Amount)
    for axis, amount in work:
        sums[axis] += amount
    return dict(sums)
