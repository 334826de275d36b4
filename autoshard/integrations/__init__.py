"""Adapters for training libraries: one module per library, which needs the package of the same name."""
