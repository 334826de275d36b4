"""Measured seconds as curves over amounts of work, for families of operators and for collectives by grouping.

A curve is interpolated between measured amounts. The curves of operators are those of a device's preset, or
`Measurements` of a job's own devices.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.errors import reason_of


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of some work at rising amounts of it: bytes, operations, operations per byte.

    Attributes:
        amounts: rising, above zero.
        seconds: above zero and not falling, one for each amount.
        source: of published figures; empty for measurements by `autoshard.calibrate`.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for impossible values; the message says where."""
        if len(self.amounts) != len(self.seconds) or not self.amounts:
            raise ValueError(
                f"{len(self.amounts)} amounts have {len(self.seconds)} seconds: each needs one, one at least"
            )
        for index, (amount, seconds) in enumerate(zip(self.amounts, self.seconds, strict=True)):
            if not (0 < amount < float("inf") and 0 < seconds < float("inf")):
                raise ValueError(f"amount {amount:g} takes {seconds:g} s: both must be above zero, and finite")
            if index and not amount > self.amounts[index - 1]:
                raise ValueError(f"amount {amount:g} stands behind {self.amounts[index - 1]:g}: amounts must rise")
            if index and seconds < self.seconds[index - 1]:
                raise ValueError(
                    f"amount {amount:g} takes {seconds:g} s, and {self.amounts[index - 1]:g} takes "
                    f"{self.seconds[index - 1]:g} s: more never takes less"
                )

    def at(self, amount: float) -> float:
        """Return the seconds of any amount.

        Returns:
            amount / rate, the rate interpolated linearly between the rates at the measured amounts on either side.
            Below all measured amounts the seconds of the smallest; above them the rate of the largest. Continuous, and
            never falling.

        Source: TensorOpt 3.2, "Improving cost estimation accuracy": bandwidth is measured at powers of two of bytes,
        and interpolated between the two on either side.
        """
        after = bisect_right(self.amounts, amount)
        if after == 0:
            # Nearly all latency.
            return self.seconds[0]
        low, low_seconds = self.amounts[after - 1], self.seconds[after - 1]
        if after == len(self.amounts):
            return low_seconds * amount / low
        high, high_seconds = self.amounts[after], self.seconds[after]
        low_rate, high_rate = low / low_seconds, high / high_seconds
        return amount / (low_rate + (high_rate - low_rate) * (amount - low) / (high - low))

    @property
    def rates(self) -> tuple[float, ...]:
        """Amount per second at every amount."""
        return tuple(amount / seconds for amount, seconds in zip(self.amounts, self.seconds, strict=True))

    @staticmethod
    def of_rates(amounts: Iterable[float], rates: Iterable[float], source: str = "") -> Curve:
        """Return the curve through published rates, in amounts per second, which benchmarks print."""
        amounts = tuple(amounts)
        return Curve(amounts, tuple(amount / rate for amount, rate in zip(amounts, rates, strict=True)), source)

    @staticmethod
    def slowest(curves: Sequence[Curve]) -> Curve:
        """Return the maximum of the curves, at every amount of any of them."""
        if len(curves) == 1:
            return curves[0]
        amounts = tuple(sorted({amount for curve in curves for amount in curve.amounts}))
        sources = "; ".join(dict.fromkeys(curve.source for curve in curves if curve.source))
        seconds = (max(curve.at(amount) for curve in curves) for amount in amounts)
        # Rounding may make seconds fall.
        return Curve(amounts, tuple(itertools.accumulate(seconds, max)), sources)

    @staticmethod
    def through(amounts: Iterable[float], seconds: Iterable[float]) -> Curve:
        """Return the non-decreasing curve nearest to noisy measurements (isotonic regression).

        Neighbours that fall get their mean, until nothing falls (the pool-adjacent-violators algorithm). The distance
        is the sum of squared differences of logarithms, that is, of relative errors.
        """
        # Geometric mean of a run of measurements, and their number.
        levels: list[tuple[float, int]] = []
        for level in seconds:
            count = 1
            while levels and levels[-1][0] > level:
                before, many = levels.pop()
                level = (level**count * before**many) ** (1 / (count + many))
                count += many
            levels.append((level, count))
        means = (level for level, count in levels for _ in range(count))
        # Rounding may make neighbours fall.
        return Curve(tuple(amounts), tuple(itertools.accumulate(means, max)))


FLOPS, BYTES, INTENSITY = "flops", "bytes", "flops_per_byte"

OperatorCurves = Mapping[tuple[str, str, str], Curve]
"""Family of operators, name of the dtype, unit of the amounts -> seconds.

Amounts are `FLOPS`, for operators that compute more than they move; `BYTES` read and written, for all others;
`INTENSITY`, operations per byte, where the seconds are those of one byte.
"""

# Families of operators with similar times: the measurements of one operator represent its family.
_FAMILIES = {
    "mm": ("addmm", "linear", "matmul", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_scaled_mm", "_grouped_mm"),
    "bmm": ("baddbmm", "addbmm"),
    "convolution": ("conv2d",),
    "convolution_backward": (),
    "attention": (
        "scaled_dot_product_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "attention_backward": (
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    ),
    "batch_norm": (
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit",
        "native_batch_norm",
        "cudnn_batch_norm",
    ),
    "batch_norm_backward": ("native_batch_norm_backward", "cudnn_batch_norm_backward"),
    "layer_norm": ("native_layer_norm", "native_group_norm", "rms_norm"),
    "layer_norm_backward": ("native_layer_norm_backward", "native_group_norm_backward", "rms_norm_backward"),
    "softmax": ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"),
    "softmax_backward": ("_softmax_backward_data", "_log_softmax_backward_data"),
    "max_pool": ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
    "max_pool_backward": ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
    "gelu": ("gelu", "erf"),
    "gelu_backward": ("gelu_backward",),
    "silu": ("silu", "sigmoid", "silu_backward", "mish", "hardswish"),
    "exp": ("exp", "log", "log1p", "expm1", "sin", "cos", "softplus"),
    "tanh": ("tanh",),
    "sum": ("sum", "mean", "amax", "amin", "var", "norm", "linalg_vector_norm"),
    "copy": ("clone", "contiguous", "_to_copy"),
    "view": ("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "_unsafe_view"),
    "cat": ("cat", "stack", "constant_pad_nd", "slice_backward", "select_backward", "slice_scatter", "select_scatter"),
    "index": ("embedding", "index", "_unsafe_index", "index_select", "gather"),
    "index_put": ("embedding_dense_backward", "index_put", "_unsafe_index_put", "index_add", "scatter", "scatter_add"),
}

_FAMILY_OF = {name: leader for leader, names in _FAMILIES.items() for name in (leader, *names)}
_SIMILAR_DTYPES = {"float16": "bfloat16", "complex64": "float32", "complex128": "float64"}


def family(operator: str, default: str) -> str:
    """Return the family of an operator, by its name without namespace and overload; `default` where it has none."""
    return _FAMILY_OF.get(operator, default)


def operator_seconds(
    curves: OperatorCurves, operator: str, flops: float, bytes: float, dtype: torch.dtype
) -> float | None:
    """Return the seconds of one operator; None where its family has no curve.

    Args:
        curves: of the device.
        operator: its name without namespace and overload, such as `"mm"`.
        flops: floating-point operations; 0 for an operator that is priced by its bytes.
        bytes: read and written.
        dtype: of the operands; a dtype without curves uses those of the most similar dtype.

    Returns:
        Without flops, the seconds of its bytes. With flops, the largest of: the seconds of its operations, those of
        moving its bytes, and those of operators with as few operations per byte, such as a product of narrow matrices
        or attention over a short sequence.
    """
    name = str(dtype).removeprefix("torch.")
    # Every dtype with curves has one of "add", which prices all operators without a curve.
    name = name if ("add", name, BYTES) in curves else _SIMILAR_DTYPES.get(name, "float32")
    moved = _curve(curves, "add", name, BYTES)
    if not flops:
        # An operator without a family moves its bytes as an addition does.
        curve = _curve(curves, family(operator, "add"), name, BYTES) or moved
        return None if curve is None else curve.at(bytes)
    kind = family(operator, "mm")
    work = _curve(curves, kind, name, FLOPS) or _curve(curves, "mm", name, FLOPS)
    # Between the two bounds of the roofline, narrow products reach neither the rate of operations nor that of bytes.
    narrow = _curve(curves, kind, name, INTENSITY)
    if work is None or moved is None:
        return None
    by_intensity = bytes * narrow.at(flops / bytes) if narrow is not None and bytes else 0.0
    return max(work.at(flops), moved.at(bytes), by_intensity)


def _curve(curves: OperatorCurves, operator: str, dtype: str, amounts: str) -> Curve | None:
    return curves.get((operator, dtype, amounts)) or curves.get((operator, "float32", amounts))


def slowest_curves(kinds: Sequence[OperatorCurves]) -> dict[tuple[str, str, str], Curve]:
    """Return the slowest curves, for those that devices of all kinds have."""
    # A curve of some devices only can't bound the others.
    shared = [key for key in kinds[0] if all(key in curves for curves in kinds)]
    return {key: Curve.slowest([curves[key] for curves in kinds]) for key in shared}


def scaled_curves(curves: OperatorCurves, compute: float, memory: float) -> dict[tuple[str, str, str], Curve]:
    """Return the curves of a device with `compute` times the operations and `memory` times the bytes per second.

    Amounts are scaled, not seconds, so that the latency of an operator, the seconds of the smallest amount, is kept.
    """
    scaled = {}
    for (operator, dtype, unit), curve in curves.items():
        if unit == INTENSITY:
            # The seconds of one byte have no latency. At few operations per byte, the slower rate counts.
            pace = min(compute, memory)
            by_pace = Curve(curve.amounts, tuple(seconds / pace for seconds in curve.seconds), curve.source)
        else:
            pace = compute if unit == FLOPS else memory
            by_pace = Curve(tuple(amount * pace for amount in curve.amounts), curve.seconds, curve.source)
        scaled[operator, dtype, unit] = by_pace
    return scaled


def to_records(curves: OperatorCurves) -> list[dict[str, Any]]:
    """Return the curves as JSON data."""
    return [
        {"operator": operator, "dtype": dtype, "amounts_are": unit, **curve_data(curve)}
        for (operator, dtype, unit), curve in curves.items()
    ]


def from_records(records: Sequence[Mapping[str, Any]], place: str) -> dict[tuple[str, str, str], Curve]:
    """Return the curves in JSON data that follows the schema.

    Raises:
        ValueError: amounts do not rise, or seconds fall; the message says where, below `place`.
    """
    return {
        (record["operator"], record["dtype"], record["amounts_are"]): curve_of(record, f"{place}.{index}")
        for index, record in enumerate(records)
    }


def curve_data(curve: Curve) -> dict[str, Any]:
    """Return a curve as JSON data."""
    source = {"source": curve.source} if curve.source else {}
    return {"amounts": list(curve.amounts), "seconds": list(curve.seconds), **source}


def curve_of(record: Mapping[str, Any], place: str) -> Curve:
    """Return the curve in JSON data, given by seconds or by rates.

    Raises:
        ValueError: the curve is not valid; the message names `place`.
    """
    try:
        source = record.get("source", "")
        if "rates" in record:
            return Curve.of_rates(record["amounts"], record["rates"], source)
        return Curve(tuple(record["amounts"]), tuple(record["seconds"]), source)
    except ValueError as error:
        raise ValueError(f"{place}: {reason_of(error)}") from error


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups into which a mesh axis splits all devices: `size` devices each, with ranks `stride` apart."""

    size: int
    stride: int

    def groups(self, devices: int) -> list[range]:
        """Return the ranks of every group, of `devices` in total."""
        reach = self.stride * self.size
        return [range(rank, rank + reach, self.stride) for rank in range(devices) if rank % reach < self.stride]

    def spans_hosts(self, devices: int, host_of: Callable[[int], int]) -> bool:
        """Return True if any group holds ranks of different hosts, given the host of every rank."""
        # Hosts hold consecutive ranks: the ends of a group are the farthest apart.
        return any(host_of(ranks[0]) != host_of(ranks[-1]) for ranks in self.groups(devices))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of collectives and operators on all devices at once.

    Attributes:
        devices: number of devices that took part.
        collectives: by kind and grouping, seconds by the bytes that one rank holds before; all groups at once.
        operators: seconds on one device while all others do the same (`OperatorCurves`).
    """

    devices: int
    collectives: dict[tuple[str, Grouping], Curve] = field(hash=False)
    operators: dict[tuple[str, str, str], Curve] = field(hash=False)

    def to_data(self) -> dict[str, Any]:
        """Return the measurements as JSON data."""
        return {
            "devices": self.devices,
            "collectives": [
                {"kind": kind, "size": grouping.size, "stride": grouping.stride, **curve_data(curve)}
                for (kind, grouping), curve in self.collectives.items()
            ],
            "operators": to_records(self.operators),
        }

    @staticmethod
    def from_data(data: dict[str, Any]) -> Measurements:
        """Return the measurements in JSON data that follows the schema.

        Raises:
            ValueError: amounts do not rise, seconds fall, or the devices cannot be split into the groups; the message
                says where.
        """
        collectives = {}
        for index, record in enumerate(data["collectives"]):
            grouping = Grouping(record["size"], record["stride"])
            # As in a file edited by hand, or of another job: these groups cannot exist.
            if data["devices"] % (grouping.size * grouping.stride):
                raise ValueError(
                    f"measured.collectives.{index}: {data['devices']} devices cannot be split into groups of "
                    f"{grouping.size} whose ranks lie {grouping.stride} apart; was this measured on another mesh?"
                )
            collectives[record["kind"], grouping] = curve_of(record, f"measured.collectives.{index}")
        return Measurements(data["devices"], collectives, from_records(data["operators"], "measured.operators"))
