"""What work and words cost on a cluster: the prices of every strategy and every reshard."""

from __future__ import annotations

import math
import warnings

import torch

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Link
from autoshard.cluster.measurements import Grouping
from autoshard.cluster.operator_curves import operator_seconds
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

# Operations on local memory alone, in times that the bytes held are moved (one read and one write).
_LOCAL_KINDS = ("slice", "make_partial", "copy")

_CROSSINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often a collective's volume goes round the ring; a shift is a single message."""


class CostModel:
    """Seconds of compute and of collectives of one mesh laid out on one cluster.

    Ranks are laid over the mesh in row-major order, and over the hosts as the cluster has them. Where devices differ,
    everything takes as long as on the slowest one of the mesh.

    Raises:
        MeshError: the cluster has fewer devices than the mesh.
    """

    def __init__(self, cluster: Cluster, mesh: MeshShape) -> None:
        self.cluster = cluster.first(mesh.size)
        self.mesh = mesh
        axes = range(mesh.ndim)
        self._spanning = tuple(self._spans_hosts(axis) for axis in axes)
        self._links = tuple(self.cluster.between if spans else self.cluster.inside for spans in self._spanning)
        self._ring_latencies = tuple(self._ring_latency(axis) for axis in axes)
        self._ports = tuple(self._ports_of(axis) for axis in axes)
        strides = (math.prod(mesh.sizes[axis + 1 :]) for axis in range(mesh.ndim))
        self._groupings = tuple(Grouping(size, stride) for size, stride in zip(mesh.sizes, strides, strict=True))
        measured = self.cluster.measured
        self._operators = self.cluster.device.operators if measured is None else measured.operators
        self._warn_of_estimates()

    def _warn_of_estimates(self) -> None:
        """Say which axes group devices as no measured collective does."""
        measured = self.cluster.measured
        if measured is None:
            return
        known = {grouping for _, grouping in measured.collectives}
        estimated = [
            f"{axis.name} ({grouping.size} devices, {grouping.stride} apart in rank)"
            for axis, grouping in zip(self.mesh.axes, self._groupings, strict=True)
            if grouping.size > 1 and grouping not in known
        ]
        if estimated:
            warnings.warn(
                f"cluster {self.cluster.name} was measured on {measured.devices} devices, and no collective over mesh "
                f"axis {', '.join(estimated)}: they are estimated from the latency and bandwidth that fit the others. "
                f"Measure them by autoshard.calibrate on a mesh of {self.mesh.size} devices.",
                stacklevel=3,
            )

    def axis_link(self, axis: int) -> Link:
        """The link that a collective over `axis` runs at: the slowest that any of its groups must use.

        Groups that lie inside one host use the cluster's `inside`; if any group spans hosts, all pay `between`.

        Source: TensorOpt 3.2, which prices a collective by the links of its device partitioning; Whale 3.3.
        """
        return self._links[axis]

    def collective(self, kind: str, bytes: int, axis: int) -> float:
        """Time of one collective over `axis`, or of one of the local steps of a reshard.

        Args:
            kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"`, `"shift"` (each rank sends all it
                holds to the next one), or, local, `"slice"`, `"make_partial"`, `"copy"`.
            bytes: what one rank holds before it.
            axis: the mesh axis, of size n; over a single device everything is free.

        Returns:
            On a cluster with measurements, and an axis that groups devices as they were grouped then (the same size and
            stride, whatever the other axes), the measured seconds, interpolated between powers of two of bytes; a local
            step takes the measured time of a copy.
            Where the link says what collectives of the kind reach (`Link.collectives`), the seconds of as many bytes
            sent by a device, and the latencies by which the ring, or for an all-reduce the tree, is longer than the
            measured one.
            Else seconds by the latency-bandwidth model of ring collectives, W the latency of the n-1 hops of the ring
            and B the bandwidth of the link: all-gather W + bytes(n-1)/B; reduce-scatter and all-to-all
            W + bytes(n-1)/(n B); shift one latency of the link + bytes/B; all-reduce twice a reduce-scatter, or, where
            that is faster, up and down a binary tree: 2 ceil(log2 n) hops and 2 bytes/B. A local step takes as long
            as a copy of what it keeps.
            A group that has several devices on every host leaves it by the ports of all of them: between hosts each
            sends its part, as fast as the devices inside a host can hand on the whole.

        Raises:
            ValueError: `kind` is none of these.

        Source: TensorOpt 3.2, "Improving cost estimation accuracy": a collective's time, not its volume, is the cost.
        """
        measured = self._measured_seconds(kind, bytes, axis)
        if measured is not None:
            return measured
        reached = self._curve_seconds(kind, bytes, axis)
        if reached is not None:
            return reached
        waiting, moving = min(self._algorithms(kind, bytes, axis), key=sum)
        return waiting + moving

    def gradient_collective(self, kind: str, bytes: int, axis: int) -> float:
        """Time of a collective by which a gradient goes to its optimizer, as `collective`.

        Gradients are reduced together, up to `GRADIENT_BUCKET_BYTES` at once: a reduction pays its share of the latency
        only, or, where there are curves of collectives, its share of such a group's time.

        Source: Whale 5.1.1, "grouped" AllReduce.
        """
        if kind not in ("all_reduce", "reduce_scatter"):
            return self.collective(kind, bytes, axis)
        group, share = max(bytes, GRADIENT_BUCKET_BYTES), min(1.0, bytes / GRADIENT_BUCKET_BYTES)
        seconds = self._measured_seconds(kind, group, axis)
        seconds = self._curve_seconds(kind, group, axis) if seconds is None else seconds
        if seconds is not None:
            return seconds * share
        return min(share * waiting + moving for waiting, moving in self._algorithms(kind, bytes, axis))

    def _algorithms(self, kind: str, bytes: int, axis: int) -> list[tuple[float, float]]:
        """Seconds that a collective waits for latencies, and in which it moves bytes, by every known algorithm."""
        size = self.mesh.axes[axis].size
        if size == 1:
            return [(0.0, 0.0)]
        if kind in _LOCAL_KINDS:
            kept = bytes / size if kind == "slice" else bytes
            copied = operator_seconds(self.cluster.device.operators, "clone", 0.0, 2 * kept, torch.float32)
            return [(0.0, 2 * kept / self.cluster.device.memory_bandwidth if copied is None else copied)]
        wait = self._ring_latencies[axis]
        whole = bytes / self._bandwidth(axis)
        match kind:
            case "all_gather":
                return [(wait, whole * (size - 1))]
            case "reduce_scatter" | "all_to_all":
                return [(wait, whole * (size - 1) / size)]
            case "all_reduce":
                tree = 2 * math.ceil(math.log2(size)) * self._links[axis].latency
                return [(2 * wait, 2 * whole * (size - 1) / size), (tree, 2 * whole)]
            case "shift":
                return [(self._links[axis].latency, whole)]
        raise ValueError(f"there is no collective {kind!r}.")

    def _curve_seconds(self, kind: str, bytes: int, axis: int) -> float | None:
        """Seconds by the curve of the axis' link; None where it has none, or nothing is to be sent."""
        link, size = self._links[axis], self.mesh.sizes[axis]
        known = link.collectives.get(kind)
        if known is None or size == 1:
            return None
        part = bytes if kind == "all_gather" else bytes / size
        sent = bytes if kind == "shift" else _CROSSINGS[kind] * part * (size - 1)
        seconds = known.curve.at(sent / self._ports[axis])
        if kind == "all_reduce":
            seconds += 2 * link.latency * max(0, _levels(size) - _levels(known.size))
        elif kind != "shift":
            seconds += max(0.0, self._ring_latencies[axis] - self._latency_of_ring(axis, known.size))
        # Fewer devices gain less by a switch that adds up; and what goes between hosts goes between their devices.
        least = sent / self._bandwidth(axis) if size < known.size or self._spanning[axis] else 0.0
        return max(seconds, least)

    def _bandwidth(self, axis: int) -> float:
        """Bytes per second that go over the link of one device, all ports that the group has on a host together."""
        reached = self._links[axis].bandwidth * self._ports[axis]
        return min(reached, self.cluster.inside.bandwidth) if self._ports[axis] > 1 else reached

    def _ports_of(self, axis: int) -> int:
        """Devices of a group that share a host and so send by their ports together; 1 inside a host.

        Measured links were fitted to the groups as they are: their figures are of whole groups.
        """
        if not self._spanning[axis] or self.cluster.measured is not None:
            return 1
        size = self.mesh.sizes[axis]
        return max(1, size // self._hosts(axis))

    def _hosts(self, axis: int) -> int:
        """Hosts of the first group of an axis."""
        size, stride = self.mesh.sizes[axis], math.prod(self.mesh.sizes[axis + 1 :])
        return len({self.cluster.host_of(rank * stride) for rank in range(size)})

    def _measured_seconds(self, kind: str, bytes: int, axis: int) -> float | None:
        """Seconds by what was measured; None where nothing was, or nothing is to be sent."""
        measured = self.cluster.measured
        size = self.mesh.sizes[axis]
        if measured is None or size == 1:
            return None
        if kind in _LOCAL_KINDS:
            kept = bytes / size if kind == "slice" else bytes
            return measured.operator_seconds("clone", 0.0, 2 * kept, torch.float32)
        curve = measured.collectives.get((kind, self._groupings[axis]))
        return None if curve is None else curve.at(bytes)

    def _ring_latency(self, axis: int) -> float:
        """Seconds of one trip around the ring of an axis: as few of its hops as possible leave a host."""
        outside = max(1, self._hosts(axis) - 1) if self.spans_hosts(axis) else 0
        return self._hop_latencies(self.mesh.sizes[axis], outside)

    def _latency_of_ring(self, axis: int, size: int) -> float:
        """Likewise of a ring over so many devices of whole hosts, if the axis spans hosts."""
        outside = max(1, -(-size // self.cluster.devices_per_host) - 1) if self.spans_hosts(axis) else 0
        return self._hop_latencies(size, outside)

    def _hop_latencies(self, size: int, outside: int) -> float:
        return self.cluster.between.latency * outside + self.cluster.inside.latency * (size - 1 - outside)

    def compute(self, flops: float, bytes: float, dtype: torch.dtype, operator: str = "add") -> float:
        """Time of one operator on one device: as measured, or a roofline over a fixed cost per operator.

        Args:
            flops: floating-point operations done on the device.
            bytes: read and written by the device.
            dtype: of the operands, which sets the peak rate.
            operator: its name without namespace and overload, such as `"mm"`; measurements tell operators apart.

        Returns:
            Seconds: those of operators of its family where there are curves of them, measured ones or those of the
            device (`operator_curves.operator_seconds`), else max(flops / peak, bytes / memory bandwidth) + kernel
            overhead.

        Source: Whale 3.3 profiles a TaskGraph by its operations and bytes against those of the device; the roofline is
        the same without the run.
        """
        device = self.cluster.device
        seconds = operator_seconds(self._operators, operator, flops, bytes, dtype)
        if seconds is not None:
            return seconds
        return max(flops / device.peak(dtype), bytes / device.memory_bandwidth) + device.kernel_overhead

    def view(self) -> float:
        """Time of an operator that makes a view: what a call costs where calls were measured, else nothing."""
        measured = self.cluster.measured
        seconds = None if measured is None else measured.operator_seconds("view", 0.0, 0.0, torch.float32)
        return seconds or 0.0

    def spans_hosts(self, axis: int) -> bool:
        """Whether the first and the last rank of some group of `axis` sit on different hosts."""
        return self._spanning[axis]

    def _spans_hosts(self, axis: int) -> bool:
        sizes = self.mesh.sizes
        stride = 1
        for size in sizes[axis + 1 :]:
            stride *= size
        reach = stride * (sizes[axis] - 1)
        host_of = self.cluster.host_of
        firsts = (rank for rank in range(self.mesh.size) if rank // stride % sizes[axis] == 0)
        return any(host_of(rank) != host_of(rank + reach) for rank in firsts)


def _levels(size: int) -> int:
    """Height of a binary tree of so many devices."""
    return math.ceil(math.log2(size))
