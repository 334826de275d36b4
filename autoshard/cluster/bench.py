"""What is measured of the devices of a job: operators, collectives, and both at once."""

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
from autoshard.cluster.rotation import Rotation
from autoshard.cluster.stopwatch import Stopwatch

_SMALLEST_POWER = 8  # power of two of the bytes of the smallest collective
_LEAST_SHARE = 0.01  # of the time of compute and collective together, what noise leaves the collective at least
_OVERLAP_BYTES = 2**22  # bytes of the collective that is timed beside compute: many times its latency


@dataclass(frozen=True, slots=True)
class Bench:
    """Measurements that all processes make together.

    Attributes:
        watch: times them.
        said: is told what is about to be measured.
    """

    stopwatch: Stopwatch
    report: Callable[[str], None]

    def operators(self, dtype: torch.dtype, everything: bool = True) -> Iterator[tuple[tuple[str, str, str], Curve]]:
        """The curves of all families, or of matrix products alone, under the keys of `Measured.operators`.

        An operator that is called again and again finds its code where it needs it; in a program others come between.
        What that costs is added to all of them but views, which do nothing.
        """
        name = str(dtype).removeprefix("torch.")
        self.report(f"{'operators' if everything else 'matrix products'} in {name}")
        timed = [
            self._time_sample(sample) for sample in samples(dtype, self.stopwatch.device)[: None if everything else 1]
        ]
        timed = [one for one in timed if one.seconds]
        extra = self._interleaving_overhead(timed)
        for one in timed:
            yield (
                (one.sample.family, name, one.sample.amounts_are),
                one.curve(0.0 if one.sample.family == "view" else extra),
            )

    def _time_sample(self, sample: Sample) -> _SampleTimes:
        """A sample's calls and their seconds; none where the device has no such operator in this dtype."""
        amounts: list[tuple[float, float]] = []
        rotations: list[Rotation] = []
        roughly: list[float] = []
        for size in sample.sizes:
            made = _make_call(sample, size)
            [missing] = self.stopwatch.mean_of_ranks([made is None])
            if made is None or missing:  # on any process: all stop at the same size
                break
            amounts.append(made[0].amounts())
            rotations.append(made[1])
            roughly.append(self.stopwatch.rough_seconds(rotations[-1]))
            if roughly[-1] > self.stopwatch.patience:
                break
        # Of what the others hold nothing is kept: memory that is short is slow.
        return _SampleTimes(sample, rotations[:1], amounts, self.stopwatch.mean_seconds(rotations, roughly))

    def _interleaving_overhead(self, timed: Sequence[_SampleTimes]) -> float:
        """Seconds that a call takes longer with calls of all other families before it; of calls that do little."""
        little = [one for one in timed if one.sample.amounts_are != INTENSITY]
        alone = sum(one.seconds[0] for one in little)
        [together] = self.stopwatch.mean_seconds(
            [chain_calls(*[call for one in little for call in one.smallest])], [alone]
        )
        return max(0.0, together - alone) / len(little)

    def collectives(self, grouping: Grouping, largest: int) -> Iterator[tuple[tuple[str, Grouping], Curve]]:
        """The curves of all collectives in one grouping, up to `largest` bytes, under the keys of `Measurements`.

        A collective is timed behind a stretch of compute, whose own time is taken off: in a step, too, devices arrive
        at it one after the other, and processes that share a processor have to be called back to it. Like operators,
        collectives take turns with others of data of their own.
        """
        self.report(f"collectives in groups of {grouping.size}, {grouping.stride} ranks apart")
        compute = make_matmul(self.stopwatch.device)
        computing = self.stopwatch.rough_seconds(compute)
        sizes = [2**power for power in range(_SMALLEST_POWER, max(_SMALLEST_POWER, largest.bit_length() - 1) + 1)]
        with group(grouping) as ours:
            for kind in KINDS:
                works: list[Callable[[], object]] = [compute]
                roughly = [computing]
                for size in sizes:
                    make = functools.partial(_make_blocking_collective, kind, size, ours, self.stopwatch.device)
                    works.append(chain_calls(compute, Rotation(make, size * (1 + grouping.size))))
                    roughly.append(self.stopwatch.rough_seconds(works[-1]))
                    if roughly[-1] > self.stopwatch.patience:
                        break
                own, *both = self.stopwatch.mean_seconds(works, roughly)
                seconds = [max(one - own, _LEAST_SHARE * one) for one in both]
                yield (kind, grouping), Curve.through(sizes[: len(seconds)], seconds)

    def contention(self, grouping: Grouping) -> float:
        """Seconds that a second of communication costs behind compute, from a collective beside matrix products.

        With as much compute as communication, both together take between the time of one (0) and of both (1); more
        than that where they disturb each other.
        """
        self.report("collectives beside compute")
        watch = replace(
            self.stopwatch, repeats=4 * self.stopwatch.repeats
        )  # a difference of times needs more than a time does
        compute = make_matmul(watch.device)
        with group(grouping) as ours:
            start = make_collective("all_reduce", _OVERLAP_BYTES, ours, watch.device)
            sending = make_blocking(start)
            alone, one = watch.mean_seconds(
                [sending, compute], [watch.rough_seconds(sending), watch.rough_seconds(compute)]
            )
            times = max(1, round(alone / one))
            computing = chain_calls(*[compute] * times)

            def both() -> None:
                pending = start()
                computing()
                make_blocking(lambda: pending)()

            sent, computed, together = watch.mean_seconds([sending, computing, both], [alone, alone, 2 * alone])
        return max(0.0, (together - max(sent, computed)) / min(sent, computed))


@dataclass(frozen=True, slots=True)
class _SampleTimes:
    """A sample that was timed.

    Attributes:
        sample: what it is of.
        smallest: its smallest call, if it has any.
        amounts: of its calls, each with its operations and bytes.
        seconds: of these.
    """

    sample: Sample
    smallest: list[Rotation]
    amounts: list[tuple[float, float]]
    seconds: list[float]

    def curve(self, extra: float) -> Curve:
        """Its seconds, with some more for each call."""
        unit = self.sample.amounts_are
        points = dict(
            _point(*amounts, seconds + extra, unit) for amounts, seconds in zip(self.amounts, self.seconds, strict=True)
        )
        return Curve.through(points, points.values())


def _make_call(sample: Sample, size: int) -> tuple[SampleCall, Rotation] | None:
    """A call of a size, and copies of it; None where the operator refuses them, or they do not fit the memory."""
    try:
        call = sample.make(size)
        return call, Rotation(functools.partial(sample.make, size), call.amounts()[1])
    except RuntimeError:
        return None


def _make_blocking_collective(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    return make_blocking(make_collective(kind, size, group, device))


def _point(flops: float, bytes: float, seconds: float, unit: str) -> tuple[float, float]:
    """What a call does, in the unit of its curve, and the seconds of that."""
    match unit:
        case "flops":
            return flops, seconds
        case "bytes":
            return bytes, seconds
    return flops / bytes, seconds / bytes
