"""The notation of rules: parsing, binding to shapes, and errors that quote the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.patterns.notation import bind, parse
from autoshard.patterns.registry import call_of
from autoshard.patterns.rule import OpCall, Rule

aten = torch.ops.aten


def _call(results: Any, *shapes: tuple[int, ...]) -> OpCall:
    """A call on tensors of these shapes; the operator does not matter to the notation."""
    operands = [torch.empty(shape, device="meta") for shape in shapes]
    outputs = [None if shape is None else torch.empty(shape, device="meta") for shape in results]
    return call_of(aten.cat.default, [operands], {}, outputs)


def _sizes(rule: Rule) -> dict[str, int]:
    return {factor.name: factor.size for factor in rule.factors}


def test_names_become_factors() -> None:
    rule = bind("i k, k j -> i j", _call([(2, 5)], (2, 3), (3, 5)))
    assert _sizes(rule) == {"i": 2, "k": 3, "j": 5}
    assert rule.operands == (((0,), (1,)), ((1,), (2,)))
    assert rule.results == (((0,), (2,)),)


def test_text_is_parsed_once() -> None:
    assert parse("i j -> j i") is parse("i j -> j i")


def test_marks() -> None:
    rule = bind("v^ d!, ... -> ... d", _call([(4, 3)], (7, 3), (4,)))
    marks = {factor.name: (factor.shardable, factor.contiguous) for factor in rule.factors}
    assert marks == {"v": (True, True), "d": (False, False), "dim0": (True, False)}


def test_both_marks_on_one_name() -> None:
    parsed = parse("v^! -> v")
    assert (parsed.whole, parsed.contiguous) == (frozenset("v"), frozenset("v"))


def test_ellipses_are_aligned_to_the_right_and_broadcast() -> None:
    rule = bind("..., ... -> ...", _call([(2, 3, 4)], (2, 1, 4), (3, 1)))
    assert _sizes(rule) == {"dim0": 2, "dim1": 3, "dim2": 4}
    assert rule.operands == (((0,), (), (2,)), ((1,), ()))


def test_ellipsis_in_the_middle_and_whole() -> None:
    rule = bind("b ...! c -> c ... b", _call([(5, 3, 4, 2)], (2, 3, 4, 5)))
    assert {factor.name for factor in rule.factors if factor.shardable} == {"b", "c"}
    assert rule.results == ((*rule.operands[0][3:], *rule.operands[0][1:3], *rule.operands[0][:1]),)


def test_products_are_split_by_the_other_occurrences() -> None:
    rule = bind("b (h d), h -> b h d", _call([(2, 3, 4)], (2, 12), (3,)))
    assert rule.operands[0] == ((0,), (1, 2))
    assert _sizes(rule) == {"b": 2, "h": 3, "d": 4}


def test_sizes_of_products_may_be_passed() -> None:
    rule = bind("(g h) -> (g h)", _call([(12,)], (12,)), sizes={"g": 3})
    assert _sizes(rule) == {"g": 3, "h": 4}


def test_dims_of_size_one_have_no_factor() -> None:
    rule = bind("i 1, j -> i j", _call([(4, 1)], (4, 1), (1,)))
    assert _sizes(rule) == {"i": 4}
    assert rule.results == (((0,), ()),)
    assert rule.indices("j") == ()


def test_a_scalar_is_an_empty_item_and_no_operand_is_one_too() -> None:
    assert bind("i, -> i", _call([(4,)], (4,), ())).operands == (((0,),), ())
    empty = call_of(aten.zeros.default, [[4]], {}, torch.empty(4, device="meta"))
    assert bind(" -> i", empty).operands == ()


def test_results_that_are_no_tensors() -> None:
    assert bind("i -> i, i", _call([(4,), None], (4,))).results == (((0,),), None)


def test_options() -> None:
    rule = bind(
        "i k -> i, k",
        _call([(4,), (3,)], (4, 3)),
        linear="0",
        reduce={"k": "max", "i": (None, "sum")},
        whole={"k"},
        contiguous={"i"},
        exchange={"i": 32},
        free=True,
    )
    i, k = rule.factors
    assert (i.reductions, k.reductions) == ((None, "sum"), ("max", "max"))
    assert (i.contiguous, k.contiguous, i.shardable, k.shardable) == (True, False, True, False)
    assert (i.exchanges, rule.linear, rule.free) == ((("all_reduce", 32),), (frozenset({0}),), True)


def test_options_of_an_ellipsis_hold_for_all_its_dims() -> None:
    rule = bind("... d -> d", _call([(4,)], (2, 3, 4)), reduce={"...": "max"}, whole={"..."})
    assert [(factor.reduction(0), factor.shardable) for factor in rule.factors[:2]] == [("max", False)] * 2


@pytest.mark.parametrize("linear", ["0, 1+2", [{0}, {1, 2}], ((0,), (1, 2))])
def test_linear_sets_in_all_spellings(linear: Any) -> None:
    rule = bind("..., ..., ... -> ...", _call([(2,)], (2,), (2,), (2,)), linear=linear)
    assert rule.linear == (frozenset({0}), frozenset({1, 2}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i k", 'has no "->"'),
        ("i -> j -> k", 'second "->" at position 7'),
        ("i k, k$ j -> i", 'unexpected "$" at position 6'),
        ("i 10 -> i", 'unexpected "10" at position 2'),
        ("(i -> j", '"(" at position 0 is never closed'),
        ("i, j) -> j", '")" at position 4 closes nothing'),
        ("() -> j", '")" at position 1 closes an empty product'),
        ("(i (j)) -> i", '"(" at position 3 stands inside another product'),
        ("(... i) -> i", '"..." at position 1 can not be part of a product'),
        ("i i -> i", '"i" at position 2 stands twice'),
        ("... ... -> i", '"..." at position 4 stands twice'),
        ("i -> dim0", '"dim0" at position 5 is what the dims of ... are called'),
    ],
)
def test_text_that_does_not_parse(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(text)
    assert message in str(error.value)
    assert f'"{text}"' in str(error.value)


@pytest.mark.parametrize(
    ("text", "shapes", "result", "message"),
    [
        ("i k, k j -> i j", [(2, 3), (4, 5)], (2, 5), '"k" is 3 in one place and 4 in another'),
        ("i -> i", [(2, 3)], (2,), "operand 0 has 1 named dims there, but shape [2, 3] here"),
        ("i ... j -> i", [(2,)], (2,), "operand 0 has 2 named dims there, but shape [2] here"),
        ("i, j -> i", [(2,)], (2,), "it has 2 operands, the call 1"),
        ("i -> i, i", [(2,)], (2,), "it has 2 results, the call 1"),
        ("i 1 -> i", [(2, 3)], (2,), "operand 0 has a 1 where shape [2, 3] has another size"),
        ("... 1 i -> i", [(2, 3, 4)], (4,), "operand 0 has a 1"),
        ("(h d) -> (h d)", [(12,)], (12,), 'the size of "h" in (h d) of size 12 can not be told'),
        ("(h d), h, d -> h", [(12,), (3,), (5,)], (3,), "(h 3 · d 5) is not 12"),
        ("i, i -> i", [(2,), (1,)], (1,), '"i" is 2, but 1 in a result'),
    ],
)
def test_text_that_does_not_fit_the_call(
    text: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RuleError) as error:
        bind(text, _call([result], *shapes))
    assert message in str(error.value)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear": "0 1"}, 'linear="0 1" does not parse'),
        ({"linear": "2"}, "names operand 2"),
        ({"linear": [{"a"}]}, "names operand 'a'"),
        ({"reduce": {"x": "sum"}}, 'reduce names "x"'),
        ({"reduce": {"k": "median"}}, "is 'median'"),
        ({"reduce": {"k": ("sum", "sum")}}, "has 2 kinds for 1 results"),
    ],
)
def test_options_that_do_not_fit_the_text(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleError) as error:
        bind("i k -> i", _call([(2,)], (2, 3)), **options)
    assert message in str(error.value)
