"""The difference of two plans of one model, term by term: where the one spends more, and where the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.table import Table
from rich.text import Text

from autoshard.display import WIDTH, plain
from autoshard.names import group_names
from autoshard.plans.expenses import COMPUTE, Amount, Expenses, Term
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_text import number_table
from autoshard.units import format_bytes, format_seconds

_ROWS = 30  # changes that the table lists; the others are summed up in one row
_DIGITS = 12  # of the step: equal layers differ in their seconds by rounding
_MAIN_SHARE = 0.9  # of the changes of one kind, those that say where it happens


@dataclass(frozen=True, slots=True)
class Change:
    """The work of one kind that two plans do differently, at one place or at places that differ in indices alone.

    Attributes:
        kind: `"compute"`, or the kind of a collective.
        axis: the mesh axis of a collective; `""` for compute.
        module: path, or pattern of paths such as `layers.*.mlp`; `""` for the root.
        modules: the number of modules.
        before, after: the work of all of them in each plan.
    """

    kind: str
    axis: str
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


@dataclass(frozen=True)
class PlanDifference:
    """What a plan spends more or less than another plan of the same model.

    The difference of the predicted steps is the sum of the `changes`, less the gain in overlap, and the difference of
    `other`: `seconds == sum(change.seconds for change in changes) - overlap + other`.

    Attributes:
        before, after: the expenses of the two plans.
    """

    before: Expenses
    after: Expenses

    @staticmethod
    def of(before: PlanContents, after: PlanContents) -> PlanDifference:
        """Return the difference from one plan to another of the same model; their meshes may differ."""
        return PlanDifference(Expenses.of(before), Expenses.of(after))

    @property
    def seconds(self) -> float:
        """Seconds by which the step is longer."""
        return self.after.step_seconds - self.before.step_seconds

    @property
    def overlap(self) -> float:
        """Seconds of communication that are hidden or saved in addition."""
        return self.after.overlap - self.before.overlap

    @property
    def other(self) -> float:
        """Seconds by which waits, copies and the slow-down of compute are longer."""
        return self.after.other - self.before.other

    @property
    def memory(self) -> dict[str, int]:
        """Kind -> bytes that are held in addition at the moment of the peak."""
        kinds = dict.fromkeys((*self.before.memory, *self.after.memory))
        return {kind: self.after.memory.get(kind, 0) - self.before.memory.get(kind, 0) for kind in kinds}

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The work that differs, with layers that differ alike as one, those of most seconds first."""
        total = self.before.step_seconds or self.after.step_seconds or 1.0
        paths = dict.fromkeys((*self.before.modules, *self.after.modules))
        found = []
        for kind, axis in dict.fromkeys((term.kind, term.axis) for term in (*self.before.terms, *self.after.terms)):
            amounts = {path: self._amounts(Term(kind, axis, path)) for path in paths}
            # Modules without a change are grouped too, so that a pattern stands for none of them.
            keys = {path: _key(before, after, total) for path, (before, after) in amounts.items()}
            for group in group_names(keys):
                if group.key:
                    sums = [sum((amounts[path][side] for path in group.names), Amount()) for side in (0, 1)]
                    found.append(Change(kind, axis, group.text, len(group.names), *sums))
        return tuple(sorted(found, key=lambda change: -abs(change.seconds)))

    def _amounts(self, term: Term) -> tuple[Amount, Amount]:
        return self.before.terms.get(term, Amount()), self.after.terms.get(term, Amount())

    @cached_property
    def main_changes(self) -> tuple[Change, ...]:
        """The changes with those of one kind and axis as one, at the module that most of them are in."""
        kinds: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            kinds.setdefault((change.kind, change.axis), []).append(change)
        main = [
            Change(
                kind,
                axis,
                _common_path(changes),
                sum(change.modules for change in changes),
                sum((change.before for change in changes), Amount()),
                sum((change.after for change in changes), Amount()),
            )
            for (kind, axis), changes in kinds.items()
        ]
        return tuple(sorted(main, key=lambda change: -abs(change.seconds)))

    def summary(self) -> str:
        """Return `"step 33.2 ms in place of 32.6 ms (+1.9 %): +1.1 ms all-reduce on tp in layers.*.mlp, ..."`."""
        step, earlier = self.after.step_seconds, self.before.step_seconds
        relative = f" ({100 * self.seconds / earlier:+.1f} %)" if earlier else ""
        head = f"step {format_seconds(step)} in place of {format_seconds(earlier)}{relative}"
        # What is less than a hundredth of the largest change would only make the sentence long.
        texts = [
            (change.seconds, f"{change.name} in {change.module}" if change.module else change.name)
            for change in self.main_changes
        ]
        texts += [(-self.overlap, "less overlap" if self.overlap < 0 else "more overlap"), (self.other, "other")]
        least = max(abs(seconds) for seconds, _ in texts) / 100
        parts = [f"{signed(seconds, format_seconds)} {text}" for seconds, text in texts if abs(seconds) > least]
        return f"{head}: {', '.join(parts)}" if parts else head

    def __str__(self) -> str:
        return plain(self.tables(), WIDTH)

    def tables(self) -> list[Table | Text]:
        """Return the sums of both plans, and the changes by kind, axis and module."""
        both = self.before, self.after
        rows = [("step", *_cells([side.step_seconds for side in both], format_seconds))]
        rows.append((COMPUTE, *_cells([side.compute for side in both], format_seconds)))
        for axis in dict.fromkeys((*self.before.communication, *self.after.communication)):
            seconds = [side.communication.get(axis, 0.0) for side in both]
            rows.append((f"communication on {axis}", *_cells(seconds, format_seconds)))
        rows.append(("less overlap", *_cells([-side.overlap for side in both], format_seconds)))
        rows.append(("other", *_cells([side.other for side in both], format_seconds)))
        rows.append(("peak of memory", *_cells([side.peak for side in both], format_bytes)))
        for kind in self.memory:
            held = [side.memory.get(kind, 0) for side in both]
            rows.append((f"  {kind}", *_cells(held, format_bytes)))
        sums = number_table(["of a step"], ["before", "after", "change"], rows)
        return [sums, _change_table(self.changes)] if self.changes else [sums]


def signed(amount: float, text: Callable[[float], str]) -> str:
    """Return an amount as text with its sign, such as `"+1.1 ms"`."""
    return f"{'-' if amount < 0 else '+'}{text(abs(amount))}"


def _key(before: Amount, after: Amount, total: float) -> tuple[float, ...]:
    """Return what is equal for modules that may be one change; empty if nothing changes."""
    seconds = round((after.seconds - before.seconds) / total, _DIGITS)
    if (before.count, before.bytes) == (after.count, after.bytes) and not seconds:
        return ()
    return before.count, after.count, before.bytes, after.bytes, seconds


def _common_path(changes: Sequence[Change]) -> str:
    """Return the module that most of the changes are in; `changes` have those of most seconds first."""
    left = sum(abs(change.seconds) for change in changes)
    least = (1 - _MAIN_SHARE) * left
    paths = []
    for change in changes:
        if paths and left <= least:
            break
        paths.append(change.module.split("."))
        left -= abs(change.seconds)
    common = []
    for parts in zip(*paths, strict=False):
        # Indices, and patterns of them, are one.
        if len({"*" if part[:1] in "*{0123456789" and part else part for part in parts}) > 1:
            break
        common.append(parts[0] if len(set(parts)) == 1 else "*")
    return ".".join(common)


def _cells(sides: Sequence[float], text: Callable[[float], str]) -> tuple[str, str, str]:
    before, after = sides
    return text(before), text(after), signed(after - before, text) if after != before else ""


def _change_table(changes: Sequence[Change]) -> Table:
    rows = [
        (
            change.name,
            change.module or "(root)",
            str(change.modules),
            *_cells([change.before.count, change.after.count], str)[:2],
            *_cells([change.before.bytes, change.after.bytes], format_bytes)[:2],
            signed(change.seconds, format_seconds),
        )
        for change in changes[:_ROWS]
    ]
    rest = changes[_ROWS:]
    if rest:
        seconds = signed(sum(change.seconds for change in rest), format_seconds)
        rows.append(("...", f"{len(rest)} more", str(sum(change.modules for change in rest)), *[""] * 4, seconds))
    numbers = ("modules", "count", "then", "bytes", "then", "time")
    return number_table(("change", "module"), numbers, rows)
