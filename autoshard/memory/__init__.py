"""Live tensors of a step, their bytes, the optimizer's memory, and the search for a plan within a limit."""
