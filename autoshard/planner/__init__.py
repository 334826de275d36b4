"""The planner: from a joint graph to the plan of a mesh."""

from __future__ import annotations

from autoshard import operators as operators  # operators that captures add to graphs, with rules and prices
