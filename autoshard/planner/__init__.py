"""The planner: from a joint graph to the plan of a mesh."""

from __future__ import annotations

from autoshard import operators as operators  # what captures put into graphs, with rules and prices
