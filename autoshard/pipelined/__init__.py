"""Pipelines at work: the plan of stages on a mesh, and the module that runs them."""
