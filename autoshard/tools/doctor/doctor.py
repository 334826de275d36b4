"""`doctor`: examine if a model can be captured, and how its operators can be sharded, before anything is planned.

The report comes first, as data and as text; then the examination.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import AutoshardError, Cluster
from autoshard.capture.capture_errors import advice_for
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.python.fake_module import parameter_faults, uncopyable_attributes
from autoshard.capture.python.returned_objects import leaves_by_path
from autoshard.capture.survey import CallArguments, survey
from autoshard.errors import is_own_warning
from autoshard.names import group_names
from autoshard.planner.operator_calls import OperatorSurvey
from autoshard.report import HasReport, Note, Part, Report, Section, Table, names, numbers, texts
from autoshard.runtime.arguments import check_examples, check_module
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
class DoctorReport(HasReport):
    """The findings of `doctor`, which print as tables.

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

    def __repr__(self) -> str:
        operators = f"operators {len(self.operators)}, replicated {len(self.replicated)}"
        return f"DoctorReport({self.model}: {operators}, problems {len(self.problems)}; print it to see more)"

    def report(self) -> Report:
        """Return a verdict, the problems, the notes, and the operators."""
        problems = Section(f"What stops the capture ({len(self.problems)})", tuple(map(_problem_note, self.problems)))
        notes = Section("What will differ from one device", tuple(map(Note, self.notes)))
        operators = Section("Operators", tuple(_operator_parts(self)))
        return Report.of(self.model, (Note(_verdict(self)), problems, notes, operators))


def _verdict(report: DoctorReport) -> str:
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


def _problem_note(problem: CaptureProblem) -> Note:
    at = f"\n    at {problem.where}" if problem.where else ""
    advice = f"\n    {problem.advice}" if problem.advice else ""
    return Note(f"{problem.module or 'the root module'}: {problem.what}{at}{advice}")


def _operator_parts(report: DoctorReport) -> Iterator[Part]:
    """Yield the operators, those without a rule first and all, and what to do about these."""
    # Replicated ones are shown in full: each is something that a rule would improve.
    with_rule = [operator for operator in report.operators if operator.source != "replicated"]
    rows = [
        (
            operator.name,
            operator.source,
            _patterns(operator.modules),
            str(operator.count),
            format_seconds(operator.seconds),
        )
        for operator in (*report.replicated, *with_rule)
    ]
    others = with_rule[_ROWS:]
    seconds = format_seconds(sum(operator.seconds for operator in others))
    count = str(sum(operator.count for operator in others))
    rest = ("...", "", f"{len(others)} more with a rule", count, seconds) if others else ()
    if rows:
        columns = (*names("operator"), *texts("sharded by"), *names("modules"), *numbers("calls", "time"))
        yield Table.of(columns, rows, rest=rest, most=len(rows) - len(others))
    # Below the table, since advice is a sentence and would break its columns.
    yield from (Note(f"{operator.name}: no sharding rule. {operator.advice}") for operator in report.replicated)


def _patterns(modules: Iterable[str]) -> str:
    """Module paths with indices joined; the first few of them, and the number of the others."""
    # A deep model calls an operator in every layer: paths that differ in indices alone are one pattern.
    texts = [group.text or "(root)" for group in group_names(dict.fromkeys(modules))]
    more = f" and {len(texts) - _MODULES} more" if len(texts) > _MODULES else ""
    return ", ".join(texts[:_MODULES]) + more


# Warnings raised below it are notes.
_LIBRARY = f"{Path(__file__).parents[2]}{os.sep}"


def _is_note(entry: warnings.WarningMessage) -> bool:
    return is_own_warning(entry.message) or entry.filename.startswith(_LIBRARY)


def doctor(
    module: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster = "h100",
) -> DoctorReport:
    """Examine a model: find everything that stops its capture, and the source of the sharding of each operator.

    Where the model cannot be captured as a whole, a dry run on fake tensors finds all lines that ask for the numbers in
    a tensor, and the submodules that can be captured are examined on their own. Nothing is changed; no device and no
    process group is needed; the module may be on the meta device.

    Args:
        module: the model, in training or evaluation mode.
        example_args: positional arguments of a call, tensors of global shape.
        example_kwargs: keyword arguments of a call.
        cluster: for whose devices the seconds are predicted: a preset's name, a path of a cluster file, or a `Cluster`.

    Returns:
        The report. That a model cannot be captured is part of it, not an error.

    Raises:
        InputError: `module` is not a module, or the examples are not a tuple and a mapping.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    examination = _Examination(OperatorSurvey(Cluster.of(cluster)))
    examination.run(module, (args, kwargs))
    return examination.report(type(module).__name__)


@dataclass(slots=True)
class _OperatorCalls:
    """Sums over the calls of one operator."""

    count: int = 0
    seconds: float = 0.0
    advice: str = ""
    modules: dict[str, None] = field(default_factory=dict)


class _Examination:
    """The findings about one module, collected."""

    def __init__(self, prices: OperatorSurvey) -> None:
        self.prices = prices
        self.problems: dict[CaptureProblem, None] = {}
        self.notes: dict[str, None] = {}
        self.operators: dict[tuple[str, str], _OperatorCalls] = {}
        self.parts: list[str] = []

    def run(self, module: nn.Module, call: CallArguments) -> None:
        """Examine the module as a whole; where that fails, line by line and part by part."""
        self._add(*(CaptureProblem("", "", fault) for fault in parameter_faults(module)), *_input_problems(call))
        # With known problems, a capture of the whole would only fail at one of them.
        failure = None if self.problems else self._examine("", module, call)
        if self.parts:
            return
        self._add(*_copy_problems(module))
        try:
            lines = survey(module, *call)
        except AutoshardError:
            # Something that cannot be copied or has no shape, which is among the problems.
            if failure is not None and not self.problems:
                self._add(_problem("", failure))
            return
        for line in lines.findings:
            self._add(CaptureProblem(line.module, line.where, line.what, advice_for(line.what, line.where) or ""))
        # Parts that can be captured show their operators even if the whole cannot.
        self._examine_children("", module, lines.calls)
        if failure is not None and not self._is_reported(failure):
            self._add(_problem("", failure))

    def report(self, model: str) -> DoctorReport:
        """Return the findings, for a model of this class name."""
        operators = [
            Operator(name, source, calls.count, tuple(calls.modules), calls.seconds, calls.advice)
            for (name, source), calls in self.operators.items()
        ]
        # Replicated ones first: they are the reason to read the table.
        operators.sort(key=lambda operator: (operator.source != "replicated", -operator.seconds))
        cluster = self.prices.cluster.name
        return DoctorReport(
            model, cluster, tuple(self.problems), tuple(self.notes), tuple(operators), tuple(self.parts)
        )

    def _add(self, *problems: CaptureProblem) -> None:
        self.problems |= dict.fromkeys(problems)

    def _examine(self, path: str, module: nn.Module, call: CallArguments) -> AutoshardError | None:
        """Capture one module and count its operators; return the error if that fails."""
        try:
            with warnings.catch_warnings(record=True) as raised:
                # Python shows a warning once per place; here every one counts.
                warnings.simplefilter("always")
                graph = capture(module, *call, grad=torch.is_grad_enabled())
            self._count_operators(path, graph)
        except AutoshardError as error:
            return error
        self.notes |= {str(entry.message): None for entry in raised if _is_note(entry)}
        self.parts.append(path)
        return None

    def _examine_children(self, path: str, module: nn.Module, calls: Mapping[str, CallArguments]) -> None:
        """Capture the children one by one, and the children of those that cannot be captured."""
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            fits = inner in calls and not any(_input_problems(calls[inner]))
            failure = self._examine(inner, child, calls[inner]) if fits else None
            # A child that was captured needs no look inside.
            if inner not in self.parts:
                self._examine_children(inner, child, calls)
            if failure is not None and not self._is_reported(failure):
                self._add(_problem(inner, failure))

    def _is_reported(self, failure: AutoshardError) -> bool:
        """Return True if a known problem is at the line that the error names, or has the same text."""
        text = str(failure)
        reason = text.partition(" could not be captured as one graph")[2] or text
        return any(
            (bool(problem.where) and problem.where.partition(" (")[2].removesuffix(")") in text)
            or reason in problem.what
            or problem.what.rstrip(".") in text
            for problem in self.problems
        )

    def _count_operators(self, path: str, graph: JointGraph) -> None:
        """Count the operators of one graph and price them; seconds are those of one device."""
        for call in self.prices.calls(graph):
            calls = self.operators.setdefault((call.name, call.source), _OperatorCalls())
            calls.count += 1
            calls.advice = calls.advice or call.advice
            calls.seconds += call.seconds
            calls.modules[".".join(filter(None, (path, call.module)))] = None


def _input_problems(call: CallArguments) -> Iterator[CaptureProblem]:
    """Yield arguments of types that no graph can take."""
    for path, leaf in leaves_by_path(call):
        if leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str)):
            continue
        # The first key says which of the two arguments of `doctor` holds the leaf.
        name = ("example_args", "example_kwargs")[path[0].idx] + pytree.keystr(path[1:])
        what = f"Unsupported input type: {name} is a {type(leaf).__name__}"
        yield CaptureProblem("", "", what, advice_for(what) or "")


def _copy_problems(module: nn.Module) -> Iterator[CaptureProblem]:
    """Yield attributes that `copy.deepcopy` refuses; capture works on a copy on fake tensors."""
    for path, name, value in uncopyable_attributes(module):
        what = f"the attribute {name} ({type(value).__name__}) cannot be copied"
        yield CaptureProblem(path, "", what, "Keep it out of the module: capture works on a copy without numbers.")


def _problem(path: str, failure: AutoshardError) -> CaptureProblem:
    return CaptureProblem(path, "", str(failure))
