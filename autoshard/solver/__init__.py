"""Solver of problems with one choice per node, costs on nodes and edges, and a memory limit; returns a bound, too."""

from autoshard.solver.cost_frontier_search import CostFrontier, cost_frontier
from autoshard.solver.incumbent import SolverProgress
from autoshard.solver.problem import Edge, Problem, SolverError
from autoshard.solver.solve import Solution, solve

__all__ = ["CostFrontier", "Edge", "Problem", "Solution", "SolverError", "SolverProgress", "cost_frontier", "solve"]
