"""Adapters for libraries that train models: one module for each, which needs the package of its name."""
