"""A good assignment of a long problem in little time: cones, critical nodes, segments (Rhino 4.3)."""

from autoshard.solver.hierarchy.solve import Hierarchy, solve_in_segments

__all__ = ["Hierarchy", "solve_in_segments"]
