"""A plan beside standard layouts, at the same prices, and the flags of other tools for the nearest of them."""
