"""Rules with several implementations: which factors there are to choose from, and which variant a choice stands for.

Choices count the factors of the rule first, then those that its variants add under names of their own. A factor that
bears the same name in two variants is the same loop, so that an axis may keep its choice while another axis changes the
implementation. Whale 3.2.2: a pattern has several implementations, and the cheapest wins.
"""

from __future__ import annotations

from autoshard.patterns.rule import Factor, Rule

Choices = tuple[int, ...]
"""One choice per mesh axis: a factor's index; `WHOLE`; or `linear_choice(k)` for the k-th linear set of the rule."""

WHOLE = -1


def linear_choice(index: int) -> int:
    """The choice that passes partial sums through the rule's linear set `index`."""
    return -2 - index


def offered_factors(rule: Rule) -> tuple[Factor, ...]:
    """The factors that choices count: the rule's own, then those that every variant adds under a new name."""
    if not rule.variants:
        return rule.factors
    offered: dict[str, Factor] = {}
    for each in (rule, *rule.variants):
        for factor in each.factors:
            offered.setdefault(factor.name, factor)
    return tuple(offered.values())


def offered_linear(rule: Rule) -> tuple[frozenset[int], ...]:
    """The linear sets that choices count: the rule's own, then those that every variant adds."""
    if not rule.variants:
        return rule.linear
    return tuple(dict.fromkeys(operands for each in (rule, *rule.variants) for operands in each.linear))


def variant_for(rule: Rule, choices: Choices) -> tuple[Rule, Choices] | None:
    """The first implementation that knows all that was chosen, and the choices as it counts them; None without one."""
    if not rule.variants:
        return rule, choices
    factors, linear = offered_factors(rule), offered_linear(rule)
    for variant in (rule, *rule.variants):
        own = tuple(_choice_in_variant(variant, choice, factors, linear) for choice in choices)
        if None not in own:
            return variant, tuple(choice for choice in own if choice is not None)
    return None


def _choice_in_variant(
    variant: Rule, choice: int, factors: tuple[Factor, ...], linear: tuple[frozenset[int], ...]
) -> int | None:
    """A choice among all that is offered, as the variant counts it; None for what it does not know."""
    if choice == WHOLE:
        return WHOLE
    if choice < WHOLE:
        operands = linear[-2 - choice]
        return linear_choice(variant.linear.index(operands)) if operands in variant.linear else None
    name = factors[choice].name
    return next(
        (index for index, factor in enumerate(variant.factors) if factor.name == name and factor.shardable), None
    )


def resolve_variant(rule: Rule, choices: Choices) -> tuple[Rule, Choices]:
    """The implementation that the choices stand for, and the choices as indices of its own factors.

    A rule without variants is its own only one. The choices must go together, as `strategy.fits` says.
    """
    found = variant_for(rule, choices)
    assert found is not None, f"no variant knows all of {choices}"
    return found
