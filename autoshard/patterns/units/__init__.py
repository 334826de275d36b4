"""Units: further implementations of operators, and rules for operators of other libraries (Whale 3.2.2)."""

from autoshard.patterns.units import grouped_products as grouped_products  # registers the rules
