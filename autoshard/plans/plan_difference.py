"""The difference of two plans of one model, term by term: where one spends more, and where the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.names import group_names
from autoshard.plans.expenses import COMPUTE, Amount, HasExpenses, StepExpenses, Term
from autoshard.report import HasReport, Report, Table, names, numbers, texts
from autoshard.units import format_bytes, format_seconds

_ROWS = 30  # changes in a table; the others are summed in one row
_MAIN_SHARE = 0.9  # the fraction of the changes of one kind that determines their place
_LEAST_SHARE = 0.01  # the fraction of the largest change that a sentence still mentions
_ROUNDING = 1e-8  # the fraction of the step that is no change: replays are rounded to nanoseconds


@dataclass(frozen=True, slots=True)
class Change:
    """The work of one kind that differs between two plans, at one place or at places that differ only in indices.

    Attributes:
        kind: `"compute"`, or the kind of a collective.
        axis: the mesh axis of a collective; `""` for compute.
        phase: `"forward"` or `"backward"`; `""` for both.
        module: path, or pattern of paths such as `layers.*.mlp`; `""` for the root.
        modules: the number of modules.
        before, after: their total work in each plan.
    """

    kind: str
    axis: str
    phase: str
    module: str
    modules: int
    before: Amount
    after: Amount

    @property
    def seconds(self) -> float:
        """Seconds that the second plan spends more, before overlap."""
        return self.after.seconds - self.before.seconds

    @property
    def name(self) -> str:
        """The kind of work, as in `"all-reduce on tp"`."""
        return f"{self.kind.replace('_', '-')} on {self.axis}" if self.axis else self.kind


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """The memory of one kind that differs between two plans at their peaks.

    Attributes:
        kind: as in `Expenses.memory`.
        module, modules: as for `Change`.
        before, after: total bytes of these modules in each plan.
    """

    kind: str
    module: str
    modules: int
    before: int
    after: int


@dataclass(frozen=True)
class PlanDifference(HasReport):
    """The expenses of a plan compared to those of another plan of the same model.

    The difference of the predicted steps is the sum of the `changes`, less the gain in overlap, and the differences of
    `bubble` and `other`: `seconds == sum(change.seconds for change in changes) - overlap + bubble + other`.

    Attributes:
        before, after: the expenses of the two plans, whose meshes may differ.
    """

    before: StepExpenses
    after: StepExpenses

    @staticmethod
    def of(before: HasExpenses, after: HasExpenses) -> PlanDifference:
        """Return the difference from one plan to another of the same model."""
        return PlanDifference(before.expenses(), after.expenses())

    @property
    def seconds(self) -> float:
        """Seconds by which the second step is longer."""
        return self.after.step_seconds - self.before.step_seconds

    @property
    def overlap(self) -> float:
        """Additional seconds of communication that are hidden or saved."""
        return self.after.overlap - self.before.overlap

    @property
    def bubble(self) -> float:
        """Additional seconds in which ranks of a pipeline wait for other ranks."""
        return self.after.bubble - self.before.bubble

    @property
    def other(self) -> float:
        """Additional seconds of waits for the host, and copies."""
        return self.after.other - self.before.other

    @property
    def _least(self) -> float:
        """The seconds from which a difference counts as a change."""
        return _ROUNDING * max(self.before.step_seconds, self.after.step_seconds)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changed work by kind, axis, half and module, with equally changed layers merged; the largest first."""
        both = self.before.terms, self.after.terms
        paths = dict.fromkeys((*self.before.modules, *self.after.modules))
        changes = []
        for kind, axis, phase in dict.fromkeys((term.kind, term.axis, term.phase) for terms in both for term in terms):
            # Unchanged modules are grouped, too, so that no pattern covers them.
            amounts = {path: [terms.get(Term(kind, axis, phase, path), Amount()) for terms in both] for path in paths}
            keys = {path: _key(before, after, self._least) for path, (before, after) in amounts.items()}
            for group in group_names(keys):
                if group.key is not None:
                    sums = [sum((amounts[path][side] for path in group.names), Amount()) for side in (0, 1)]
                    changes.append(Change(kind, axis, phase, group.text, len(group.names), *sums))
        return tuple(sorted(changes, key=lambda change: -abs(change.seconds)))

    @cached_property
    def memory_changes(self) -> tuple[MemoryChange, ...]:
        """Changed memory at the peak, by kind and module, the largest first."""
        both = self.before.held, self.after.held
        paths = dict.fromkeys(path for held in both for path in held)
        changes = []
        for kind in dict.fromkeys((*self.before.memory, *self.after.memory)):
            amounts = {path: tuple(held.get(path, {}).get(kind, 0) for held in both) for path in paths}
            for group in group_names(amounts):
                before, after = group.key
                if before != after:
                    count = len(group.names)
                    changes.append(MemoryChange(kind, group.text, count, count * before, count * after))
        return tuple(sorted(changes, key=lambda change: -abs(change.after - change.before)))

    @cached_property
    def main_changes(self) -> tuple[Change, ...]:
        """The changes merged by kind and axis, over both halves, at the module with most of them."""
        kinds: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            kinds.setdefault((change.kind, change.axis), []).append(change)
        main = [
            Change(
                kind,
                axis,
                "",
                _common_path(changes),
                sum(change.modules for change in changes),
                sum((change.before for change in changes), Amount()),
                sum((change.after for change in changes), Amount()),
            )
            for (kind, axis), changes in kinds.items()
        ]
        return tuple(sorted(main, key=lambda change: -abs(change.seconds)))

    def summary(self) -> str:
        """Return `"step 33.2 ms in place of 32.6 ms (+1.9 %): +1.1 ms all-reduce on tp in layers.*.mlp; peak ..."`."""
        step, earlier = self.after.step_seconds, self.before.step_seconds
        relative = f" ({100 * self.seconds / earlier:+.1f} %)" if earlier else ""
        head = f"step {format_seconds(step)} in place of {format_seconds(earlier)}{relative}"
        terms = [(change.seconds, _text(change)) for change in self.main_changes]
        terms.append((-self.overlap, "less overlap" if self.overlap < 0 else "more overlap"))
        terms.append((self.bubble, "bubble"))
        terms.append((self.other, "waits and copies"))
        largest = max(abs(seconds) for seconds, _ in terms)
        least = max(_LEAST_SHARE * largest, self._least)
        parts = [f"{signed_text(seconds, format_seconds)} {text}" for seconds, text in terms if abs(seconds) > least]
        parts += self._moves(least)
        if self.before.rerun != self.after.rerun:
            parts.append(f"{self.after.rerun} run again in place of {self.before.rerun}")
        if self.before.schedule != self.after.schedule:
            parts.append(f"{self.after.schedule} in place of {self.before.schedule}")
        text = f"{head}: {', '.join(parts)}" if parts else head
        peaks = self.after.peak, self.before.peak
        return f"{text}; peak {' in place of '.join(map(format_bytes, peaks))}" if peaks[0] != peaks[1] else text

    def _moves(self, least: float) -> Iterator[str]:
        """Yield texts about work that moved to the other half of the step and takes about as long there."""
        for main in self.main_changes:
            halves = {"forward": 0.0, "backward": 0.0}
            for change in self.changes:
                if (change.kind, change.axis) == (main.kind, main.axis):
                    halves[change.phase] += change.seconds
            moved = max(halves.values())
            if moved > least >= abs(main.seconds):
                yield f"{format_seconds(moved)} {_text(main)} in the {max(halves, key=halves.__getitem__)} half instead"

    def report(self) -> Report:
        """Return the sums of both plans, and the changes by kind, axis and module."""
        both = self.before, self.after
        seconds = {"step": [side.step_seconds for side in both], COMPUTE: [side.compute for side in both]}
        for axis in dict.fromkeys((*self.before.communication, *self.after.communication)):
            seconds[f"communication on {axis}"] = [side.communication.get(axis, 0.0) for side in both]
        seconds["less overlap"] = [-side.overlap for side in both]
        if any(side.bubble for side in both):
            seconds["bubble"] = [side.bubble for side in both]
        seconds["waits and copies"] = [side.other for side in both]
        rows = [(label, *_cells(sides, format_seconds, self._least)) for label, sides in seconds.items()]
        rows.append(("peak of memory", *_cells([side.peak for side in both], format_bytes)))
        rows += [
            (f"  {kind}", *_cells([side.memory.get(kind, 0) for side in both], format_bytes))
            for kind in dict.fromkeys((*self.before.memory, *self.after.memory))
        ]
        tables = [Table.of((*texts("of a step"), *numbers("before", "after", "change")), rows)]
        if self.changes:
            tables.append(_work_table(self.changes))
        if self.memory_changes:
            tables.append(_memory_table(self.memory_changes))
        return Report.of("", tables)


def signed_text(amount: float, text: Callable[[float], str]) -> str:
    """Return an amount as text with its sign, such as `"+1.1 ms"`."""
    return f"{'-' if amount < 0 else '+'}{text(abs(amount))}"


def _text(change: Change) -> str:
    return f"{change.name} in {change.module}" if change.module else change.name


def _key(before: Amount, after: Amount, least: float) -> Hashable:
    """Return a key that is equal for modules that may share a change; None if nothing changes."""
    seconds = after.seconds - before.seconds
    if (before.count, before.bytes) == (after.count, after.bytes) and abs(seconds) <= least:
        return None
    # Rounded, because equal layers differ in their seconds by rounding. The number of compute operators is not part of
    # the key: a layer may have one more, such as the sum of two gradients.
    work = (before.count, after.count) if before.bytes or after.bytes else ()
    return work, before.bytes, after.bytes, f"{seconds:.3g}" if abs(seconds) > least else ""


def _common_path(changes: Sequence[Change]) -> str:
    """Return the module that contains most of the changes; `changes` are sorted, the largest first."""
    left = sum(abs(change.seconds) for change in changes)
    least = (1 - _MAIN_SHARE) * left
    paths: list[list[str]] = []
    for change in changes:
        if paths and left <= least:
            break
        paths.append(change.module.split("."))
        left -= abs(change.seconds)
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) == 1:
            common.append(parts[0])
        elif all(part[:1].isdigit() or part[:1] in ("*", "{") for part in parts):
            # Different indices, or patterns of them.
            common.append("*")
        else:
            break
    return ".".join(common)


def _cells(sides: Sequence[float], text: Callable[[float], str], least: float = 0.0) -> tuple[str, str, str]:
    """Return the texts of an amount before and after, and of its change if it exceeds `least`."""
    before, after = sides
    return text(before), text(after), signed_text(after - before, text) if abs(after - before) > least else ""


def _work_table(changes: Sequence[Change]) -> Table:
    rows = [
        (
            change.name,
            change.phase,
            change.module or "(root)",
            str(change.modules),
            f"{change.before.count} -> {change.after.count}",
            f"{format_bytes(change.before.bytes)} -> {format_bytes(change.after.bytes)}" if change.axis else "",
            signed_text(change.seconds, format_seconds),
        )
        for change in changes
    ]
    rest: tuple[str, ...] = ()
    others = changes[_ROWS:]
    if others:
        seconds = signed_text(sum(change.seconds for change in others), format_seconds)
        rest = ("...", "", f"{len(others)} more", str(sum(change.modules for change in others)), "", "", seconds)
    columns = (*texts("work", "phase"), *names("module"), *numbers("modules", "count", "bytes", "time"))
    return Table.of(columns, rows, rest=rest, most=_ROWS)


def _memory_table(changes: Sequence[MemoryChange]) -> Table:
    rows = [
        (
            change.kind,
            change.module or "(root)",
            str(change.modules),
            f"{format_bytes(change.before)} -> {format_bytes(change.after)}",
            signed_text(change.after - change.before, format_bytes),
        )
        for change in changes
    ]
    rest: tuple[str, ...] = ()
    others = changes[_ROWS:]
    if others:
        more = signed_text(sum(change.after - change.before for change in others), format_bytes)
        rest = ("...", f"{len(others)} more", str(sum(change.modules for change in others)), "", more)
    columns = (*texts("held at the peak"), *names("module"), *numbers("modules", "bytes", "change"))
    return Table.of(columns, rows, rest=rest, most=_ROWS)
