"""Solver of problems with one choice per node, costs on nodes and edges, and a memory limit; returns a bound, too.

Every method reads one form, flat arrays (`core.py`), and makes it smaller by one `presolve.py` (rules: `flat/rules.py`,
`flat/dominance.py`), which knows memory and maps choices back. Narrow problems are eliminated exactly: `eliminate.py`,
`elimination_order.py`, `buckets.py`. Wide ones are solved axis by axis and in neighbourhoods (`local_search.py`), and
proved by bounds that drop strategies (`bound.py`). Message passing is one kernel (`chains.py`) and one loop
(`ascent.py`), for problems (`trws.py`) and with prices of memory (`flat/dual.py`). Large problems, and limits on
memory: `flat/`, with prices of memory over time, neighbourhoods, and the integer program where its root fits the
remaining work. Long chains of equal parts: `hierarchy.py` (Rhino, 4.3). The ILP of Rhino 4.2: `ilp.py`. All assignments
worth their memory (TensorOpt, 3): `cost_frontier_search.py`. Candidates that are judged one by one, with a table of
verdicts: `candidate_search.py`. Every loop asks one `Budget` (`solver_budget.py`); every method records what it finds
in one `Incumbent` (`incumbent.py`).
"""

from autoshard.solver.cost_frontier_search import CostFrontier, cost_frontier
from autoshard.solver.incumbent import SolverProgress
from autoshard.solver.problem import Edge, Problem, SolverError
from autoshard.solver.solve import Solution, solve

__all__ = ["CostFrontier", "Edge", "Problem", "Solution", "SolverError", "SolverProgress", "cost_frontier", "solve"]
