"""The registry: from an operator call to its rule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.borrowed import borrowed_rule, may_borrow
from autoshard.patterns.notation import Linear, Reduction, bind, check_options, check_padding, parse
from autoshard.patterns.rule import FACTORS_BY_LAYOUT, LocalProgram, OpCall, Rule, TensorMeta, specialize

Maker = Callable[..., Rule | None]
"""Returns the rule of an `OpCall`, given options by keyword; None where there is none."""

OPERATOR_NAME = re.compile(r"(?P<namespace>\w+)(?:::|\.)(?P<name>\w+)(?:\.(?P<overload>\w+))?")


def _key(name: str) -> str:
    """Return the name as the registry spells it: `aten::mm` of `aten.mm`, `aten::mm.default` of `aten.mm.default`."""
    match = OPERATOR_NAME.fullmatch(name)
    if match is None:
        raise RuleError(
            f'"{name}" is not the name of an operator: write "namespace.name" or "namespace::name", with ".overload" '
            "at the end if the rule is for one overload only."
        )
    overload = "" if match["overload"] is None else f".{match['overload']}"
    return f"{match['namespace']}::{match['name']}{overload}"


class Registry:
    """Rules by operator. A rule for one overload takes precedence over one for all overloads of an operator."""

    def __init__(self) -> None:
        self._makers: dict[str, Maker] = {}
        self._rules: dict[OpCall, Rule | None] = {}
        self._of_user: set[str] = set()

    def register(
        self,
        name: str,
        maker_or_text: Maker | str,
        *,
        replace: bool = False,
        of_user: bool = False,
        **options: Any,
    ) -> None:
        """Register a rule.

        Args:
            name: `"aten.mm"` (all overloads), `"aten.mm.default"` (one), or `"mylib::op"`.
            maker_or_text: the rule in the notation, or a function that makes the rule of a call (None: no rule).
            replace: True to replace a rule registered before.
            of_user: True if the rule is not one of the library.
            options: for text, the options of `notation.bind`; for a function, passed to it as keywords.

        Raises:
            RuleError: the name or the text does not parse, an option does not fit, or there is a rule already;
                nothing was changed then.
        """
        key = _key(name)
        if key in self._makers and not replace:
            raise RuleError(f"{name} has a rule already: pass replace=True if yours is to take its place.")
        self._makers[key] = _maker(maker_or_text, options)
        (self._of_user.add if of_user else self._of_user.discard)(key)
        # Calls seen before may have another rule now.
        self._rules.clear()

    def rule_for(self, call: OpCall) -> Rule | None:
        """Return the rule of a call, checked against its shapes; None if there is none.

        Raises:
            RuleError: the registered rule does not fit the call.
        """
        if call not in self._rules:
            maker = self._find(call.op)
            rule = None if maker is None else maker(call)
            self._rules[call] = None if rule is None else specialize(rule, call)
        return self._rules[call]

    def has_rule(self, op: OpOverload) -> bool:
        """Return True if a rule is registered for the operator; it may still decline some calls."""
        return self._find(op) is not None

    def is_of_user(self, op: OpOverload) -> bool:
        """Return True if the rule of the operator is one that a user registered."""
        return self._key_of(op) in self._of_user

    def names(self) -> tuple[str, ...]:
        """Return the sorted names with a rule: `aten::mm` (all overloads), `aten::sum.dim_IntList` (one)."""
        return tuple(sorted(self._makers))

    def _find(self, op: OpOverload) -> Maker | None:
        return self._makers.get(self._key_of(op))

    def _key_of(self, op: OpOverload) -> str:
        """Return the name under which the rule of an operator is registered, if it has one."""
        name = op._schema.name
        # A rule of the overload takes precedence.
        overload = f"{name}.{op._schema.overload_name or 'default'}"
        return overload if overload in self._makers else name


def _maker(maker_or_text: Maker | str, options: Mapping[str, Any]) -> Maker:
    if not isinstance(maker_or_text, str):
        maker = maker_or_text
        return (lambda call: maker(call, **options)) if options else maker
    notation = parse(maker_or_text)
    check_options(notation, options.get("linear", ()), options.get("reduce"))
    check_padding(notation, **options)
    return lambda call: bind(notation, call, **options)


_default = Registry()


def rule_for(call: OpCall) -> Rule | None:
    """Return the rule of a call: the library's or a user's, else one borrowed from torch; None if there is none.

    Raises:
        RuleError: the registered rule does not fit the call.
    """
    return _default.rule_for(call) if _default.has_rule(call.op) else borrowed_rule(call)


def has_rule(op: OpOverload) -> bool:
    """Return True if a rule is registered for the operator or can be borrowed; it may still decline some calls."""
    return _default.has_rule(op) or may_borrow(op)


def is_borrowed(op: OpOverload) -> bool:
    """Return True if the operator has no rule here and torch has strategies to borrow."""
    return not _default.has_rule(op) and may_borrow(op)


def is_of_user(op: OpOverload) -> bool:
    """Return True if the rule of the operator was registered by `register_rule`."""
    return _default.is_of_user(op)


def rule_names() -> tuple[str, ...]:
    """Return the sorted names with a rule of the library: `aten::mm` (all overloads), `aten::sum.dim_IntList` (one)."""
    return _default.names()


def rule(names: str | Sequence[str], text: str, **options: Any) -> None:
    """Register a rule in the notation for one or several operators of the library."""
    for name in [names] if isinstance(names, str) else names:
        _default.register(name, text, **options)


def rule_maker(*names: str, **options: Any) -> Callable[[Maker], Maker]:
    """Decorate a function from a call to its rule (None: no rule) to register it for one or several operators."""

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
    uneven: Collection[str] | bool | None = None,
    fill: Mapping[str, float | None] | None = None,
    replace: bool = False,
) -> None:
    """Add a rule for an operator of your own, or for an operator without a rule in the library.

    Args:
        name: `"mylib::op"` or `"aten.op"` (all overloads), `"aten.op.overload"` (one).
        text_or_maker: the rule in the notation, such as `"... d! -> ... d!"`, or a function that takes the
            `OpCall` and returns a `Rule`, or None where the call can't be split.
        linear: sets of operands in which the operator is jointly linear: `"0, 1+2"` or `[{0}, {1, 2}]`.
        reduce: the kind of partial result where a contracted name is sharded: `{"k": "max"}`; "sum" where absent, None
            where `local` reduces inside.
        local: what a rank runs on its shards; the operator itself by default.
        uneven: names that an axis may split without dividing them, with padding after the last steps. True for all
            names whose padding the rule keeps out of results, False for none; by default True without `local`, and
            False with it.
        fill: further such names, with the number that replaces their padding in every operand before a rank runs: 0
            for a sum, -inf for a maximum, None where `local` keeps padding out of results.
        replace: True to replace a rule registered before.

    Raises:
        RuleError: the name, text or options do not parse, or there is a rule already; nothing was changed then.
    """
    options = {"linear": linear, "reduce": reduce, "local": local, "uneven": uneven, "fill": fill}
    if isinstance(text_or_maker, str):
        _default.register(name, text_or_maker, replace=replace, of_user=True, **options)
        return
    if linear or any(value is not None for value in (reduce, local, uneven, fill)):
        raise RuleError(
            f"{name}: linear, reduce, local, uneven and fill go with a rule in text; a function puts them in its Rule."
        )
    _default.register(name, text_or_maker, replace=replace, of_user=True)


# Operators whose results depend on the strides of operands: calls with different strides are different calls.
_READS_STRIDES = FACTORS_BY_LAYOUT | {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"}

NodeMetas = dict[fx.Node, Any]
"""Node -> its description as an operand: shape and dtype of a tensor, or the value itself."""


def op_call(node: fx.Node, known: NodeMetas | None = None) -> OpCall:
    """Return the call of an FX node, from the fake tensors in `meta["val"]` of its arguments and of itself.

    `known` caches descriptions of nodes; this node is added.
    """
    assert isinstance(node.target, OpOverload), node.target
    val = node.meta.get("val")
    call = call_of(node.target, node.args, node.kwargs, val, known)
    if "sizes" in node.meta:  # dynamic sizes; fake tensors have the example's values only
        results = (meta and tensor_meta(node, index) for index, meta in enumerate(call.results))
        call = dataclasses.replace(call, results=tuple(results))
    if known is not None and isinstance(val, torch.Tensor):
        known[node] = call.results[0]
    return call


def call_of(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any, known: NodeMetas | None = None
) -> OpCall:
    """Return the call of an operator on real or fake tensors, or on FX nodes that stand for them, with its results."""
    outputs = results if isinstance(results, (tuple, list)) else (results,)
    strided = op._schema.name in _READS_STRIDES
    known = None if strided else known  # descriptions of nodes are without strides
    return OpCall(
        op=op,
        # List comprehensions are faster than generators, and this runs for every node of a graph.
        args=tuple([_describe(argument, strided, known) for argument in args]),
        kwargs=tuple([(name, _describe(argument, strided, known)) for name, argument in kwargs.items()]),
        results=tuple([_describe(result) if isinstance(result, torch.Tensor) else None for result in outputs]),
    )


def tensor_meta(node: fx.Node, result: int = 0) -> TensorMeta:
    """Return the global shape, dynamic sizes included, and dtype of a result of a node of a joint graph."""
    val = node.meta["val"]
    tensor = val[result] if isinstance(val, (tuple, list)) else val
    sizes = node.meta.get("sizes")
    return TensorMeta(tuple(tensor.shape) if sizes is None else sizes[result], tensor.dtype)


def _describe(value: Any, strided: bool = False, known: NodeMetas | None = None) -> Any:
    """Return the value with tensors replaced by their metadata, and lists by tuples."""
    if isinstance(value, fx.Node):
        if known is not None and value in known:
            return known[value]
        meta = _describe(value.meta["val"], strided)
        if "sizes" in value.meta:
            meta = dataclasses.replace(meta, shape=value.meta["sizes"][0])
        if known is not None:
            known[value] = meta
        return meta
    if isinstance(value, torch.Tensor):
        return TensorMeta(tuple(value.shape), value.dtype, tuple(value.stride()) if strided else None)
    if isinstance(value, (tuple, list)):
        return tuple([_describe(item, strided, known) for item in value])
    return value
