"""Pipelines: stages, their schedule, their plans, and the module that runs them."""
