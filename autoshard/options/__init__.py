"""A user's options as one object, and the targets that planners derive from them.

Choices of options, for command lines and files of one's own: `EFFORTS` and `METHODS` of `Search`, `SCHEDULES` of
`Pipeline`, `RECOMPUTE`, `OFFLOAD` and `OFFLOAD_OPTIMIZER` of `Options`, and `SEARCH_OPTIONS`, the `option` of
`autoshard.search`. Types for functions that pass options on: `OptionKeywords`, of `**keywords`, and `Hints`.
"""

from autoshard.options.options import (
    EFFORTS,
    METHODS,
    OFFLOAD,
    OFFLOAD_OPTIMIZER,
    RECOMPUTE,
    SCHEDULES,
    SEARCH_OPTIONS,
    Hints,
    MeshKeywords,
    OptionKeywords,
    Options,
    Pipeline,
    Placements,
    Search,
    SearchOption,
    Shares,
    collect_options,
)

__all__ = [
    "EFFORTS",
    "METHODS",
    "OFFLOAD",
    "OFFLOAD_OPTIMIZER",
    "RECOMPUTE",
    "SCHEDULES",
    "SEARCH_OPTIONS",
    "Hints",
    "MeshKeywords",
    "OptionKeywords",
    "Options",
    "Pipeline",
    "Placements",
    "Search",
    "SearchOption",
    "Shares",
    "collect_options",
]
