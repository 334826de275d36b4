"""Live tensors of a step, their bytes, and the optimizer's memory."""
