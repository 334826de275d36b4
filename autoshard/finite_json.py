"""JSON whose numbers are all finite: Python reads NaN, Infinity and 1e400, by which nothing can be compared."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def read(text: str) -> Any:
    """The data in a JSON text.

    Raises:
        ValueError: the text is not JSON (`json.JSONDecodeError`), or holds a number that is not finite.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
