"""The planner: from a joint graph to the plan of a mesh.

The problem: `planning_problem.py`, built by `problem_builder.py` in passes over the graph (`problem_pass.py`), which
share `problem_tables.py` and the strategies of `strategy_tables.py`. Tensors outside the step: `boundary_specs.py`;
tensors that both halves use: `regather.py`; when programs hold tensors: `value_lifetimes.py`. A target as constraints:
`target_constraints.py`; shares: `shares.py`; hints and marks: `hints.py`, `task_graph_restrictions.py`; those that
change the step: `regions.py`.

How one problem is solved: `solving.py`, a list of methods, each for the whole problem or for a smaller one: repeated
layers tied (`tiling.py`), or fewer options (`ReducedProblem` of the solver). `lazy_solver.py` solves one relaxation
after another where there are too many prices to compute them all. A request to the solver: `solve_request.py`. Three
axes and more, and hidden communication: `planner.py`. Standard layouts: `layouts/`.

Candidates: `candidate_plan.py`. The seconds of decisions: `account.py`; the memory of their programs:
`program_memory.py`, `backward_sources.py`. The fastest plan, the fastest within a memory limit, the leanest, frontiers:
`explorer.py`; `recompute=`: `recompute_option.py`; whole logits or a loss in pieces: `loss_forms.py`. Within a limit:
`rerun_context.py` (the problem in which operators may run again, values may be moved, and optimizer state may be on the
host: `host_updates.py`), `limit_search.py`, `memory_prices.py`, `splice.py`, `recombination.py`, `limit_bound.py`; what
they share, and the error where no plan fits: `budget_search.py`. Checks of decisions: `plan_checks.py`. Other hints for
a captured step: `replanner.py`.
"""

from __future__ import annotations

from autoshard import operators as operators  # operators that captures add to graphs, with rules and prices
