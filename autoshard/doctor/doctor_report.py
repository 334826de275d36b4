"""What `doctor` finds, as data and as text."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.names import group_names
from autoshard.units import format_seconds

WIDTH = 120
_MODULES = 3  # module patterns that a row of operators names
_ROWS = 20  # operators with a rule that are shown, those that take most time


@dataclass(frozen=True, slots=True)
class CaptureProblem:
    """Something that keeps the model from being captured.

    Attributes:
        module: path of the module that it is in, `""` for the root.
        where: line of the user's code, `model.py:12 (if x.sum() > 0:)`; empty where there is none to name.
        what: what is wrong.
        advice: what to do about it; empty where `what` says so, or nothing is known.
    """

    module: str
    where: str
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Operator:
    """The calls of one operator in a training step.

    Attributes:
        name: such as `"aten.mm.default"`.
        source: `"rule"`: a sharding rule of the library or of yours; `"borrowed"`: the strategies that torch's own
            registry has for it, DTensor's or what `register_sharding` added; `"replicated"`: neither, so that every
            device does all of its work.
        count: calls in one step, forward and backward.
        modules: paths of the modules that call it, `""` for the root, each once.
        seconds: predicted time of all its calls on one device.
        advice: what to do about it where it is replicated.
    """

    name: str
    source: str
    count: int
    modules: tuple[str, ...]
    seconds: float
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `doctor` found; `str(report)` is a page of tables.

    Attributes:
        model: class of the module.
        cluster: name of the cluster that the seconds are of.
        problems: what keeps the model from being captured; none if it was.
        notes: how the parallelised model would differ from the one on one device, though it runs.
        operators: of the step, or of the parts that were captured; replicated ones first, then by time.
        parts: paths of the modules that were captured; `("",)` where the whole model was.
    """

    model: str
    cluster: str
    problems: tuple[CaptureProblem, ...]
    notes: tuple[str, ...]
    operators: tuple[Operator, ...]
    parts: tuple[str, ...]

    @property
    def captured(self) -> bool:
        """Whether the whole model was captured as one graph."""
        return not self.problems

    @property
    def healthy(self) -> bool:
        """Whether the whole model was captured, and every operator has a rule."""
        return self.captured and not self.replicated

    @property
    def replicated(self) -> tuple[Operator, ...]:
        """The operators without a rule."""
        return tuple(one for one in self.operators if one.source == "replicated")

    @property
    def step_seconds(self) -> float:
        """Predicted compute of one step on one device, of all that was captured."""
        return sum(one.seconds for one in self.operators)

    @property
    def replicated_seconds(self) -> float:
        """The part of `step_seconds` that more devices do not shorten, for want of rules."""
        return sum(one.seconds for one in self.replicated)

    @property
    def replicated_share(self) -> float:
        """`replicated_seconds` over `step_seconds`: devices without number would leave this share of the step."""
        return self.replicated_seconds / self.step_seconds if self.step_seconds else 0.0

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, emoji=False)
        with console.capture() as captured:
            console.print(report_page(self))
        return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def report_page(report: Report) -> Group:
    """The report for a terminal: a verdict, the problems, the notes, and the operators."""
    parts: list[RenderableType] = [Text(report.model, style="bold"), Text(_verdict(report)), Text("")]
    if report.problems:
        parts.append(Text(f"What stops the capture ({len(report.problems)})", style="bold"))
        parts += [Padding(_problem(problem), (0, 0, 0, 2)) for problem in report.problems]
        parts.append(Text(""))
    if report.notes:
        parts.append(Text("What will differ from one device", style="bold"))
        parts += [Padding(Text(note), (0, 0, 0, 2)) for note in report.notes]
        parts.append(Text(""))
    if report.operators:
        known = [one for one in report.operators if one.source != "replicated"]
        parts.append(_operator_table([*report.replicated, *known[:_ROWS]]))
        if known[_ROWS:]:
            rest = format_seconds(sum(one.seconds for one in known[_ROWS:]))
            parts.append(Text(f"and {len(known) - _ROWS} more operators with a rule, {rest} together"))
        parts += [Text(f"{one.name}: no sharding rule. {one.advice}") for one in report.replicated]
    return Group(*parts)


def _verdict(report: Report) -> str:
    lines = []
    if report.captured:
        lines.append("captured as one graph")
    elif report.operators:
        lines.append(f"not captured; on their own, {_patterns(report.parts)} were")
    else:
        lines.append("not captured, nor any part of it")
    if report.operators:
        known = sum(one.count for one in report.operators) - sum(one.count for one in report.replicated)
        total = sum(one.count for one in report.operators)
        borrowed = sum(one.count for one in report.operators if one.source == "borrowed")
        of_torch = f" ({borrowed} borrowed from torch)" if borrowed else ""
        lines.append(f"{known} of {total} operator calls have a sharding rule{of_torch}")
        lines.append(f"compute of a step on one device ({report.cluster}): {format_seconds(report.step_seconds)}")
    if report.replicated:
        lines.append(
            f"replicated on every device: {format_seconds(report.replicated_seconds)} of it "
            f"({100 * report.replicated_share:.2g} %), which more devices do not shorten"
        )
    return "\n".join(lines)


def _problem(problem: CaptureProblem) -> Text:
    text = Text(f"{problem.module or 'the root module'}: ", style="bold")
    text.append(problem.what, style="")
    if problem.where:
        text.append(f"\n    at {problem.where}", style="")
    if problem.advice:
        text.append(f"\n    {problem.advice}", style="")
    return text


def _operator_table(operators: Iterable[Operator]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("operator", "sharded by", "modules"):
        table.add_column(title, overflow="fold")
    for title in ("calls", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in operators:
        cells = (one.name, one.source, _patterns(one.modules), str(one.count), format_seconds(one.seconds))
        style = "bold" if one.source == "replicated" else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _patterns(modules: Iterable[str]) -> str:
    """Module paths with indices put together; the first few of them where there are many."""
    texts = [group.text or "(root)" for group in group_names(dict.fromkeys(modules))]
    more = f" and {len(texts) - _MODULES} more" if len(texts) > _MODULES else ""
    return ", ".join(texts[:_MODULES]) + more
