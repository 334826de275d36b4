"""`Alternative`: the answer to why a plan lacks an expected property."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from autoshard.errors import PlanError
from autoshard.plans.expenses import HasExpenses
from autoshard.plans.plan_difference import PlanDifference
from autoshard.report import HasReport, Note, Report
from autoshard.units import format_bytes

Plan = TypeVar("Plan", bound=HasExpenses)
Verdict = Literal["same", "possible", "too large", "impossible"]

_EQUAL = 1e-9  # relative difference below which two steps count as equal


def forgotten_error() -> PlanError:
    """Return the error of a plan that is asked `why_not`, but does not remember how it was made."""
    return PlanError(
        "this plan does not remember how it was made, as one that autoshard.plan returns does: ask "
        "autoshard.why_not(plan, asked, model, example_args, example_kwargs)."
    )


class Replans(Protocol):
    """Answers `ShardingPlan.why_not`."""

    def __call__(self, plan: Any, asked: Mapping[str, Any]) -> Alternative[Any]:
        """Return the best plan with the requested properties."""

    def within(self, memory_limit: int | None) -> Replans:
        """Return the same with another memory limit in bytes."""


@dataclass(frozen=True)
class Alternative(HasReport, Generic[Plan]):
    """The best plan with a requested property, compared to the plan without the request; prints as an answer.

    Attributes:
        verdict: `"same"`: the plan already has it; `"possible"`: another plan has it; `"too large"`: no plan with it
            fits the memory limit; `"impossible"`: no plan can have it.
        sentence: the answer.
        plan: the best plan that has it; None if there is none.
        difference: the differences of predicted seconds and bytes from the questioned plan to `plan`; None without one.
    """

    verdict: Verdict
    sentence: str
    plan: Plan | None = None
    difference: PlanDifference | None = None

    @staticmethod
    def same(plan: Plan) -> Alternative[Plan]:
        """Return the answer for a plan that already has the requested property."""
        return Alternative("same", "The plan has it already.", plan, PlanDifference.of(plan, plan))

    @staticmethod
    def possible(plan: Plan, other: Plan) -> Alternative[Plan]:
        """Return the answer with another plan that has the requested property."""
        difference = PlanDifference.of(plan, other)
        head = "It is possible"
        before, after = difference.before, difference.after
        if difference.seconds < -_EQUAL * before.step_seconds:
            head += ", and faster"
        # Without a limit, plans may need more memory than a device has.
        if not other.fits:
            head += f", but peaks at {format_bytes(after.peak)} of {format_bytes(after.capacity)}"
        return Alternative("possible", f"{head}: {difference.summary()}.", other, difference)

    @staticmethod
    def too_large(limit: int, peak: int | None) -> Alternative[Plan]:
        """Return the answer if no plan fits, given the memory limit and the smallest known peak in bytes."""
        found = "" if peak is None else f": the smallest peak that was found is {format_bytes(peak)}"
        return Alternative("too large", f"No plan that has this fits in {format_bytes(limit)}{found}.")

    @staticmethod
    def impossible(reason: str) -> Alternative[Plan]:
        """Return the answer if no plan can have the requested property."""
        return Alternative("impossible", f"It cannot be: {reason}")

    def report(self) -> Report:
        """Return the sentence, and the tables of the difference, if any."""
        if self.verdict != "possible" or self.difference is None:
            return Report.of("", (Note(self.sentence),))
        return Report.of("", (Note(self.sentence), *self.difference.report().parts))
