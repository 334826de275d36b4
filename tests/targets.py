"""Targets of planning as the public functions make them, with no options but those that a test gives."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from autoshard import Options, Search
from autoshard.options.target import Target
from tests.training import fast_links

_SEARCH = {field.name for field in fields(Search)}


def target(device_type: str | None = None, **changes: Any) -> Target:
    """The target of these options, those of `Search` among them, on fast links, without recomputation."""
    search = {name: changes.pop(name) for name in list(changes) if name in _SEARCH}
    defaults = {"cluster": fast_links(), "recompute": "none", "shares": None}
    return Target.of(Options(search=Search(**({"time_limit": 30.0} | search)), **(defaults | changes)), device_type)
