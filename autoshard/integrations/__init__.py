"""Adapters for frameworks that train models: one module for each, which needs the package of the framework."""
