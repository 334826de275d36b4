"""The module that runs a rank of a pipeline."""
