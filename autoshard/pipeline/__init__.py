"""Pipelines: the graph cut in stages, their schedule, and torch's runtime."""
