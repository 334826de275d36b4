"""docs/coverage.md says what the registry says."""

from __future__ import annotations

from collections import Counter

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.patterns.soundness.coverage import PAGE, Row, offer_text, page, problems, reason, rows, unmet_rules
from tests.patterns.soundness.peers import holds, is_covered, torch_offers
from tests.patterns.soundness.record import record
from tests.patterns.soundness.sweep import collect


def test_the_page_is_current() -> None:
    assert list(problems(PAGE.read_text(encoding="utf-8"))) == []


def test_a_page_that_is_not_current_is_found() -> None:
    text = page([Row("aten.mm.default", "none", 1), Row("aten.nonzero.default", "own", 1)], Counter())
    found = list(problems(text.replace("`aten.relu`, ", "").rstrip() + ", `aten.nothing`\n"))
    assert "aten.mm.default stands there with rule: none" in found
    assert "aten.nonzero.default stands there with rule: own" in found
    assert "aten.relu has a rule and is missing" in found
    assert "aten.nothing stands there and has no rule" in found
    assert len(found) == 4


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
    assert reason(Row("aten.mm.default", "own", 1)) == ""
    for text in ("`S(0) → R`", "`P(sum) → P(sum)`", "`P(sum), S(1), S(0) → P(sum)`"):
        reasons = [reason(Row("aten.mm.default", rule, 1, besides={text})) for rule in ("own", "none")]
        assert reasons[1] == "no rule"
        assert reasons[0] not in ("", "no rule")
    row = Row("aten.mm.default", "own", 7, 2, 30, {"`S(0) → R`"})
    assert f"| `aten.mm.default` | own | 7 (2) | 30 | `S(0) → R` | {reason(row)} |\n" in page([row], Counter())
