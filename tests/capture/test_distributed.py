"""Capture inside a distributed program: global shapes are meant, and local tensors are not seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensorMode  # all ranks in one process; private, for tests alone
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # a process group that sends nothing

from autoshard.capture import BoundCall, capture
from tests import models


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def _shard_parameters(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def test_dtensors_stand_for_their_global_tensors(mesh: DeviceMesh) -> None:
    module, kwargs = models.mlp()
    expected = capture(module, (), kwargs)
    distribute_module(module, mesh, _shard_parameters)
    inputs = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in kwargs.items()}
    graph = capture(module, (), inputs)
    assert graph.fingerprint == expected.fingerprint
    # A program takes a `DTensor` as it lies, and a plain tensor whole.
    assert graph.signature == BoundCall.of(module, (), inputs).signature != expected.signature


def test_local_tensor_mode_is_not_seen(mesh: DeviceMesh) -> None:
    module, kwargs = models.mlp()
    expected = capture(module, (), kwargs).fingerprint
    with LocalTensorMode(4):
        assert capture(module, (), kwargs).fingerprint == expected


def test_fake_tensor_mode_is_not_seen() -> None:
    module, kwargs = models.mlp()
    expected = capture(module, (), kwargs).fingerprint
    with torch._subclasses.FakeTensorMode():
        module, kwargs = models.mlp()
        assert capture(module, (), kwargs).fingerprint == expected
    assert capture(module, (), kwargs).fingerprint == expected
