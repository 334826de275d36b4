"""docs/coverage.md says what the registry says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.patterns.soundness.coverage import (
    PAGE,
    REASONS,
    UNEXPLAINED,
    Row,
    offer_text,
    page,
    problems,
    reason,
    rows,
    unmet_rules,
)
from tests.patterns.soundness.peers import holds, is_covered, torch_offers
from tests.patterns.soundness.record import record
from tests.patterns.soundness.sweep import collect


def test_the_page_is_current() -> None:
    """In a process of its own: other tests register rules."""
    command = [sys.executable, "-m", "tests.patterns.soundness.coverage", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PAGE.parent.parent)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_page_that_is_not_current_is_found() -> None:
    text = page([Row("aten.mm.default", "none", 1), Row("aten.nonzero.default", "own", 1)], Counter())
    found = list(problems(text.replace("`aten.relu`, ", "").rstrip() + ", `aten.nothing`\n"))
    assert "aten.mm.default stands there with rule: none" in found
    assert "aten.nonzero.default stands there with rule: own" in found
    assert "aten.relu has a rule and is missing" in found
    assert "aten.nothing stands there and has no rule" in found
    assert len([problem for problem in found if "reason" not in problem]) == 4


def test_unmet_rules_are_those_of_other_operators() -> None:
    assert "aten.relu" in unmet_rules(["aten.mm.default"])
    assert "aten.mm" not in unmet_rules(["aten.mm.default"])


def test_strategies_of_torch_are_compared_with_ours() -> None:
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    (call,) = record(torch.mm, (a, b), {}, "sample")
    contracted = ((Shard(1), Shard(0)), (Partial(),))
    offered = torch_offers(call, 2)
    assert contracted in offered
    assert offer_text(contracted) == "`S(1), S(0) → P(sum)`"
    assert holds(call, contracted, 2)
    assert not holds(call, ((Shard(1), Shard(0)), (Replicate(),)), 2)
    assert is_covered(contracted, {((Shard(1), Shard(0)), (Replicate(),))})
    assert not is_covered(((Shard(1), Shard(0)), (Replicate(),)), {contracted})
    (row,) = rows(collect([call], 2), Counter())
    assert (row.rule, row.calls, row.checked, row.besides, row.unsound) == ("own", 1, 1, set(), [])
    assert row.strategies > 10


def test_every_gap_has_a_reason() -> None:
    besides = {"`S(0) → R`"}
    assert reason(Row("aten.mm.default", "own", 1)) == ""
    assert reason(Row("aten.mm.default", "none", 1, besides=besides)) == "no rule"
    assert reason(Row("aten.addmm.default", "own", 1, besides=besides)) == REASONS["aten.addmm.default"]
    row = Row("aten.mm.default", "own", 7, 2, 30, besides)
    text = page([row], Counter())
    assert f"| `aten.mm.default` | own | 7 (2) | 30 | `S(0) → R` | {UNEXPLAINED} |\n" in text
    found = list(problems(text))
    assert "aten.mm.default needs a reason why it does not offer what torch does" in found
    assert "aten.addmm.default has a reason and nothing to explain" in found


def test_borrowed_rules_stand_there_as_such() -> None:
    args = (torch.randn(4, 6, dtype=torch.float64), 3.0, [1])
    (call,) = record(torch.ops.aten.linalg__powsum.default, args, {}, "sample")
    (row,) = rows(collect([call], 2), Counter())
    assert (row.rule, row.checked, row.unsound) == ("borrowed", 1, [])
    (nothing,) = rows(collect(record(torch.equal, (args[0], args[0]), {}, "sample"), 2), Counter())
    assert nothing.rule == "none"
    text = page(
        [row, nothing, Row("aten.mm.default", "borrowed", 1), Row("aten.linalg__powsum.default", "own", 1)], Counter()
    )
    assert "1 with one borrowed from torch" not in text
    stated = {problem for problem in problems(text) if "stands there with" in problem}
    assert stated == {
        "aten.mm.default stands there with rule: borrowed",
        "aten.linalg__powsum.default stands there with rule: own",
    }
