"""A rule made to fit one call: checked against its shapes, without what its element types do not allow."""

from __future__ import annotations

import dataclasses

import torch

from autoshard.patterns.rule import Factor, OpCall, Rule


def specialize(rule: Rule, call: OpCall) -> Rule:
    """The rule without what no call on such element types can do.

    Raises:
        RuleError: the rule does not fit the call's shapes.
    """
    rule.check(call)
    return _without_bool_sums(_with_additive_sets(rule, call), call)


def _with_additive_sets(rule: Rule, call: OpCall) -> Rule:
    """The rule with those linear sets whose operands can be partial sums: not of truth values, not of indices."""
    inexact = [meta.dtype.is_floating_point or meta.dtype.is_complex for meta in call.operands]
    linear = tuple(operands for operands in rule.linear if all(inexact[operand] for operand in operands))
    variants = tuple(_with_additive_sets(variant, call) for variant in rule.variants)
    if (linear, variants) == (rule.linear, rule.variants):
        return rule
    return dataclasses.replace(rule, linear=linear, variants=variants)


def _without_bool_sums(rule: Rule, call: OpCall) -> Rule:
    """The rule without strategies that leave truth values to be added up, which no collective does.

    `aten.index_add` adds numbers along a contracted index; of truth values it is a rule for nothing.
    """
    truths = [index for index, meta in enumerate(call.results) if meta is not None and meta.dtype is torch.bool]
    if not truths:
        return rule

    def leaves_bool_sum(index: int, factor: Factor) -> bool:
        dims = [rule.results[truth] for truth in truths if factor.reduction(truth) == "sum"]
        return any(each is not None and all(index not in dim for dim in each) for each in dims)

    factors = tuple(
        dataclasses.replace(factor, shardable=factor.shardable and not leaves_bool_sum(index, factor))
        for index, factor in enumerate(rule.factors)
    )
    variants = tuple(_without_bool_sums(variant, call) for variant in rule.variants)
    return dataclasses.replace(rule, factors=factors, variants=variants)
