"""The registry: from an operator call to its rule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.notation import Linear, Reduction, bind, check_options, parse
from autoshard.patterns.rule import Factor, LocalProgram, OpCall, Rule, TensorMeta

Maker = Callable[[OpCall], Rule | None]

_NAME = re.compile(r"(?P<namespace>\w+)(?:::|\.)(?P<name>\w+)(?:\.(?P<overload>\w+))?")


def _key(name: str) -> str:
    """`aten.mm` -> `aten::mm`, `aten.mm.default` -> `aten::mm.default`."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise RuleError(
            f'"{name}" is not the name of an operator: write "namespace.name" or "namespace::name", with ".overload" '
            "at the end if the rule is for one overload only."
        )
    overload = "" if match["overload"] is None else f".{match['overload']}"
    return f"{match['namespace']}::{match['name']}{overload}"


class Registry:
    """Rules by operator. A rule for one overload wins over a rule for all overloads of an operator."""

    def __init__(self) -> None:
        self._makers: dict[str, Maker] = {}
        self._rules: dict[OpCall, Rule | None] = {}

    def register(self, name: str, maker_or_text: Maker | str, *, replace: bool = False, **options: Any) -> None:
        """Register a rule.

        Args:
            name: `"aten.mm"` (all overloads), `"aten.mm.default"` (one), or `"mylib::op"`.
            maker_or_text: the rule in the notation, or a function that makes the rule of a call (None: no rule).
            replace: whether a rule registered before is meant to be replaced.
            options: for text, the options of `notation.bind`; for a function, passed to it as keywords.

        Raises:
            RuleError: the name or the text does not parse, an option does not fit, or there is a rule already;
                nothing was changed then.
        """
        key = _key(name)
        if key in self._makers and not replace:
            raise RuleError(f"{name} has a rule already: pass replace=True if yours is to take its place.")
        self._makers[key] = _maker(maker_or_text, options)
        self._rules.clear()

    def rule_for(self, call: OpCall) -> Rule | None:
        """The rule of a call, checked against its shapes; None where there is none.

        Raises:
            RuleError: the rule that was registered does not fit the call.
        """
        if call not in self._rules:
            maker = self._find(call.op)
            rule = None if maker is None else maker(call)
            if rule is not None:
                rule.check(call)
                rule = _without_sums_of_truth(_with_additive_sets(rule, call), call)
            self._rules[call] = rule
        return self._rules[call]

    def knows(self, op: OpOverload) -> bool:
        """Whether any rule is registered for the operator; it may still decline some calls."""
        return self._find(op) is not None

    def names(self) -> tuple[str, ...]:
        """What rules are registered for, sorted: `aten::mm` (all overloads), `aten::sum.dim_IntList` (one)."""
        return tuple(sorted(self._makers))

    def _find(self, op: OpOverload) -> Maker | None:
        name = op._schema.name
        overload = op._schema.overload_name or "default"
        return self._makers.get(f"{name}.{overload}") or self._makers.get(name)


def _with_additive_sets(rule: Rule, call: OpCall) -> Rule:
    """The rule with those linear sets whose operands can be partial sums: not of truth values, not of indices."""
    inexact = [meta.dtype.is_floating_point or meta.dtype.is_complex for meta in call.operands]
    linear = tuple(operands for operands in rule.linear if all(inexact[operand] for operand in operands))
    variants = tuple(_with_additive_sets(variant, call) for variant in rule.variants)
    if (linear, variants) == (rule.linear, rule.variants):
        return rule
    return dataclasses.replace(rule, linear=linear, variants=variants)


def _without_sums_of_truth(rule: Rule, call: OpCall) -> Rule:
    """The rule without strategies that leave truth values to be added up, which no collective does.

    `aten.index_add` adds numbers along a contracted index; of truth values it is a rule for nothing.
    """
    truths = [index for index, meta in enumerate(call.results) if meta is not None and meta.dtype is torch.bool]
    if not truths:
        return rule

    def added_up(index: int, factor: Factor) -> bool:
        dims = [rule.results[truth] for truth in truths if factor.reduction(truth) == "sum"]
        return any(each is not None and all(index not in dim for dim in each) for each in dims)

    factors = tuple(
        dataclasses.replace(factor, shardable=factor.shardable and not added_up(index, factor))
        for index, factor in enumerate(rule.factors)
    )
    variants = tuple(_without_sums_of_truth(variant, call) for variant in rule.variants)
    return dataclasses.replace(rule, factors=factors, variants=variants)


def _maker(maker_or_text: Maker | str, options: Mapping[str, Any]) -> Maker:
    if not isinstance(maker_or_text, str):
        maker = maker_or_text
        return (lambda call: maker(call, **options)) if options else maker
    notation = parse(maker_or_text)
    check_options(notation, options.get("linear", ()), options.get("reduce"))
    return lambda call: bind(notation, call, **options)


_default = Registry()


def rule_for(call: OpCall) -> Rule | None:
    """The rule of a call in the library; None where there is none.

    Raises:
        RuleError: the rule that was registered does not fit the call.
    """
    return _default.rule_for(call)


def knows(op: OpOverload) -> bool:
    """Whether the library has a rule for the operator; it may still decline some calls."""
    return _default.knows(op)


def registered() -> tuple[str, ...]:
    """What the library has rules for, sorted: `aten::mm` (all overloads), `aten::sum.dim_IntList` (one)."""
    return _default.names()


def rule(names: str | Sequence[str], text: str, **options: Any) -> None:
    """Register one of the library's own rules in the notation, for one or several operators."""
    for name in [names] if isinstance(names, str) else names:
        _default.register(name, text, **options)


def rule_maker(*names: str, **options: Any) -> Callable[[Maker], Maker]:
    """Decorator: register a function from a call to its rule (None: no rule) for one or several operators."""

    def register(maker: Maker) -> Maker:
        for name in names:
            _default.register(name, maker, **options)
        return maker

    return register


def register_rule(
    name: str,
    text_or_maker: str | Maker,
    *,
    linear: Linear = (),
    reduce: Mapping[str, Reduction | Sequence[Reduction]] | None = None,
    local: LocalProgram | None = None,
    replace: bool = False,
) -> None:
    """Add a rule for an operator of your own, or for one that the library does not know.

    Args:
        name: `"mylib::op"` or `"aten.op"` (all overloads), `"aten.op.overload"` (one).
        text_or_maker: the rule in the notation, such as `"... d! -> ... d!"`, or a function that takes the
            `OpCall` and returns a `Rule`, or None where the call can't be split.
        linear: sets of operands in which the operator is jointly linear: `"0, 1+2"` or `[{0}, {1, 2}]`.
        reduce: the kind of partial result that the shards of a contracted name leave: `{"k": "max"}`; "sum" where
            absent, None where `local` reduces inside.
        local: what a rank runs on its shards; the operator itself by default.
        replace: whether a rule registered before is meant to be replaced.

    Raises:
        RuleError: the name, text or options do not parse, or there is a rule already; nothing was changed then.
    """
    if isinstance(text_or_maker, str):
        _default.register(name, text_or_maker, replace=replace, linear=linear, reduce=reduce, local=local)
    elif linear or reduce is not None or local is not None:
        raise RuleError(f"{name}: linear, reduce and local go with a rule in text; a function puts them in its Rule.")
    else:
        _default.register(name, text_or_maker, replace=replace)


_READS_MEMORY = ("aten::as_strided", "aten::as_strided_scatter")
"""Operators to which it matters how their operands lie in memory."""


def op_call(node: fx.Node) -> OpCall:
    """The call that an FX node makes, from the fake tensors in `meta["val"]` of its arguments and of itself."""
    assert isinstance(node.target, OpOverload), node.target
    return call_of(node.target, node.args, node.kwargs, node.meta.get("val"))


def call_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> OpCall:
    """The call of an operator on real or fake tensors, or on FX nodes that stand for them, with what it gave."""
    outputs = results if isinstance(results, (tuple, list)) else (results,)
    strided = op._schema.name in _READS_MEMORY
    return OpCall(
        op=op,
        args=tuple(_described(argument, strided) for argument in args),
        kwargs=tuple((name, _described(argument, strided)) for name, argument in kwargs.items()),
        results=tuple(_described(result) if isinstance(result, torch.Tensor) else None for result in outputs),
    )


def _described(value: Any, strided: bool = False) -> Any:
    """The value with tensors replaced by their metadata, strides included if asked for, and lists by tuples."""
    if isinstance(value, fx.Node):
        return _described(value.meta["val"], strided)
    if isinstance(value, torch.Tensor):
        return TensorMeta(tuple(value.shape), value.dtype, tuple(value.stride()) if strided else None)
    if isinstance(value, (tuple, list)):
        return tuple(_described(item, strided) for item in value)
    return value
