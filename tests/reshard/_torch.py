"""The private torch names that these tests use, in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Runs one program for all ranks in one process, on a tensor per rank.
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

# DTensor's own redistribution, to compare paths with.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

# The store of a process group without processes.
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.specs.spec import Spec

__all__ = ["FakeStore", "LocalTensor", "LocalTensorMode", "redistribution"]


def redistribution(
    mesh: DeviceMesh, shape: Sequence[int], source: Spec, target: Spec, *, graph: bool
) -> list[tuple[int, Placement, Placement]] | None:
    """Mesh axis, placement before and after, of every step that DTensor takes: greedily, or by its own graph.

    It is None where this release refuses.
    """
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), torch.float32)
    before, after = (DTensorSpec(mesh, tuple(spec), tensor_meta=meta) for spec in (source, target))
    try:
        steps = _gen_transform_infos_non_cached(before, after, use_graph_based_transform=graph)
    except ValueError as error:
        # Torch 2.11 has no path to or from pieces that no order of axes makes.
        if "unable to be interpreted into a corresponding shard_order" not in str(error):
            raise
        return None
    return [(step.mesh_dim, *step.src_dst_placements) for step in steps]
