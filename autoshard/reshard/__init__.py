"""Resharding from spec to spec along the cheapest path of collectives, priced and lowered."""
