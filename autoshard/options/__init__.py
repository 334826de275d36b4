"""The options of a user as one object, and the targets that planners make of them."""

from autoshard.options.options import (
    EFFORTS,
    METHODS,
    OFFLOAD,
    OFFLOAD_OPTIMIZER,
    RECOMPUTE,
    Hints,
    MeshKeywords,
    OptionKeywords,
    Options,
    Pipeline,
    Placements,
    Search,
    Shares,
    collect_options,
)

__all__ = [
    "EFFORTS",
    "METHODS",
    "OFFLOAD",
    "OFFLOAD_OPTIMIZER",
    "RECOMPUTE",
    "Hints",
    "MeshKeywords",
    "OptionKeywords",
    "Options",
    "Pipeline",
    "Placements",
    "Search",
    "Shares",
    "collect_options",
]
