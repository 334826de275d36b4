"""Adapters for libraries that train models. Each imports its library only when it is imported itself."""
