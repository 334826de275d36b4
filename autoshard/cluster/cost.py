"""What work and words cost on a cluster: the prices of every strategy and every reshard."""

from __future__ import annotations

import torch

from autoshard.cluster.cluster import Cluster, Link
from autoshard.specs.axes import MeshShape

# Operations on local memory alone, in times that the bytes held are moved (one read and one write).
_LOCAL = ("slice", "make_partial", "copy")


class CostModel:
    """Seconds of compute and of collectives of one mesh laid out on one cluster.

    Ranks are laid over the mesh in row-major order, and over the hosts in groups of `devices_per_host`.
    """

    def __init__(self, cluster: Cluster, mesh: MeshShape) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self._links = tuple(self._link(axis) for axis in range(mesh.ndim))

    def axis_link(self, axis: int) -> Link:
        """The link that a collective over `axis` runs at: the slowest that any of its groups must use.

        Groups that lie inside one host use the cluster's `inside`; if any group spans hosts, all pay `between`.

        Source: TensorOpt 3.2, which prices a collective by the links of its device partitioning; Whale 3.3.
        """
        return self._links[axis]

    def collective(self, kind: str, bytes: int, axis: int) -> float:
        """Time of one collective over `axis`, or of one of the local steps of a reshard.

        Args:
            kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"`, `"broadcast"`, or, local,
                `"slice"`, `"make_partial"`, `"copy"`.
            bytes: what one rank holds before it.
            axis: the mesh axis, of size n; over a single device everything is free.

        Returns:
            Seconds by the latency-bandwidth model of ring collectives, L the latency and B the bandwidth of the link:
            all-gather L(n-1) + bytes(n-1)/B; reduce-scatter and all-to-all L(n-1) + bytes(n-1)/(n B);
            all-reduce twice the latter; broadcast L(n-1) + bytes/B, in a pipeline. A local step reads and writes
            what it keeps at the memory's bandwidth.

        Raises:
            ValueError: `kind` is none of these.

        Source: TensorOpt 3.2, "Improving cost estimation accuracy": a collective's time, not its volume, is the cost.
        """
        size = self.mesh.axes[axis].size
        if size == 1:
            return 0.0
        if kind in _LOCAL:
            kept = bytes / size if kind == "slice" else bytes
            return 2 * kept / self.cluster.device.memory_bandwidth
        link = self._links[axis]
        wait = link.latency * (size - 1)
        whole = bytes / link.bandwidth
        match kind:
            case "all_gather":
                return wait + whole * (size - 1)
            case "reduce_scatter" | "all_to_all":
                return wait + whole * (size - 1) / size
            case "all_reduce":
                return 2 * (wait + whole * (size - 1) / size)
            case "broadcast":
                return wait + whole
        raise ValueError(f"there is no collective {kind!r}.")

    def compute(self, flops: float, bytes: float, dtype: torch.dtype) -> float:
        """Time of one operator on one device: a roofline over a fixed cost per operator.

        Args:
            flops: floating-point operations done on the device.
            bytes: read and written by the device.
            dtype: of the operands, which sets the peak rate.

        Returns:
            Seconds: max(flops / peak, bytes / memory bandwidth) + kernel overhead.

        Source: Whale 3.3 profiles a TaskGraph by its operations and bytes against those of the device; the roofline is
        the same without the run.
        """
        device = self.cluster.device
        return max(flops / device.peak(dtype), bytes / device.memory_bandwidth) + device.kernel_overhead

    def _link(self, axis: int) -> Link:
        return self.cluster.between if self._spans_hosts(axis) else self.cluster.inside

    def _spans_hosts(self, axis: int) -> bool:
        """Whether the first and the last rank of some group of `axis` sit on different hosts."""
        sizes = self.mesh.sizes
        stride = 1
        for size in sizes[axis + 1 :]:
            stride *= size
        reach = stride * (sizes[axis] - 1)
        per_host = self.cluster.devices_per_host
        firsts = (rank for rank in range(self.mesh.size) if rank // stride % sizes[axis] == 0)
        return any(rank // per_host != (rank + reach) // per_host for rank in firsts)
