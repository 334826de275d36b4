"""All ranks of a mesh in one process: a fake process group under torch's local-tensor mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import PADDING, padded_indices
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard, unshard
from tests.reshard._torch import FakeStore, LocalTensor, LocalTensorMode
from tests.reshard.eager import EagerEmitter
from tests.runtime.meshes import patched_local_tensors


@dataclass(frozen=True)
class Ranks:
    """A mesh whose ranks all live here, and the emitter that runs a local program for all of them."""

    mesh: MeshShape
    device_mesh: DeviceMesh
    emit: EagerEmitter

    def scatter(self, whole: Tensor, spec: Spec) -> LocalTensor:
        """Padded local tensors of all ranks. What pads them is far off: no program may read it."""
        places = enumerate(self.mesh.coordinates())
        return LocalTensor(
            {
                rank: shard(whole, spec, self.mesh, place, padded=True, padding=1000).contiguous()
                for rank, place in places
            }
        )

    def gather(self, value: Tensor, spec: Spec, shape: tuple[int, ...]) -> Tensor:
        """The global tensor of which `value` holds all ranks' local tensors; replicas must agree exactly."""
        assert isinstance(value, LocalTensor)
        shards = {place: value._local_tensors[rank] for rank, place in enumerate(self.mesh.coordinates())}
        whole = unshard(shards, spec, self.mesh, shape)
        self._check_replicas(shards, spec, shape)
        return whole

    def _check_replicas(self, shards: Mapping[tuple[int, ...], Tensor], spec: Spec, shape: tuple[int, ...]) -> None:
        kept = {*spec.shard_axes, *spec.partial_axes}
        for coordinate, value in shards.items():
            first = shards[tuple(place if axis in kept else 0 for axis, place in enumerate(coordinate))]
            for dim, indices in enumerate(padded_indices(shape, spec, self.mesh, coordinate)):
                real = torch.tensor(
                    [place for place, index in enumerate(indices) if index != PADDING], dtype=torch.int64
                )
                value, first = value.index_select(dim, real), first.index_select(dim, real)
            assert torch.equal(value, first), f"replicas under {spec} differ at {coordinate}"

    def run(self, path: Path, whole: Tensor) -> Tensor:
        """The global tensor after the path, executed by all ranks from the definition of its source."""
        held = self.scatter(whole, path.source)
        with LocalTensorMode(self.mesh.size):
            value = lower(path, held, self.emit, whole.dtype)
        return self.gather(value, path.target, path.shape)


@contextmanager
def ranks(**sizes: int) -> Iterator[Ranks]:
    """All ranks of the mesh with these axes, under a fake process group."""
    mesh = MeshShape.of(sizes)
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        with LocalTensorMode(mesh.size):
            device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
            places = [torch.full((), device_mesh.get_local_rank(axis), dtype=torch.int64) for axis in range(mesh.ndim)]
            groups = [device_mesh.get_group(axis).group_name for axis in range(mesh.ndim)]
        with patched_local_tensors():
            yield Ranks(mesh, device_mesh, EagerEmitter(mesh, groups, places))
    finally:
        dist.destroy_process_group()
