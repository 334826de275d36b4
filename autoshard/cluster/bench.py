"""Measurements of the devices of a job: operators, collectives, and both at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autoshard.cluster.collective_samples import KINDS, chain_calls, group, make_blocking, make_collective, make_matmul
from autoshard.cluster.curve import Curve
from autoshard.cluster.measurements import Grouping
from autoshard.cluster.operator_curves import INTENSITY
from autoshard.cluster.operator_samples import Sample, SampleCall, samples
from autoshard.cluster.stopwatch import Rotation, Stopwatch

# Power of two of the bytes of the smallest collective.
_SMALLEST_POWER = 8
# Least part of the time of compute and collective together that is left to the collective by noise.
_LEAST_SHARE = 0.01
# Bytes of the collective that is timed beside compute, so that latency hardly counts.
_OVERLAP_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Bench:
    """Measurements that all processes make together.

    Attributes:
        stopwatch: times them.
        report: called with the name of each measurement before it is made.
    """

    stopwatch: Stopwatch
    report: Callable[[str], None]

    def operators(self, dtype: torch.dtype, everything: bool = True) -> Iterator[tuple[tuple[str, str, str], Curve]]:
        """Yield the curves of all families, or of matrix products alone, under the keys of `Measurements.operators`."""
        name = str(dtype).removeprefix("torch.")
        self.report(f"{'operators' if everything else 'matrix products'} in {name}")
        chosen = samples(dtype, self.stopwatch.device)[: None if everything else 1]
        timed = [times for times in map(self._time_sample, chosen) if times.seconds]
        # Operators that are called again and again find their code in the caches of the host; in a program others come
        # between. The difference is added to all of them but views, which do nothing.
        extra = self._interleaving_overhead(timed)
        for times in timed:
            sample = times.sample
            yield (sample.family, name, sample.amounts_are), times.curve(0.0 if sample.family == "view" else extra)

    def _time_sample(self, sample: Sample) -> _SampleTimes:
        """Return a sample's calls and seconds; empty where the device has no such operator in this dtype."""
        amounts: list[tuple[float, float]] = []
        rotations: list[Rotation] = []
        estimates: list[float] = []
        for size in sample.sizes:
            call = _make_call(sample, size)
            [missing] = self.stopwatch.mean_of_ranks([call is None])
            # On any process: all must stop at the same size.
            if call is None or missing:
                break
            amounts.append(call[0].amounts())
            rotations.append(call[1])
            estimates.append(self.stopwatch.rough_seconds(rotations[-1]))
            if estimates[-1] > self.stopwatch.patience:
                break
        # The data of all but the smallest call are freed: a device that is short of memory is slow.
        return _SampleTimes(sample, rotations[:1], amounts, self.stopwatch.mean_seconds(rotations, estimates))

    def _interleaving_overhead(self, timed: Sequence[_SampleTimes]) -> float:
        """Return the seconds that a call takes longer behind calls of all other families, by the smallest calls."""
        # The smallest calls by intensity have many bytes, and the overhead would be lost in their noise.
        small = [times for times in timed if times.sample.amounts_are != INTENSITY]
        alone = sum(times.seconds[0] for times in small)
        chain = chain_calls(*[call for times in small for call in times.smallest])
        [together] = self.stopwatch.mean_seconds([chain], [alone])
        return max(0.0, together - alone) / len(small)

    def collectives(self, grouping: Grouping, largest: int) -> Iterator[tuple[tuple[str, Grouping], Curve]]:
        """Yield the curves of all collectives in one grouping, up to `largest` bytes, under the keys of `Measurements`.

        Like operators, collectives take turns with others on data of their own.
        """
        self.report(f"collectives in groups of {grouping.size}, {grouping.stride} ranks apart")
        # A collective is timed behind a stretch of compute, whose time is subtracted: in a step, too, devices arrive at
        # it one after the other, and processes that share a processor have to be called back to it.
        compute = make_matmul(self.stopwatch.device)
        compute_estimate = self.stopwatch.rough_seconds(compute)
        sizes = [2**power for power in range(_SMALLEST_POWER, max(_SMALLEST_POWER, largest.bit_length() - 1) + 1)]
        with group(grouping) as local:
            for kind in KINDS:
                works: list[Callable[[], object]] = [compute]
                estimates = [compute_estimate]
                for size in sizes:
                    make = functools.partial(_make_blocking_collective, kind, size, local, self.stopwatch.device)
                    works.append(chain_calls(compute, Rotation(make, size * (1 + grouping.size))))
                    estimates.append(self.stopwatch.rough_seconds(works[-1]))
                    if estimates[-1] > self.stopwatch.patience:
                        break
                alone, *together = self.stopwatch.mean_seconds(works, estimates)
                seconds = [max(combined - alone, _LEAST_SHARE * combined) for combined in together]
                yield (kind, grouping), Curve.through(sizes[: len(seconds)], seconds)

    def contention(self, grouping: Grouping) -> float:
        """Return the seconds that a second of communication adds to compute, from a collective beside matrix products.

        With as much compute as communication, both together take between the time of one (0) and of both (1); more
        than that where they disturb each other.
        """
        self.report("collectives beside compute")
        # A difference of times needs more timings than a time does: four times as many is a guess that works.
        watch = replace(self.stopwatch, repeats=4 * self.stopwatch.repeats)
        compute = make_matmul(watch.device)
        with group(grouping) as local:
            start = make_collective("all_reduce", _OVERLAP_BYTES, local, watch.device)
            sending = make_blocking(start)
            estimates = [watch.rough_seconds(sending), watch.rough_seconds(compute)]
            # As many products as take the time of the collective: the comparison is then between equal stretches.
            communication, product = watch.mean_seconds([sending, compute], estimates)
            computing = chain_calls(*[compute] * max(1, round(communication / product)))

            def overlapping() -> None:
                pending = start()
                computing()
                make_blocking(lambda: pending)()

            estimates = [communication, communication, 2 * communication]
            sent, computed, together = watch.mean_seconds([sending, computing, overlapping], estimates)
        return max(0.0, (together - max(sent, computed)) / min(sent, computed))


@dataclass(frozen=True, slots=True)
class _SampleTimes:
    """A sample that was timed.

    Attributes:
        sample: the sample.
        smallest: its smallest call, if it has any.
        amounts: operations and bytes of each call.
        seconds: of each call.
    """

    sample: Sample
    smallest: list[Rotation]
    amounts: list[tuple[float, float]]
    seconds: list[float]

    def curve(self, extra: float) -> Curve:
        """Return the curve of the seconds, with `extra` seconds for each call."""
        points = {}
        for (flops, bytes), seconds in zip(self.amounts, self.seconds, strict=True):
            match self.sample.amounts_are:
                case "flops":
                    points[flops] = seconds + extra
                case "bytes":
                    points[bytes] = seconds + extra
                # Operations per byte, and the seconds of one byte.
                case _:
                    points[flops / bytes] = (seconds + extra) / bytes
        return Curve.through(points, points.values())


def _make_call(sample: Sample, size: int) -> tuple[SampleCall, Rotation] | None:
    """Return a call of a size and copies of it; None if the operator refuses them or they do not fit the memory."""
    try:
        call = sample.make(size)
        return call, Rotation(functools.partial(sample.make, size), call.amounts()[1])
    # Out of memory is a RuntimeError too: a size that does not fit ends the curve, as an unsupported dtype does.
    except RuntimeError:
        return None


def _make_blocking_collective(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    return make_blocking(make_collective(kind, size, group, device))
