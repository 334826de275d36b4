"""A good assignment of a long problem in little time: cones, critical nodes, segments (Rhino 4.3)."""

from autoshard.solver.hierarchy.segmented_solve import HierarchySolution, solve_in_segments

__all__ = ["HierarchySolution", "solve_in_segments"]
