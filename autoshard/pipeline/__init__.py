"""Pipelines: stages, their schedule, their plans, and the module that runs them.

`graph/` splits a batch (`microbatch.py`), captures the step of one microbatch and finds which operator of `forward`
every node belongs to, backward nodes by the gradients around them (`microbatch_step.py`), prices and merges operators
(`operator_costs.py`, `stage_graph.py`), assigns them to stages (`stages.py`; Rhino, 5.1) and cuts the step into one per
stage (`stage_cut.py`, `stage_slices.py`).

`schedule/` lists the actions of every rank, as torch orders them, with messages (`actions.py`), bounds and simulates a
step (`costs.py`), and searches (`schedule_search.py`). `plan/` plans every stage as a module, for several shapes of a
pipeline (`pipeline_planner.py`, `shape_planner.py`), fits them into memory (`stage_plans.py`), lists what they spend
(`pipeline_expenses.py`) and plans again (`pipeline_replanner.py`). `run/` is the module at work (`pipeline_module.py`)
by torch's runtime (`stage_runtime.py`), with tied parameters (`stage_state.py`), optimizers for checkpoints
(`optimizer_groups.py`), clipping, and calls of other shapes.
"""
