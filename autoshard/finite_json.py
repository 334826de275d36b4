"""JSON of the library's files: numbers are finite, and a schema checks the content."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

import jsonschema


def read(text: str) -> Any:
    """Return the data in a JSON text.

    Raises:
        ValueError: the text is not JSON (`json.JSONDecodeError`), or holds a number that is not finite.
    """
    # Python reads NaN, Infinity and 1e400, which cannot be compared with a limit.
    try:
        return json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error


def place(error: json.JSONDecodeError) -> str:
    """Return the place where a text stops being JSON."""
    return f"it ends or breaks at line {error.lineno}, column {error.colno}"


def violation(data: object, schema: dict[str, Any]) -> str | None:
    """Return where and how data violates a schema; None if it follows the schema."""
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if error is None:
        return None
    return f"at {'.'.join(map(str, error.absolute_path)) or 'the top level'}, {error.message}"


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _whole(text: str) -> int:
    # Python refuses longer integers with an error of its own.
    return int(text) if len(text) <= sys.int_info.str_digits_check_threshold else _refuse(f"{text[:20]}...")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
