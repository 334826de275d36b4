"""What users say of padding when they register a rule: taken at their word, and refused where it makes no sense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autoshard import register_rule
from autoshard.errors import RuleError
from autoshard.patterns import check
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.strategy import WHOLE, axis_choices

NAME = "autoshard_test_padding::greatest_norm"
X = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def greatest_norm() -> Iterator[Any]:
    """The greatest sum of squares of the rows of a matrix."""
    with torch.library._scoped_library("autoshard_test_padding", "DEF") as library:
        library.define("greatest_norm(Tensor x) -> Tensor")
        library.impl("greatest_norm", lambda x: x.square().sum(-1).amax(0), "CPU")
        yield torch.ops.autoshard_test_padding.greatest_norm.default


def squares(call: LocalCall) -> Any:
    """As the operator, the columns of other ranks included."""
    aten = torch.ops.aten
    rows = call.emit.call(aten.sum.dim_IntList, call.emit.call(aten.square.default, call.operands[0]), [1])
    return call.emit.call(aten.amax.default, call.all_reduce(rows, "d"), [0])


def offered(op: Any, size: int) -> tuple[int, ...]:
    rule = rule_for(call_of(op, (X,), {}, op(X)))
    assert rule is not None
    return axis_choices(rule, size)


def test_a_rule_is_split_evenly_until_it_says_what_replaces_padding(greatest_norm: Any) -> None:
    register_rule(NAME, "n d! -> ", reduce={"n": "max"}, replace=True)
    assert offered(greatest_norm, 4) == (WHOLE,)
    register_rule(NAME, "n d! -> ", reduce={"n": "max"}, fill={"n": 0}, replace=True)
    assert offered(greatest_norm, 4) == (WHOLE, 0)
    assert check(NAME, X) == []


def test_a_wrong_number_is_found_out(greatest_norm: Any) -> None:
    for wrong in (1e3, None):
        register_rule(NAME, "n d! -> ", reduce={"n": "max"}, fill={"n": wrong}, replace=True)
        findings = check(NAME, X)
        assert findings
        assert {finding.strategy.split()[0] for finding in findings} == {"n"}


def test_a_local_program_says_that_it_copes_with_padding(greatest_norm: Any) -> None:
    options: dict[str, Any] = {"reduce": {"n": "max", "d": None}, "local": squares, "replace": True}
    register_rule(NAME, "n d -> ", **options)
    assert offered(greatest_norm, 4) == (WHOLE,)
    register_rule(NAME, "n d -> ", fill={"n": 0, "d": 0}, **options)
    assert offered(greatest_norm, 4) == (WHOLE, 0, 1)
    assert check(NAME, X) == []


def test_none_is_split_unevenly_where_the_rule_forbids_it(greatest_norm: Any) -> None:
    register_rule(NAME, "n d! -> ", linear="0", uneven=False, replace=True)
    assert 0 not in offered(greatest_norm, 4)
    assert 0 in offered(greatest_norm, 7)
    register_rule(NAME, "n d! -> ", linear="0", replace=True)
    assert 0 in offered(greatest_norm, 4)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"uneven": ["n"], "reduce": {"n": "max"}}, 'uneven names "n", which a result lacks'),
        ({"uneven": ["n"]}, r'fill=\{"n": ...\}'),
        ({"uneven": "n"}, "is a text"),
        ({"uneven": ["m"]}, '"m", which does not occur'),
        ({"fill": {"d": 0}}, '"d", which ! says is never sharded'),
        ({"fill": {"n": "zero"}}, "give a number"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], problem: str, greatest_norm: Any) -> None:
    with pytest.raises(RuleError, match=problem):
        register_rule(NAME, "n d! -> ", replace=True, **options)


def test_names_that_zeros_do_not_change_may_be_listed(greatest_norm: Any) -> None:
    register_rule(NAME, "n d! -> ", linear="0", uneven=["n"], replace=True)
    assert 0 in offered(greatest_norm, 4)
