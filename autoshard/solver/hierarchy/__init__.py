"""Fast search for a good assignment of a long problem: cones, critical nodes, segments (Rhino 4.3)."""

from autoshard.solver.hierarchy.segmented_solve import HierarchySolution, solve_in_segments

__all__ = ["HierarchySolution", "solve_in_segments"]
