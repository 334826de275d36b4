"""Seconds of operators and collectives on a cluster: the prices of every strategy and every reshard.

`flops` counts the floating-point operations of the operators whose time is compute, not memory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from autoshard.cluster._torch import OpOverload
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Link
from autoshard.cluster.measurements import Grouping, Measurements, operator_seconds
from autoshard.errors import warn_caller
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

# Steps of a reshard that send nothing: one read and one write.
_LOCAL_KINDS = ("slice", "make_partial", "copy")

RING_TRIPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Trips of a collective's volume around the ring; a shift is a single message."""


class CostModel:
    """Seconds of compute and of collectives of one mesh laid out on one cluster.

    Ranks are in row-major order on the mesh, and on hosts as in the cluster. Where devices differ, everything takes as
    long as on the slowest device of the mesh.

    Raises:
        MeshError: the cluster has fewer devices than the mesh.
    """

    def __init__(self, cluster: Cluster, mesh: MeshShape) -> None:
        self.cluster = cluster.first(mesh.size)
        self.mesh = mesh
        axes = range(mesh.ndim)
        self._groupings = tuple(Grouping(mesh.sizes[axis], math.prod(mesh.sizes[axis + 1 :])) for axis in axes)
        host_of = self.cluster.host_of
        self._spanning = tuple(grouping.spans_hosts(mesh.size, host_of) for grouping in self._groupings)
        self._links = tuple(self.cluster.between if spans else self.cluster.inside for spans in self._spanning)
        # Hosts of the first group of every axis, which represents the others.
        hosts = tuple(len(set(map(host_of, grouping.groups(mesh.size)[0]))) for grouping in self._groupings)
        # A ring crosses hosts as rarely as possible: once for every host but the last.
        self._ring_latencies = tuple(
            self._hop_latencies(size, max(1, count - 1) if spans else 0)
            for size, count, spans in zip(mesh.sizes, hosts, self._spanning, strict=True)
        )
        measured = self.cluster.measured
        # Devices of a group on one host use their ports together. Links of a measured cluster were fitted to whole
        # groups, so their figures include this.
        self._ports = tuple(
            max(1, size // count) if spans and measured is None else 1
            for size, count, spans in zip(mesh.sizes, hosts, self._spanning, strict=True)
        )
        self._operators = self.cluster.device.operators if measured is None else measured.operators
        if measured is not None:
            self._warn_of_estimates(measured)

    def _hop_latencies(self, size: int, outside: int) -> float:
        """Return seconds of a trip around a ring of `size` devices, `outside` of whose hops leave a host."""
        return self.cluster.between.latency * outside + self.cluster.inside.latency * (size - 1 - outside)

    def _warn_of_estimates(self, measured: Measurements) -> None:
        """Warn of axes whose grouping of devices was not measured."""
        measured_groupings = {grouping for _, grouping in measured.collectives}
        estimated = [
            f"{axis.name} ({grouping.size} devices, {grouping.stride} apart in rank)"
            for axis, grouping in zip(self.mesh.axes, self._groupings, strict=True)
            if grouping.size > 1 and grouping not in measured_groupings
        ]
        if estimated:
            warn_caller(
                f"cluster {self.cluster.name} was measured on {measured.devices} devices, and no collective over mesh "
                f"axis {', '.join(estimated)}: they are estimated from the latency and bandwidth that fit the others. "
                f"Measure them by autoshard.calibrate on a mesh of {self.mesh.size} devices.",
            )

    def axis_link(self, axis: int) -> Link:
        """Return the link that a collective over `axis` runs at: the slowest that any of its groups must use.

        Groups inside one host use the cluster's `inside`; if any group spans hosts, all pay `between`.

        Source: TensorOpt 3.2, which prices a collective by the links of its device partitioning; Whale 3.3.
        """
        return self._links[axis]

    def collective(self, kind: str, bytes: int, axis: int) -> float:
        """Return the time of one collective over `axis`, or of one of the local steps of a reshard.

        Args:
            kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"`, `"shift"` (each rank sends all it
                holds to the next one), or, local, `"slice"`, `"make_partial"`, `"copy"`.
            bytes: held by one rank before it.
            axis: the mesh axis, of size n; over a single device everything is free.

        Returns:
            Seconds, by the first of these that applies:

            1. Measurements of the cluster, if they have the grouping of the axis (the same size and stride, whatever
               the other axes): interpolated between powers of two of bytes. A local step takes the measured time of a
               copy.
            2. The link's curve of the kind (`Link.collectives`): the seconds for the bytes sent by a device, plus the
               latencies by which the ring, or for an all-reduce the tree, is longer than the measured one.
            3. The latency-bandwidth model of ring collectives, W the latency of the n-1 hops of the ring and B the
               bandwidth of the link: all-gather W + bytes(n-1)/B; reduce-scatter and all-to-all W + bytes(n-1)/(n B);
               shift one latency of the link + bytes/B; all-reduce twice a reduce-scatter, or, where that is faster, up
               and down a binary tree: 2 ceil(log2 n) hops and 2 bytes/B. A local step takes as long as a copy of the
               part that it keeps.

            A group with several devices on every host uses the ports of all of them: between hosts each device sends a
            part, at most as fast as the whole moves inside a host.

        Raises:
            ValueError: `kind` is not one of these.

        Source: TensorOpt 3.2, "Improving cost estimation accuracy": a collective's time, not its volume, is the cost.
        """
        seconds = self._measured_seconds(kind, bytes, axis)
        return min(map(sum, self._algorithms(kind, bytes, axis))) if seconds is None else seconds

    def gradient_collective(self, kind: str, bytes: int, axis: int) -> float:
        """Return the time of a collective that takes a gradient to its optimizer; arguments as of `collective`.

        Gradients are reduced in buckets of up to `GRADIENT_BUCKET_BYTES`: a reduction pays its share of the latency
        only, or, where there are curves of collectives, its share of the time of a bucket.

        Source: Whale 5.1.1, "grouped" AllReduce.
        """
        if kind not in ("all_reduce", "reduce_scatter"):
            return self.collective(kind, bytes, axis)
        # A bucket holds gradients of many parameters, and each pays its part of the latency of the whole.
        share = min(1.0, bytes / GRADIENT_BUCKET_BYTES)
        seconds = self._measured_seconds(kind, max(bytes, GRADIENT_BUCKET_BYTES), axis)
        if seconds is not None:
            return seconds * share
        return min(share * waiting + moving for waiting, moving in self._algorithms(kind, bytes, axis))

    def _algorithms(self, kind: str, bytes: int, axis: int) -> list[tuple[float, float]]:
        """Return seconds of latency and seconds of moving bytes, by every algorithm that the collective may use."""
        size = self.mesh.axes[axis].size
        if size == 1:
            return [(0.0, 0.0)]
        if kind in _LOCAL_KINDS:
            moved = 2 * (bytes / size if kind == "slice" else bytes)
            copy = operator_seconds(self.cluster.device.operators, "clone", 0.0, moved, torch.float32)
            return [(0.0, moved / self.cluster.device.memory_bandwidth if copy is None else copy)]
        wait = self._ring_latencies[axis]
        whole = bytes / self._bandwidth(axis)
        match kind:
            case "all_gather":
                return [(wait, whole * (size - 1))]
            case "reduce_scatter" | "all_to_all":
                return [(wait, whole * (size - 1) / size)]
            case "all_reduce":
                # NCCL, too, chooses between ring and tree: few hops for small messages, fewest bytes for large ones.
                tree = 2 * _levels(size) * self._links[axis].latency
                return [(2 * wait, 2 * whole * (size - 1) / size), (tree, 2 * whole)]
            case "shift":
                return [(self._links[axis].latency, whole)]
        raise ValueError(f"there is no collective {kind!r}.")

    def _measured_seconds(self, kind: str, bytes: int, axis: int) -> float | None:
        """Return seconds by measurements of the cluster, else by the curve of the axis' link; None without either."""
        size, measured = self.mesh.sizes[axis], self.cluster.measured
        if size == 1:
            return None
        if measured is not None and kind in _LOCAL_KINDS:
            # One read and one write; a slice copies the part that it keeps.
            moved = 2 * (bytes / size if kind == "slice" else bytes)
            return operator_seconds(measured.operators, "clone", 0.0, moved, torch.float32)
        curve = None if measured is None else measured.collectives.get((kind, self._groupings[axis]))
        return self._curve_seconds(kind, bytes, axis) if curve is None else curve.at(bytes)

    def _curve_seconds(self, kind: str, bytes: int, axis: int) -> float | None:
        """Return seconds by the curve of the axis' link; None where it has none."""
        link, size = self._links[axis], self.mesh.sizes[axis]
        bus = link.collectives.get(kind)
        if bus is None:
            return None
        part = bytes if kind == "all_gather" else bytes / size
        sent = bytes if kind == "shift" else RING_TRIPS[kind] * part * (size - 1)
        seconds = bus.curve.at(sent / self._ports[axis])
        # The curve includes latencies for groups of its size; longer rings and higher trees have more.
        if kind == "all_reduce":
            seconds += 2 * link.latency * max(0, _levels(size) - _levels(bus.size))
        elif kind != "shift":
            hosts = -(-bus.size // self.cluster.devices_per_host)
            known = self._hop_latencies(bus.size, max(1, hosts - 1) if self._spanning[axis] else 0)
            seconds += max(0.0, self._ring_latencies[axis] - known)
        # Smaller groups gain less from a switch that reduces; and traffic between hosts also goes between devices.
        least = sent / self._bandwidth(axis) if size < bus.size or self._spanning[axis] else 0.0
        return max(seconds, least)

    def _bandwidth(self, axis: int) -> float:
        """Return bytes per second over the link of an axis, with all ports that a group has on a host."""
        together = self._links[axis].bandwidth * self._ports[axis]
        return min(together, self.cluster.inside.bandwidth) if self._ports[axis] > 1 else together

    def compute(
        self, flops: float, bytes: float, dtype: torch.dtype, operator: str = "add", streamed: float = 0.0
    ) -> float:
        """Return the time of one operator on one device: as measured, or a roofline over a fixed cost per operator.

        Args:
            flops: floating-point operations done on the device.
            bytes: read and written by the device.
            dtype: of the operands, which sets the peak rate.
            operator: its name without namespace and overload, such as `"mm"`; measurements tell operators apart.
            streamed: further bytes that it writes and reads between its products.

        Returns:
            Seconds: by the curves of its family, measured or of the device, where there are any
            (`measurements.operator_seconds`), else max(flops / peak, bytes / memory bandwidth) + kernel overhead; plus
            those of `streamed`.

        Source: Whale 3.3 profiles a TaskGraph by its operations and bytes against those of the device; the roofline is
        the same without the run.
        """
        if streamed:
            return self.compute(flops, bytes, dtype, operator) + self.compute(0.0, streamed, dtype)
        device = self.cluster.device
        seconds = operator_seconds(self._operators, operator, flops, bytes, dtype)
        if seconds is not None:
            return seconds
        return max(flops / device.peak(dtype), bytes / device.memory_bandwidth) + device.kernel_overhead

    def host_copy(self, bytes: int) -> float:
        """Return the time of one copy between a device and its host: launch, and bytes over the link."""
        device = self.cluster.device
        return device.kernel_overhead + bytes / device.host_bandwidth

    def host_update(self, bytes: int) -> float:
        """Return the time in which a device's share of the host's processors reads and writes some bytes."""
        return bytes / self.cluster.device.host_memory_bandwidth

    def view(self) -> float:
        """Return the time of a view: that of a call on a measured cluster, else zero."""
        if self.cluster.measured is None:
            return 0.0
        return operator_seconds(self._operators, "view", 0.0, 0.0, torch.float32) or 0.0

    def spans_hosts(self, axis: int) -> bool:
        """Return True if the first and the last rank of some group of `axis` are on different hosts."""
        return self._spanning[axis]


def _levels(size: int) -> int:
    """Return the height of a binary tree of `size` devices."""
    return math.ceil(math.log2(size))


Shape = Sequence[int]


def flops(op: OpOverload, operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object] = ()) -> float:
    """Return the floating-point operations of one call; a multiply and its add are two.

    Args:
        op: an ATen operator.
        operands: global shapes of its tensor operands, in the order of its schema, absent ones left out.
        results: global shapes of its tensor results; absent ones left out.
        args: the call's arguments as written in the graph: masks, transposition, and which gradients are omitted.

    Returns:
        The count for matrix products, convolutions, attention and recurrence, forward and backward; 0.0 for every
        other operator, which is priced by its bytes.
    """
    count = _COUNTS.get(op.overloadpacket.__name__)
    return float(count(operands, results, args)) if count is not None else 0.0


class TensorLike(Protocol):
    """The shape and dtype of a tensor."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one call of an operator.

    Attributes:
        flops: floating-point operations.
        dtype: of these operations; without any, that of the first result.
        operator: its name, by which it is priced.
        streamed: bytes that it writes and reads between its products, in pieces.
        repeated: the part of `flops` that an operator which keeps whole results would not do.
    """

    flops: float
    dtype: torch.dtype
    operator: str
    streamed: float = 0.0
    repeated: float = 0.0


def work_of_call(
    op: OpOverload, operands: Sequence[TensorLike], results: Sequence[TensorLike], args: Sequence[object] = ()
) -> Work:
    """Return the work of one call; arguments as of `flops`, tensors in the place of shapes."""
    name = op.overloadpacket.__name__
    if name in _WORKS:
        return _WORKS[name](op, operands, results, args)
    count = flops(op, [tensor.shape for tensor in operands], [tensor.shape for tensor in results], args)
    dtype = results[0].dtype if results else torch.float32
    return Work(count, dtype, name)


# No position of an argument: the operator computes all scores, whatever the mask.
_NEVER = 1 << 10

Count = Callable[[Sequence[Shape], Sequence[Shape], Sequence[object]], int]
"""Counts the operations of a call from the shapes of its operands and results, and its arguments."""

CausalScores = Callable[[int, int, Sequence[object]], int]


def _product(position: int) -> Count:
    """Count a matrix product whose left matrix is the operand at `position`; its last dim is contracted."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        return 2 * math.prod(results[0]) * operands[position][-1]

    return count


def _causal_scores(rows: int, columns: int, _: Sequence[object]) -> int:
    # Kernels skip the blocks above the diagonal.
    return rows * columns - columns * columns // 2 if rows > columns else rows * rows // 2


def attention_flops(causal: int, causal_scores: CausalScores = _causal_scores) -> Count:
    """Count scores, and the weighted sum of values.

    Args:
        causal: the position of the flag `is_causal`.
        causal_scores: returns the scores that a causal call computes, from the numbers of queries and keys and the
            arguments after the flag.
    """
    return _attention_products(0, causal, causal_scores, 1, 1)


def attention_backward_flops(causal: int, causal_scores: CausalScores = _causal_scores) -> Count:
    """Count scores again and gradients of queries and keys, of key width; of values and weights, of value width."""
    return _attention_products(1, causal, causal_scores, 3, 2)


def _attention_products(first: int, causal: int, causal_scores: CausalScores, by_key: int, by_value: int) -> Count:
    """Count attention with operands from `first` on: `by_key` products of key width, `by_value` of value width."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        queries, keys, values = operands[first : first + 3]
        rows, columns = queries[-2], keys[-2]
        scores = rows * columns
        # A mask given as a tensor is not known to be causal.
        if len(args) > causal and args[causal] is True:
            scores = causal_scores(rows, columns, args[causal + 1 :])
        return 2 * math.prod(queries[:-2]) * scores * (by_key * queries[-1] + by_value * values[-1])

    return count


def _convolution(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count a product of a channel's weight with every element of the result, or of the input where transposed."""
    source, weight = operands[:2]
    # Graphs omit trailing default arguments.
    transposed = len(args) > 6 and bool(args[6])
    return 2 * math.prod(source if transposed else results[0]) * math.prod(weight[1:])


def _convolution_backward(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count the forward once for the gradient of the input and once for the weight's, each if `output_mask` asks."""
    gradient, source, weight = operands[:3]
    transposed = len(args) > 7 and bool(args[7])
    mask = args[10] if len(args) > 10 else (True, True, True)
    assert isinstance(mask, Sequence)
    forward = 2 * math.prod(source if transposed else gradient) * math.prod(weight[1:])
    return forward * sum(map(bool, mask[:2]))


def _grouped_product(products: int) -> Count:
    """Count every row times the matrix of its group, `products` times."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        left, right = operands[:2]
        # Two stacks of matrices are a batch; rows sorted by group use one matrix each, whatever the number of groups.
        batch = left[0] if len(left) == len(right) == 3 else 1
        return 2 * products * batch * left[-2] * left[-1] * right[-1]

    return count


_COUNTS: dict[str, Count] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "_scaled_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), _product(1)),
    "_grouped_mm": _grouped_product(1),
    "grouped_mm_fallback": _grouped_product(1),
    "grouped_mm_fallback_backward": _grouped_product(2),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "scaled_dot_product_attention": attention_flops(causal=5),
    "_scaled_dot_product_attention_math": attention_flops(causal=_NEVER),
    "_scaled_dot_product_flash_attention": attention_flops(causal=4),
    "_scaled_dot_product_flash_attention_for_cpu": attention_flops(causal=4),
    "_scaled_dot_product_efficient_attention": attention_flops(causal=6),
    "_scaled_dot_product_cudnn_attention": attention_flops(causal=6),
    "_scaled_dot_product_flash_attention_backward": attention_backward_flops(causal=11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops(causal=7),
    "_scaled_dot_product_efficient_attention_backward": attention_backward_flops(causal=11),
    "_scaled_dot_product_cudnn_attention_backward": attention_backward_flops(causal=14),
}

_WORKS: dict[str, Callable[..., Work]] = {}


def price_by_flops(*names: str) -> Callable[[Count], Count]:
    """Decorate a function that counts the operations of a call, for operators of these names."""

    def register(count: Count) -> Count:
        _COUNTS.update(dict.fromkeys(names, count))
        return count

    return register


def price_by_work(*names: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorate a function that returns the work of a call, arguments as of `work_of_call`, for these operators."""

    def register(work: Callable[..., Work]) -> Callable[..., Work]:
        _WORKS.update(dict.fromkeys(names, work))
        return work

    return register
