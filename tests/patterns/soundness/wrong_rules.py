"""Operators with a rule that is wrong on purpose, the strategy that gives it away, and the rule as it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.rule import OpCall, Rule

aten = torch.ops.aten
Maker = Callable[[OpCall], Rule]


def normal(*shape: int) -> torch.Tensor:
    """Normally distributed numbers in float64."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


X, Y, ROW = normal(12, 12), normal(12, 12).T.contiguous() + 1, normal(12)
INDEX = torch.tensor([3, 11, 0, 6, 6, 8])


@dataclass(frozen=True, slots=True)
class WrongRule:
    """A mistake.

    Attributes:
        function: what the operator computes.
        wrong: the rule with the mistake: text, or a function that makes it.
        right: the rule without.
        strategy: a strategy that computes something else under the wrong rule, as findings call it.
        problem: what the finding should say.
        args: sample arguments.
        schema: of the operator.
        wrong_options: options of the wrong rule; those of the right one are `right_options`.
    """

    function: Callable[..., Any]
    wrong: str | Maker
    right: str | Maker
    strategy: str
    problem: str = "not close"
    args: tuple[Any, ...] = (X,)
    schema: str = "(Tensor x) -> Tensor"
    wrong_options: Mapping[str, Any] = field(default_factory=dict)
    right_options: Mapping[str, Any] = field(default_factory=dict)


TWO = {"args": (X, Y), "schema": "(Tensor x, Tensor y) -> Tensor"}
GROUPED = {"args": (X, 4), "schema": "(Tensor x, int groups) -> Tensor"}
WITH_ROW = {"args": (X, ROW), "schema": "(Tensor x, Tensor y) -> Tensor"}


def _add_row_numbers(call: LocalCall, value: Any, name: str, rows: int) -> Any:
    """The values plus the numbers of their rows, `rows` of them counted from the start of the rank's stretch."""
    emit, numbers = call.emit, call.emit.call(aten.arange.default, rows)
    position = call.position(name)
    if position is not None:
        numbers = emit.call(aten.add.Tensor, numbers, emit.call(aten.mul.Tensor, position, rows))
    return emit.call(aten.add.Tensor, value, emit.call(aten.unsqueeze.default, numbers, 1))


def _numbered_rows(call: LocalCall) -> Any:
    return _add_row_numbers(call, call.operands[0], "i", call.result_shape()[0])


def _numbered_rows_off_by_one(call: LocalCall) -> Any:
    return _add_row_numbers(call, call.operands[0], "i", call.result_shape()[0] - 1 + (call.share("i") == 1))


def _unnumbered_rows(call: LocalCall) -> Any:
    rows = call.result_shape()[0]
    numbers = call.emit.call(aten.unsqueeze.default, call.emit.call(aten.arange.default, rows), 1)
    return call.emit.call(aten.add.Tensor, call.operands[0], numbers)


def _mean(call: LocalCall) -> Any:
    total = call.all_reduce(call.emit.call(aten.sum.dim_IntList, call.operands[0], [-1]), "d")
    return call.emit.call(aten.div.Tensor, total, call.call.operands[0].shape[-1])


def _mean_by_local_count(call: LocalCall) -> Any:
    return call.all_reduce(call.run(), "d")


def _run(call: LocalCall) -> Any:
    return call.run()


def _sum_reduced(call: LocalCall) -> Any:
    return call.all_reduce(call.run(), "d")


def _sum_reduced_over_another_loop(call: LocalCall) -> Any:
    return call.all_reduce(call.run(), "i")


def _in_single_precision(call: LocalCall) -> Any:
    return call.emit.call(aten._to_copy.default, call.run(), dtype=torch.float32)


def _twice_as_many(call: LocalCall) -> Any:
    return call.emit.call(aten.cat.default, [call.run(), call.run()])


def _fewer_groups(call: LocalCall) -> Any:
    return call.run(groups=max(1, call.arg("groups") // call.share("g")))


def _groups(text: str, groups: int) -> Maker:
    """A rule in which `g` is so many, and every rank has its share of them."""
    return lambda call: bind(text, call, sizes={"g": groups}, local=_fewer_groups)


def _with_variant(variant: str) -> Maker:
    return lambda call: replace(bind("i j! -> i", call), variants=(bind(variant, call),))


def _weighted_mean(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum() / y.sum()


WRONG_RULES: dict[str, WrongRule] = {
    "contracted and not partial": WrongRule(
        torch.mm, "i k, k j -> i j", "i k, k j -> i j", "k on x", wrong_options={"reduce": {"k": None}}, **TWO
    ),
    "a mean as a sum": WrongRule(
        lambda x: x.mean(-1), "i d -> i", "i d -> i", "d on x", right_options={"reduce": {"d": "avg"}}
    ),
    "a sum as a mean": WrongRule(
        lambda x: x.sum(-1), "i d -> i", "i d -> i", "d on x", wrong_options={"reduce": {"d": "avg"}}
    ),
    "a maximum as a sum": WrongRule(
        lambda x: x.amax(-1), "i d -> i", "i d -> i", "d on x", right_options={"reduce": {"d": "max"}}
    ),
    "a minimum as a maximum": WrongRule(
        lambda x: x.amin(-1),
        *("i d -> i", "i d -> i", "d on x"),
        wrong_options={"reduce": {"d": "max"}},
        right_options={"reduce": {"d": "min"}},
    ),
    "a product as a sum": WrongRule(
        lambda x: x.prod(-1), "i d -> i", "i d -> i", "d on x", right_options={"reduce": {"d": "product"}}
    ),
    "a norm as a sum": WrongRule(lambda x: x.norm(dim=-1), "i d -> i", "i d! -> i", "d on x"),
    "a logarithm of a sum as a sum": WrongRule(lambda x: x.logsumexp(-1), "i d -> i", "i d! -> i", "d on x"),
    "the place of a maximum as a maximum": WrongRule(
        lambda x: x.argmax(-1), "i d -> i", "i d! -> i", "d on x", "", wrong_options={"reduce": {"d": "max"}}
    ),
    "a weighted mean as a sum": WrongRule(_weighted_mean, "i j, i j ->", "i! j!, i! j! ->", "j on x", **TWO),
    "one kind for two results": WrongRule(
        lambda x: torch.var_mean(x, -1, correction=0),
        *("i d -> i, i", "i d! -> i, i", "d on x", "result 0"),
        schema="(Tensor x) -> (Tensor, Tensor)",
        wrong_options={"reduce": {"d": "avg"}},
    ),
    "softmax over its own dim": WrongRule(lambda x: x.softmax(-1), "i d -> i d", "i d! -> i d!", "d on x"),
    "a running sum": WrongRule(lambda x: x.cumsum(-1), "i d -> i d", "i d! -> i d!", "d on x"),
    "sorting": WrongRule(lambda x: x.sort(-1).values, "i d -> i d", "i d! -> i d!", "d on x"),
    "swapped dims": WrongRule(lambda x: x.t().clone(), "i j -> i j", "i j -> j i", "i on x", "has shape"),
    "swapped operands": WrongRule(torch.mm, "k j, i k -> i j", "i k, k j -> i j", "j on x", "", **TWO),
    "a row added as a column": WrongRule(
        lambda x, y: x + y[:, None], "i j, j -> i j", "i j, i -> i j", "j on x", "", **WITH_ROW
    ),
    "a square passes partial sums": WrongRule(
        torch.square, "... -> ...", "... -> ...", "partial sum passes on x", wrong_options={"linear": "0"}
    ),
    "a constant added to partial sums": WrongRule(
        lambda x: 2 * x + 1, "... -> ...", "... -> ...", "partial sum passes on x", wrong_options={"linear": "0"}
    ),
    "one term replicated, the other partial": WrongRule(
        lambda x, y: x - y,
        *("..., ... -> ...", "..., ... -> ...", "partial sum passes on x"),
        wrong_options={"linear": "0, 1"},
        right_options={"linear": "0+1"},
        **TWO,
    ),
    "a product linear in both at once": WrongRule(
        torch.mul,
        *("..., ... -> ...", "..., ... -> ...", "partial sum passes on x"),
        wrong_options={"linear": "0+1"},
        right_options={"linear": "0, 1"},
        **TWO,
    ),
    "a gate that passes partial sums": WrongRule(
        lambda x, y: x * y.sigmoid(),
        *("..., ... -> ...", "..., ... -> ...", "partial sum passes on x"),
        wrong_options={"linear": "0, 1"},
        right_options={"linear": "0"},
        **TWO,
    ),
    "a bias added by every rank": WrongRule(
        lambda x, y, b: x @ y + b,
        *("i k, k j, j -> i j", "i k!, k! j, j -> i j", "k on x"),
        args=(X, Y, ROW),
        schema="(Tensor x, Tensor y, Tensor b) -> Tensor",
    ),
    "positions of the whole dim": WrongRule(
        lambda x, y: x[:, y],
        *("i n, k -> i k", "i n!, k -> i k", "n on x", ""),
        args=(X, INDEX),
        schema="(Tensor x, Tensor y) -> Tensor",
    ),
    "a product in the wrong order": WrongRule(
        lambda x, groups: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1),
        _groups("i (g d) -> i (g d)", 4),
        _groups("i (g d) -> i (d g)", 4),
        "g on x",
        **GROUPED,
    ),
    "the inner part where the outer is whole": WrongRule(
        lambda x, groups: x.unflatten(1, (groups, -1)).roll(1, 2).flatten(1),
        _groups("i (g! d) -> i (g! d)", 4),
        _groups("i (g d!) -> i (g d!)", 4),
        "d on x",
        **GROUPED,
    ),
    "split points elsewhere": WrongRule(
        lambda x, groups: x.unflatten(1, (groups, -1)).flip(2).flatten(1),
        _groups("i (g d!) -> i (g d!)", 2),
        _groups("i (g d!) -> i (g d!)", 3),
        "g on x",
        args=(X, 3),
        schema="(Tensor x, int groups) -> Tensor",
    ),
    "strided shards of what is counted": WrongRule(
        lambda x: x + torch.arange(12)[:, None],
        *("i j -> i j", "i^ j -> i j", "i.1 on x"),
        wrong_options={"local": _numbered_rows},
        right_options={"local": _numbered_rows},
    ),
    "no offset": WrongRule(
        lambda x: x + torch.arange(12)[:, None],
        *("i^ j -> i j", "i^ j -> i j", "i on x"),
        wrong_options={"local": _unnumbered_rows},
        right_options={"local": _numbered_rows},
    ),
    "an offset too small by one": WrongRule(
        lambda x: x + torch.arange(12)[:, None],
        *("i^ j -> i j", "i^ j -> i j", "i on x", ""),
        wrong_options={"local": _numbered_rows_off_by_one},
        right_options={"local": _numbered_rows},
    ),
    "the count of the shard": WrongRule(
        lambda x: x.mean(-1),
        *("i d -> i", "i d -> i", "d on x"),
        wrong_options={"reduce": {"d": None}, "local": _mean_by_local_count},
        right_options={"reduce": {"d": None}, "local": _mean},
    ),
    "nothing exchanged": WrongRule(
        lambda x: x.sum(-1),
        *("i d -> i", "i d -> i", "d on x"),
        wrong_options={"reduce": {"d": None}, "local": _run},
        right_options={"reduce": {"d": None}, "local": _sum_reduced},
    ),
    "exchanged along another loop": WrongRule(
        lambda x: x.sum(-1),
        *("i d -> i", "i d -> i", "i on x"),
        wrong_options={"local": _sum_reduced_over_another_loop},
    ),
    "reduced inside and once more": WrongRule(
        lambda x: x.sum(-1),
        *("i d -> i", "i d -> i", "d on x"),
        wrong_options={"local": _sum_reduced},
        right_options={"local": _run},
    ),
    "another element type": WrongRule(
        torch.sin, "... -> ...", "... -> ...", "whole", "dtype", wrong_options={"local": _in_single_precision}
    ),
    "another shape": WrongRule(
        torch.sin, "... -> ...", "... -> ...", "whole", "has shape [12, 12]", wrong_options={"local": _twice_as_many}
    ),
    "a shape of the whole tensor": WrongRule(
        lambda x: x.view(12, 12) + 0, "i j -> i j", "i! j! -> i! j!", "j on x", "fails with RuntimeError"
    ),
    "a variant": WrongRule(lambda x: x.mean(-1), _with_variant("i k -> i"), _with_variant("i k! -> i"), "k on x"),
}
