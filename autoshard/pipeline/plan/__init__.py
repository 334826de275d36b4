"""The plan of a pipeline."""
