"""The releases of torch that the library was tested with."""

from __future__ import annotations

import functools
import re

import torch

from autoshard.errors import warn_caller

NEWEST_TRIED = (2, 14)
"""Major and minor number of the newest tested release; docs/compatibility.md lists the tests."""


@functools.cache
def warn_of_untried_release(release: str = torch.__version__) -> None:
    """Warn, once per release, if torch is newer than the newest tested release."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or tuple(map(int, numbers.groups())) <= NEWEST_TRIED:
        return
    tried = ".".join(map(str, NEWEST_TRIED))
    warn_caller(
        f"torch {release} is newer than {tried}, the newest release that this version of autoshard was tried with. It "
        "may work: compare a step with one device's first (`autoshard.verify`). If it fails, look for a newer "
        f"autoshard, or install torch {tried}."
    )
