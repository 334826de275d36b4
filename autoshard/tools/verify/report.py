"""The report of `verify`, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard import ShardingPlan, VerifyError
from autoshard.patterns import Finding
from autoshard.report import HasReport, Note, Part, Report, Section, Table, numbers, texts

TOLERANCE = 1e-9
"""The relative difference up to which two numbers in float64 count as equal: rounding explains it."""

KINDS = ("loss", "output", "gradient", "parameter", "buffer")
# Differences and operators that the text lists.
_ROWS = 20
# Strategies of wrong rules: one rule is wrong in many.
_FINDINGS = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one tensor on the ranks of a mesh to that on one device.

    Attributes:
        kind: `"loss"` (a scalar that is differentiated), `"output"`, `"gradient"`, `"parameter"` or `"buffer"`.
        name: of the output, parameter or buffer; for a gradient, of its parameter or input.
        relative: the largest over ranks and steps, relative to the largest number of the tensor, or to a thousandth of
            the largest number among the tensors of its kind, if that is more. Infinite if shapes differ, or a number
            is not finite on one side only.
    """

    kind: str
    name: str
    relative: float


@dataclass(frozen=True, slots=True)
class OperatorFault:
    """An operator that computes something else on the shards of the plan, given the operands of one device.

    Attributes:
        op: its name, such as `"aten.mm.default"`.
        module: path of the module that calls it; `""` for the root.
        strategy: the strategy of the plan, such as `"i on dp"`.
        problem: the difference, as text.
        of_user: True if its rule was registered by `autoshard.register_rule`.
    """

    op: str
    module: str
    strategy: str
    problem: str
    of_user: bool

    def __str__(self) -> str:
        rule = ", whose rule was registered by register_rule," if self.of_user else ""
        return f"{self.op} in {self.module or 'the root module'}{rule} with {self.strategy}: {self.problem}"


@dataclass(frozen=True, slots=True)
class VerifyReport(HasReport):
    """The findings of `verify`; `str(report)` is a page of tables.

    Attributes:
        model: class of the module.
        plan: the plan whose programs ran.
        steps: training steps.
        differences: one for every output, gradient, parameter and buffer, by kind, the largest first; empty if the
            programs could not run.
        operators: the operators that differ on the shards of the plan. They are looked for if a tensor differs or the
            programs could not run.
        rules: the strategies of rules of the user that `autoshard.patterns.check` refuses, of the plan or not.
        failure: the error for which the programs could not be made or run; empty if they ran.
        notes: what else explains a difference.
        split: how many operators the plan splits.
        operators_total: how many operators the step has.
        collectives: how many collectives a step of the programs runs; 0 if they could not be made.
    """

    model: str
    plan: ShardingPlan
    steps: int
    differences: tuple[Difference, ...]
    operators: tuple[OperatorFault, ...] = ()
    rules: tuple[Finding, ...] = ()
    failure: str = ""
    notes: tuple[str, ...] = ()
    split: int = 0
    operators_total: int = 0
    collectives: int = 0

    @property
    def ok(self) -> bool:
        """True if the programs ran and split something, nothing differs by more than 1e-9, and no rule is wrong."""
        return self.proves and not (self.failure or self.wrong or self.operators or self.rules)

    @property
    def proves(self) -> bool:
        """True if an operator was split or a collective ran; else every rank did what one device does."""
        return bool(self.split or self.collectives)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences above 1e-9 relative."""
        return tuple(difference for difference in self.differences if difference.relative > TOLERANCE)

    @property
    def largest(self) -> dict[str, float]:
        """The largest difference of every kind that the module has."""
        largest: dict[str, float] = {}
        for difference in self.differences:
            largest[difference.kind] = max(difference.relative, largest.get(difference.kind, 0.0))
        return largest

    def raise_if_wrong(self) -> None:
        """Raise a `VerifyError` with the text of the report unless `ok`."""
        if not self.ok:
            raise VerifyError(str(self))

    def report(self) -> Report:
        """Return a verdict, the differences by kind, and everything that is wrong."""
        differs: list[Part] = [_difference_table(self.wrong[:_ROWS]), *_more(self.wrong)] if self.wrong else []
        operators = [*(Note(str(fault)) for fault in self.operators[:_ROWS]), *_more(self.operators)]
        rules = [*(Note(str(finding)) for finding in self.rules[:_FINDINGS]), *_more(self.rules, _FINDINGS)]
        parts: list[Part] = [
            Note(_verdict(self)),
            Note(_coverage(self)),
            *([_kind_table(self)] if self.differences else []),
            Section("What differs", tuple(differs)),
            Section("Operators that compute something else on shards", tuple(operators)),
            Section("Rules of register_rule that are wrong (autoshard.patterns.check)", tuple(rules)),
        ]
        if (self.wrong or self.failure) and not (self.operators or self.rules):
            parts.append(
                Note(
                    "Every operator alone computes on shards what it computes on one device. The difference arises "
                    "between operators: please report it, with the plan."
                )
            )
        return Report.of(self.model, (*parts, *map(Note, self.notes)))


def _verdict(report: VerifyReport) -> str:
    ranks = f"{report.plan.mesh} ({report.plan.mesh.size} ranks)"
    if report.failure:
        return f"the programs on {ranks} could not run: {report.failure}"
    steps = f"{report.steps} training step{'s' if report.steps != 1 else ''} in float64"
    several = report.steps != 1
    if report.wrong:
        return f"{steps} on {ranks} {'differ' if several else 'differs'} from one device"
    rule = "; a rule is wrong, which may show on other meshes or plans" if report.rules else ""
    return f"{steps} on {ranks} {'equal' if several else 'equals'} one device{rule}"


def _coverage(report: VerifyReport) -> str:
    """Return what the comparison says something about."""
    if report.proves or report.failure:
        return (
            f"{report.split} of {report.operators_total} operators split, {report.collectives} collectives in every "
            f"step; the plan: {report.plan.method}"
        )
    return (
        "No operator was split and no collective ran, so that nothing was proved: every rank did what one device does. "
        "Pass a mesh of several ranks whose sizes divide those of the model, or a plan that shards something."
    )


def _kind_table(report: VerifyReport) -> Table:
    rows = []
    for kind in KINDS:
        differences = [difference for difference in report.differences if difference.kind == kind]
        if differences:
            worst = differences[0]
            rows.append((kind, str(len(differences)), f"{worst.relative:.1e}", worst.name))
    return Table.of((*texts("compared"), *numbers("tensors", "largest difference"), *texts("of")), rows)


def _difference_table(differences: Iterable[Difference]) -> Table:
    rows = ((difference.kind, difference.name, f"{difference.relative:.1e}") for difference in differences)
    return Table.of((*texts("kind", "name"), *numbers("difference")), rows)


def _more(findings: Sequence[object], shown: int = _ROWS) -> list[Note]:
    return [Note(f"and {len(findings) - shown} more")] if len(findings) > shown else []
