"""The report of `doctor`, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.names import group_names
from autoshard.plans.plan_text import WIDTH, plain
from autoshard.units import format_seconds

# Module patterns in a row of operators.
_MODULES = 3
# Operators with a rule that are shown, those that take most time.
_ROWS = 20


@dataclass(frozen=True, slots=True)
class CaptureProblem:
    """A cause for which the model cannot be captured.

    Attributes:
        module: path of its module, `""` for the root.
        where: line of the user's code, `model.py:12 (if x.sum() > 0:)`; empty where it is not known.
        what: the problem, as text.
        advice: for the user; empty where `what` contains it, or there is none.
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
        source: of its strategies: `"rule"`, a sharding rule of the library or of the user; `"borrowed"`, torch's own
            registry: DTensor's strategies or those of `register_sharding`; `"replicated"`, neither, so that every
            device does all of its work.
        count: calls in one step, forward and backward.
        modules: paths of the modules that call it, `""` for the root, each once.
        seconds: predicted time of all its calls on one device.
        advice: for the user, if it is replicated.
    """

    name: str
    source: str
    count: int
    modules: tuple[str, ...]
    seconds: float
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of `doctor`; `str(report)` is a page of tables.

    Attributes:
        model: class of the module.
        cluster: name of the cluster for which seconds are predicted.
        problems: causes for which the model cannot be captured; empty if it was captured.
        notes: differences of the parallelised model from the one on one device, though it runs.
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
        """True if the whole model was captured as one graph."""
        return not self.problems

    @property
    def healthy(self) -> bool:
        """True if the whole model was captured, and every operator has a rule."""
        return self.captured and not self.replicated

    @property
    def replicated(self) -> tuple[Operator, ...]:
        """The operators without a rule."""
        return tuple(operator for operator in self.operators if operator.source == "replicated")

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of compute of one step on one device, of all captured parts."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def replicated_seconds(self) -> float:
        """The part of `step_seconds` that more devices do not shorten, for want of rules."""
        return sum(operator.seconds for operator in self.replicated)

    @property
    def replicated_share(self) -> float:
        """`replicated_seconds` over `step_seconds`: the share of the step that remains with any number of devices."""
        return self.replicated_seconds / self.step_seconds if self.step_seconds else 0.0

    def __str__(self) -> str:
        return plain([report_page(self)], WIDTH)


def report_page(report: Report) -> Group:
    """Return the report for a terminal: a verdict, the problems, the notes, and the operators."""
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
        # Replicated ones are shown in full: each is something that a rule would improve.
        with_rule = [operator for operator in report.operators if operator.source != "replicated"]
        parts.append(_operator_table([*report.replicated, *with_rule[:_ROWS]]))
        if with_rule[_ROWS:]:
            omitted_seconds = format_seconds(sum(operator.seconds for operator in with_rule[_ROWS:]))
            parts.append(Text(f"and {len(with_rule) - _ROWS} more operators with a rule, {omitted_seconds} together"))
        # Below the table, since advice is a sentence and would break its columns.
        parts += [Text(f"{operator.name}: no sharding rule. {operator.advice}") for operator in report.replicated]
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
        total = sum(operator.count for operator in report.operators)
        # Calls, not kinds of operators: one without a rule may be called in every layer.
        with_rule = total - sum(operator.count for operator in report.replicated)
        borrowed = sum(operator.count for operator in report.operators if operator.source == "borrowed")
        of_torch = f" ({borrowed} borrowed from torch)" if borrowed else ""
        lines.append(f"{with_rule} of {total} operator calls have a sharding rule{of_torch}")
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
    for operator in operators:
        modules = _patterns(operator.modules)
        cells = (operator.name, operator.source, modules, str(operator.count), format_seconds(operator.seconds))
        style = "bold" if operator.source == "replicated" else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _patterns(modules: Iterable[str]) -> str:
    """Module paths with indices joined; the first few of them, and the number of the others."""
    # A deep model calls an operator in every layer: paths that differ in indices alone are one pattern.
    texts = [group.text or "(root)" for group in group_names(dict.fromkeys(modules))]
    more = f" and {len(texts) - _MODULES} more" if len(texts) > _MODULES else ""
    return ", ".join(texts[:_MODULES]) + more
