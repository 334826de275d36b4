"""When a search for a pipeline ends before its end."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Stopping:
    """When a search for a pipeline ends before its end.

    Attributes:
        deadline: `time.monotonic()` seconds at which it ends with the best plan met, or none.
        interrupted: whether Ctrl-C ended it, and the plan is the best one met until then.
    """

    deadline: float = math.inf
    interrupted: bool = False
