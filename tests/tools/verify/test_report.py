"""The report of `verify` as text."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import VerifyError
from autoshard.tools.verify.report import Difference, OperatorFault, VerifyReport


@functools.cache
def _plan() -> autoshard.ShardingPlan:
    plan = autoshard.plan(nn.Linear(8, 8), {"x": 2}, (torch.randn(4, 8),))
    assert isinstance(plan, autoshard.ShardingPlan)
    return plan


def _report(*differences: Difference, **fields: object) -> VerifyReport:
    counts = {"split": 3, "operators_total": 5, "collectives": 2}
    return VerifyReport("Model", _plan(), 1, differences, **counts | fields)  # type: ignore[arg-type]


def test_a_difference_that_no_operator_explains_is_to_be_reported() -> None:
    report = _report(Difference("gradient", "weight", 1e-3), Difference("gradient", "bias", 1e-9))
    assert [difference.name for difference in report.wrong] == ["weight"]
    assert report.largest == {"gradient": 1e-3}
    text = " ".join(str(report).split())
    assert "1 training step in float64 on x=2 (2 ranks) differs from one device" in text
    assert "please report it" in text
    with pytest.raises(VerifyError, match="weight"):
        report.raise_if_wrong()


def test_programs_that_could_not_run() -> None:
    fault = OperatorFault("mylib.op.default", "layers.0", "i on x", "shapes differ", of_user=True)
    report = _report(operators=(fault,), failure="RuntimeError: sizes do not match")
    assert not report.ok
    text = " ".join(str(report).split())
    assert "could not run: RuntimeError: sizes do not match" in text
    assert "mylib.op.default in layers.0, whose rule was registered by register_rule, with i on x" in text
    assert "please report" not in text


def test_names_are_no_markup_and_long_lists_end() -> None:
    report = _report(*(Difference("output", f"output[{place}]", 1.0) for place in range(30)))
    assert "output[0]" in str(report)
    assert "and 10 more" in str(report)
    assert "output[25]" not in str(report)
