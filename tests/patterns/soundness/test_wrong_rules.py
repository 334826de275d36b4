"""The checker names every mistake that was put into a rule on purpose, and passes the rule without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autoshard.patterns.registry import register_rule
from autoshard.patterns.soundness import check
from tests.patterns.soundness.wrong_rules import WRONG_RULES

NAMESPACE = "autoshard_test_wrong"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        yield library


def _defined(library: torch.library.Library, function: Callable[..., Any], schema: str, *tags: torch.Tag) -> str:
    """The name of a new operator that computes `function`."""
    name = f"op{next(_numbers)}"
    library.define(f"{name}{schema}", tags=tags)
    library.impl(name, function, "CPU")
    return f"{NAMESPACE}::{name}"


_numbers = iter(range(10**6))


@pytest.mark.parametrize("mistake", WRONG_RULES)
def test_a_mistake_is_named_and_its_correction_passes(library: torch.library.Library, mistake: str) -> None:
    case = WRONG_RULES[mistake]
    name = _defined(library, case.function, case.schema)
    register_rule(name, case.wrong, **case.wrong_options)
    findings = check(name, case.args)
    named = [finding for finding in findings if finding.strategy == case.strategy]
    assert named, f"{case.strategy} is not among {sorted({finding.strategy for finding in findings})}"
    assert any(case.problem in finding.problem for finding in named), str(named[0])
    register_rule(name, case.right, replace=True, **case.right_options)
    assert check(name, case.args) == []


def test_there_are_many_mistakes() -> None:
    assert len(WRONG_RULES) >= 20
