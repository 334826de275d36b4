"""Dynamic sizes: whatever is computed with them is, at other sizes, what would have been computed with those."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.size import (
    DynamicSize,
    Ratio,
    at,
    ceil_div,
    common_divisor,
    divides,
    evaluate,
    is_dynamic,
    plain,
    symbol,
)

BATCH, SEQUENCE = symbol("batch"), symbol("sequence")
EXAMPLE = {BATCH: 6, SEQUENCE: 10}

Compute = Callable[[int, int], int]
OPERATIONS: dict[str, Compute] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "ceil": ceil_div,
    "ceil by hand": lambda a, b: -(-a // b),
}


@dataclass(frozen=True)
class Call:
    """A computation as a tree: a name, a number, or an operation on two trees."""

    operation: str
    operands: tuple[Any, ...]

    def run(self, batch: int, sequence: int) -> int:
        if self.operation == "number":
            return int(self.operands[0])
        if self.operation == "batch":
            return batch
        if self.operation == "sequence":
            return sequence
        left, right = (operand.run(batch, sequence) for operand in self.operands)
        return OPERATIONS[self.operation](left, right)


LEAVES = st.sampled_from([Call("batch", ()), Call("sequence", ())]) | st.integers(1, 8).map(
    lambda n: Call("number", (n,))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda name, left, right: Call(name, (left, right)), st.sampled_from(sorted(OPERATIONS)), inner, inner
    ),
    max_leaves=6,
)


def sizes() -> tuple[int, int]:
    return DynamicSize.of(BATCH, EXAMPLE), DynamicSize.of(SEQUENCE, EXAMPLE)


@given(TREES, st.integers(2, 40), st.integers(2, 40))
def test_what_is_computed_with_sizes_holds_at_others(tree: Call, batch: int, sequence: int) -> None:
    try:
        result, expected, elsewhere = tree.run(*sizes()), tree.run(6, 10), tree.run(batch, sequence)
    except ZeroDivisionError:
        assume(False)
    assert result == expected
    assert at((result,), {BATCH: batch, SEQUENCE: sequence}) == (elsewhere,)


def test_a_size_is_the_number_that_it_is_in_the_example_with_a_hash_of_its_own() -> None:
    batch, sequence = sizes()
    assert batch == 6
    assert isinstance(batch, int)
    assert f"{batch}" == "6"
    assert batch + 4 == sequence
    assert {batch + 4: "from the batch"}.get(sequence) is None
    assert hash(batch * 2) == hash(2 * batch)


def test_what_does_not_depend_on_sizes_is_a_plain_number() -> None:
    batch, _ = sizes()
    assert type(batch * 4 // batch) is int
    assert type(batch - batch) is int
    assert not is_dynamic(batch // batch)


def test_quotients_are_exact_at_other_sizes() -> None:
    batch, sequence = sizes()
    mean = 1 / (batch * sequence)
    assert isinstance(mean, Ratio)
    assert mean == 1 / 60
    assert at(mean, {BATCH: 7, SEQUENCE: 3}) == 1 / 21
    assert at(2.5 * (batch / sequence), {BATCH: 7, SEQUENCE: 2}) == 8.75
    assert at(batch * 0.5, {BATCH: 7}) == 3.5


@pytest.mark.parametrize(
    ("multiple", "divisor", "expected"), [(1, 2, False), (8, 2, True), (8, 16, False), (3, 3, True)]
)
def test_a_divisor_divides_at_all_sizes_or_is_none(multiple: int, divisor: int, expected: bool) -> None:
    assert divides(divisor, DynamicSize.of(multiple * BATCH, EXAMPLE)) is expected


def test_zero_is_no_multiple() -> None:
    assert not divides(2, 0)


def test_common_divisors_divide_at_all_sizes() -> None:
    batch, sequence = sizes()
    assert common_divisor(12, 8) == 4
    shared = common_divisor(batch * sequence * 4, batch * 6)
    assert at(shared, {BATCH: 5, SEQUENCE: 7}) == 10
    assert common_divisor(batch, sequence) == 1


def test_sizes_are_copied_and_pickled_with_their_expressions() -> None:
    batch, sequence = sizes()
    for number in (ceil_div(batch * sequence, 4), batch / sequence):
        for copied in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
            assert copied == number
            assert copied.expr == number.expr


def test_taking_elsewhere_reaches_into_tuples_lists_and_dataclasses_and_leaves_the_rest() -> None:
    batch, _ = sizes()
    tree = Call("number", (batch, [batch * 2, "x"], 3.0))
    assert at(tree, {BATCH: 9}) == Call("number", (9, [18, "x"], 3.0))
    same = Call("number", (1, [2], "x"))
    assert at(same, {BATCH: 9}) is same
    assert at(tree, {}) is tree


def test_plain_and_evaluated_numbers() -> None:
    batch, sequence = sizes()
    assert type(plain(batch)) is int
    assert type(plain(batch / sequence)) is float
    assert evaluate((batch * sequence).expr, {BATCH: 2, SEQUENCE: 5}) == 10
