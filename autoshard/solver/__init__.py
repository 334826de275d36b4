"""Problems of one choice per node with costs on nodes and edges and a limit on memory, solved with a bound."""

from autoshard.solver.course import Progress
from autoshard.solver.frontier import CostFrontier, cost_frontier
from autoshard.solver.problem import Edge, Problem, SolverError
from autoshard.solver.solve import Solution, solve

__all__ = ["CostFrontier", "Edge", "Problem", "Progress", "Solution", "SolverError", "cost_frontier", "solve"]
