"""Rules with several implementations: the factors to choose from, and the variant that choices stand for.

Choices count the factors of the rule first, then those that its variants add under new names. Factors of one name in
two variants are the same loop, so that an axis may keep its choice while another axis changes the implementation.

Source: Whale 3.2.2: a pattern has several implementations, and the cheapest wins.
"""

from __future__ import annotations

from autoshard.patterns.rule import Factor, Rule

Choices = tuple[int, ...]
"""One choice per mesh axis: a factor's index; `WHOLE`; or `linear_choice(k)` for the k-th linear set of the rule."""

WHOLE = -1


def linear_choice(index: int) -> int:
    """Return the choice that passes partial sums through the rule's linear set `index`."""
    return -2 - index


def offered_factors(rule: Rule) -> tuple[Factor, ...]:
    """Return the factors that choices count: those of the rule, then those that each variant adds."""
    if not rule.variants:
        return rule.factors
    offered: dict[str, Factor] = {}
    for each in (rule, *rule.variants):
        for factor in each.factors:
            offered.setdefault(factor.name, factor)
    return tuple(offered.values())


def offered_linear(rule: Rule) -> tuple[frozenset[int], ...]:
    """Return the linear sets that choices count: those of the rule, then those that each variant adds."""
    if not rule.variants:
        return rule.linear
    return tuple(dict.fromkeys(operands for each in (rule, *rule.variants) for operands in each.linear))


def variant_for(rule: Rule, choices: Choices) -> tuple[Rule, Choices] | None:
    """Return the first implementation with all chosen factors, and the choices in its factors; None without one."""
    if not rule.variants:
        return rule, choices
    factors, linear = offered_factors(rule), offered_linear(rule)
    for variant in (rule, *rule.variants):
        translated = tuple(_choice_in_variant(variant, choice, factors, linear) for choice in choices)
        if None not in translated:
            return variant, tuple(choice for choice in translated if choice is not None)
    return None


def _choice_in_variant(
    variant: Rule, choice: int, factors: tuple[Factor, ...], linear: tuple[frozenset[int], ...]
) -> int | None:
    """Return an offered choice as the variant counts it; None if the variant does not have it."""
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
    """Return the implementation that the choices stand for, and the choices as indices of its factors.

    The choices must go together, as `strategy.fits` says.
    """
    resolved = variant_for(rule, choices)
    assert resolved is not None, f"no variant knows all of {choices}"
    return resolved
