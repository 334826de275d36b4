"""The registry: names, overloads, the user's own rules, and calls from FX nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.patterns.registry import Registry, call_of, has_rule, op_call, register_rule, rule_for, rule_names
from autoshard.patterns.rule import OpCall, Rule, TensorMeta

aten = torch.ops.aten
F32 = torch.float32


def _call(op: Any, *args: Any) -> OpCall:
    return call_of(op, args, {}, op(*args))


MM = _call(aten.mm.default, torch.randn(2, 3), torch.randn(3, 4))


@pytest.mark.parametrize("name", ["aten.mm", "aten.mm.default", "aten::mm", "aten::mm.default"])
def test_every_spelling_of_a_name(name: str) -> None:
    registry = Registry()
    registry.register(name, "i k, k j -> i j", linear="0, 1")
    assert registry.has_rule(aten.mm.default)
    rule = registry.rule_for(MM)
    assert rule is not None
    assert rule.linear == (frozenset({0}), frozenset({1}))


def test_an_overload_wins_over_all_overloads() -> None:
    registry = Registry()
    registry.register("aten.add", "... , ... -> ...")
    registry.register("aten.add.Tensor", lambda call: None)
    x = torch.randn(2)
    assert registry.rule_for(_call(aten.add.Tensor, x, x)) is None
    assert registry.has_rule(aten.add.Scalar)
    assert not registry.has_rule(aten.mul.Tensor)


def test_rules_of_users_are_told_apart_from_those_of_the_library() -> None:
    registry = Registry()
    registry.register("aten.add", "... , ... -> ...")
    registry.register("aten.add.Tensor", "... , ... -> ...", of_user=True)
    assert registry.is_of_user(aten.add.Tensor)
    assert not registry.is_of_user(aten.add.Scalar)
    assert not registry.is_of_user(aten.mul.Tensor)
    registry.register("aten.add.Tensor", lambda call: None, replace=True)
    assert not registry.is_of_user(aten.add.Tensor)


def test_a_rule_is_made_once_per_call() -> None:
    made = []

    def maker(call: OpCall) -> Rule | None:
        made.append(call)
        return None

    registry = Registry()
    registry.register("aten.mm", maker)
    registry.rule_for(MM)
    registry.rule_for(_call(aten.mm.default, torch.randn(2, 3), torch.randn(3, 4)))
    assert len(made) == 1


def test_replacing_a_rule_takes_effect_at_once() -> None:
    registry = Registry()
    registry.register("aten.mm", "i k, k j -> i j")
    assert registry.rule_for(MM) is not None
    with pytest.raises(RuleError, match="replace=True"):
        registry.register("aten::mm", lambda call: None)
    assert registry.rule_for(MM) is not None
    registry.register("aten::mm", lambda call: None, replace=True)
    assert registry.rule_for(MM) is None


@pytest.mark.parametrize("name", ["mm", "", "aten mm", "aten.mm.default.more"])
def test_bad_names(name: str) -> None:
    with pytest.raises(RuleError, match="is not the name of an operator"):
        Registry().register(name, "i -> i")


def test_nothing_is_registered_by_a_rule_that_does_not_parse() -> None:
    registry = Registry()
    for options in ({}, {"linear": "7"}):
        with pytest.raises(RuleError):
            registry.register("aten.mm", "i k, k$ -> i" if not options else "i k, k j -> i j", **options)
    assert not registry.has_rule(aten.mm.default)


def test_register_rule_for_an_operator_of_ones_own() -> None:
    with torch.library._scoped_library("autoshard_test_registry", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        op = torch.ops.autoshard_test_registry.twice.default
        assert not has_rule(op)
        with pytest.raises(RuleError, match="unexpected"):
            register_rule("autoshard_test_registry::twice", "... -> ??")
        with pytest.raises(RuleError, match="go with a rule in text"):
            register_rule("autoshard_test_registry::twice", lambda call: None, linear="0")
        with pytest.raises(RuleError, match="go with a rule in text"):
            register_rule("autoshard_test_registry::twice", lambda call: None, uneven=False)
        assert not has_rule(op)
        register_rule("autoshard_test_registry::twice", "... -> ...", linear="0")
        assert rule_for(_call(op, torch.randn(4))) is not None
        with pytest.raises(RuleError, match="has a rule already"):
            register_rule("autoshard_test_registry::twice", "... -> ...")


def test_the_library_has_rules_for_both_halves_of_a_training_step() -> None:
    assert all(has_rule(op) for op in (aten.mm.default, aten.gelu_backward.default, aten.native_layer_norm.default))


def test_names_of_all_rules_are_known() -> None:
    assert {"aten::mm", "aten::relu"} <= set(rule_names())
    assert list(rule_names()) == sorted(rule_names())


def test_a_list_among_defaults_is_a_tuple() -> None:
    assert _call(aten.amax.default, torch.zeros(2, 3)).arg("dim") == ()


def test_op_call_describes_a_node() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = torch.empty(2, 3, device="meta")
    y.meta["val"] = torch.empty(4, 3, device="meta", dtype=torch.float64)
    cat = graph.call_function(aten.cat.default, ([x, y],), {"dim": 0})
    cat.meta["val"] = torch.empty(6, 3, device="meta")
    call = op_call(cat)
    left, right = TensorMeta((2, 3), F32), TensorMeta((4, 3), torch.float64)
    assert call == OpCall(aten.cat.default, ((left, right),), (("dim", 0),), (TensorMeta((6, 3), F32),))
    assert call.operands == (left, right)
    assert call.arg("dim") == 0
    assert hash(call) == hash(op_call(cat))


def test_op_call_keeps_results_that_are_missing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")
    node = graph.call_function(aten.native_layer_norm_backward.default, (x,))
    node.meta["val"] = (x.meta["val"], None, 3)
    assert op_call(node).results == (TensorMeta((2,), F32), None, None)
