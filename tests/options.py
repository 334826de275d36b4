"""Options of planning as `parallelize` hands them on, with nothing said but what a test changes."""

from __future__ import annotations

from typing import Any

from autoshard.options import Options, check_options
from tests.training import fast_links


def options(device_type: str | None = None, **changes: Any) -> Options:
    """The options, on fast links."""
    said: dict[str, Any] = {
        "hints": None,
        "optimizer": None,
        "optimizer_bytes_per_element": None,
        "cluster": fast_links(),
        "inputs": "global",
        "input_placements": None,
        "output_placements": None,
        "method": "auto",
        "time_limit": 30.0,
        "dynamic": None,
        "mp_policy": None,
        "effort": "full",
        "work_limit": None,
        "verbose": False,
    }
    return check_options(device_type, **{**said, **changes})
