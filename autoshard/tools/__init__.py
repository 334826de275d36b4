"""Tools around the library: the command line, comparisons, checks, and questions about plans. Nothing imports them.

`doctor` reports all that stops a capture. `verify` runs a plan on all ranks in this process (`all_ranks.py`) beside one
device, and finds operators that differ (`operator_faults.py`). `selfcheck` runs small models on a new machine.
`compare` shows a plan beside the standard layouts of the planner, and says the nearest as flags of other tools. `cli`
has a module for a group of verbs, and models in `targets.py`. Tools do not import one another; the command line imports
all.
"""
