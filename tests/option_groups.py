"""Options of tests in one flat mapping, grouped as the public functions take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autoshard import Pipeline, Search

GROUPS = {"search": Search, "pipeline": Pipeline}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the fields of `Search` and `Pipeline` in these."""
    keywords = dict(options)
    for group, kind in GROUPS.items():
        given = {field.name: keywords.pop(field.name) for field in fields(kind) if field.name in keywords}
        if given:
            keywords[group] = kind(**given)
    return keywords
