"""Seconds of operators by curves over the work that they do: those of a device's preset, or measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.cluster.curve import Curve
from autoshard.cluster.operators import family

FLOPS, BYTES, INTENSITY = "flops", "bytes", "flops_per_byte"

OperatorCurves = Mapping[tuple[str, str, str], Curve]
"""Family of operators, name of the dtype, what the amounts are -> seconds.

Amounts are `FLOPS`, for operators that compute more than they move; `BYTES` read and written, for all others;
`INTENSITY`, operations per byte, where the seconds are those of one byte.
"""

_SIMILAR_DTYPES = {"float16": "bfloat16", "complex64": "float32", "complex128": "float64"}


def operator_seconds(
    curves: OperatorCurves, operator: str, flops: float, bytes: float, dtype: torch.dtype
) -> float | None:
    """Seconds of one operator; None where neither it nor any like it has a curve.

    Args:
        curves: of the device.
        operator: its name without namespace and overload, such as `"mm"`.
        flops: floating-point operations, 0 for an operator whose time is that of its bytes.
        bytes: read and written.
        dtype: of the operands; one that has no curves runs as the nearest that has.

    Returns:
        Without flops, the seconds of its bytes. With flops the largest of: the seconds of its operations, those of
        moving its bytes, and those of operators with as few operations for every byte, as a product of narrow matrices
        or attention over a short sequence has.
    """
    name = str(dtype).removeprefix("torch.")
    name = name if ("add", name, BYTES) in curves else _SIMILAR_DTYPES.get(name, "float32")
    moved = _curve(curves, "add", name, BYTES)
    if not flops:
        curve = _curve(curves, family(operator, "add"), name, BYTES) or moved
        return None if curve is None else curve.at(bytes)
    kind = family(operator, "mm")
    work = _curve(curves, kind, name, FLOPS) or _curve(curves, "mm", name, FLOPS)
    narrow = _curve(curves, kind, name, INTENSITY)
    if work is None or moved is None:
        return None
    by_intensity = bytes * narrow.at(flops / bytes) if narrow is not None and bytes else 0.0
    return max(work.at(flops), moved.at(bytes), by_intensity)


def _curve(curves: OperatorCurves, operator: str, dtype: str, amounts: str) -> Curve | None:
    return curves.get((operator, dtype, amounts)) or curves.get((operator, "float32", amounts))


def slowest_curves(kinds: Sequence[OperatorCurves]) -> dict[tuple[str, str, str], Curve]:
    """What devices of several kinds keep: the slowest of the curves that all of them have."""
    shared = [key for key in kinds[0] if all(key in curves for curves in kinds)]
    return {key: Curve.slowest([curves[key] for curves in kinds]) for key in shared}


def curves_at_speed(curves: OperatorCurves, pace: float) -> dict[tuple[str, str, str], Curve]:
    """The curves of a device that is so many times as fast: it takes as long with so many times the work.

    What an operator takes however small it is stays.
    """
    return scaled_curves(curves, pace, pace)


def scaled_curves(curves: OperatorCurves, compute: float, memory: float) -> dict[tuple[str, str, str], Curve]:
    """The curves of a device with so many times the operations and the bytes per second.

    Operators with few operations for every byte go by the slower of both.
    """
    paces = {FLOPS: compute, BYTES: memory, INTENSITY: min(compute, memory)}
    return {key: _scale_curve(curve, paces[key[2]], key[2]) for key, curve in curves.items()}


def _scale_curve(curve: Curve, pace: float, unit: str) -> Curve:
    if unit == INTENSITY:  # the seconds of one byte
        return Curve(curve.amounts, tuple(seconds / pace for seconds in curve.seconds), curve.source)
    return Curve(tuple(amount * pace for amount in curve.amounts), curve.seconds, curve.source)


def to_records(curves: OperatorCurves) -> list[dict[str, Any]]:
    """The curves as JSON data."""
    return [
        {"operator": operator, "dtype": dtype, "amounts_are": unit, **curve_data(curve)}
        for (operator, dtype, unit), curve in curves.items()
    ]


def from_records(records: Sequence[Mapping[str, Any]], place: str) -> dict[tuple[str, str, str], Curve]:
    """The curves in JSON data that follows the schema.

    Raises:
        ValueError: amounts do not rise, or seconds fall; the message says where, below `place`.
    """
    return {
        (record["operator"], record["dtype"], record["amounts_are"]): curve_of(record, f"{place}.{index}")
        for index, record in enumerate(records)
    }


def curve_data(curve: Curve) -> dict[str, Any]:
    """A curve as JSON data."""
    source = {"source": curve.source} if curve.source else {}
    return {"amounts": list(curve.amounts), "seconds": list(curve.seconds), **source}


def curve_of(record: Mapping[str, Any], place: str) -> Curve:
    """The curve in JSON data, given by seconds or by rates.

    Raises:
        ValueError: it is none; the message names `place`.
    """
    try:
        source = record.get("source", "")
        if "rates" in record:
            return Curve.of_rates(record["amounts"], record["rates"], source)
        return Curve(tuple(record["amounts"]), tuple(record["seconds"]), source)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
