"""What a check found, on one rank and on all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Verdict = Literal["ok", "skipped", "slow", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("ok", "skipped", "slow", "wrong")
"""From the best to the worst."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What one check found.

    Attributes:
        verdict: `"ok"`; `"slow"`: right, but slower or larger than said; `"wrong"`; or `"skipped"`.
        figure: the number behind the verdict, or the reason, as text.
        advice: what to do about it; empty where there is nothing to do.
        values: the numbers in the figure, by name; seconds, bytes and relative differences.
        ratio: the worst of the numbers over what is allowed, where that can be said.
        failure: of a check that raised, how many ranks had failed before this one; else None.
    """

    verdict: Verdict
    figure: str
    advice: str = ""
    values: dict[str, float] = field(default_factory=dict)
    ratio: float = 0.0
    failure: int | None = None

    def to_json(self) -> str:
        """The outcome as text, for other ranks."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class CheckLine:
    """The outcome of a check on all ranks, the name of what was checked, and the seconds that it took."""

    name: str
    outcome: CheckOutcome
    seconds: float = 0.0


def worst_outcome(outcomes: Sequence[CheckOutcome]) -> CheckOutcome:
    """Return the outcome that stands for all ranks.

    A rank that failed may have left others waiting, which fail in turn: the first failure counts. Otherwise that is
    the worst verdict, and of equal verdicts the largest ratio. Of several ranks, a wrong one is named.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]

    def badness(rank: int) -> tuple[bool, int, float]:
        outcome = outcomes[rank]
        first = bool(failures) and outcome.failure == min(failures)
        return first, VERDICTS.index(outcome.verdict), outcome.ratio

    rank = max(range(len(outcomes)), key=badness)
    worst = outcomes[rank]
    figure = f"rank {rank}: {worst.figure}" if worst.verdict == "wrong" and len(outcomes) > 1 else worst.figure
    return CheckOutcome(worst.verdict, figure, worst.advice, worst.values, worst.ratio, worst.failure)
