"""The calls that are timed: they run, grow with their size, and are counted as plans count them.

Ways in which axes group devices.
"""

from __future__ import annotations

import math

import pytest
import torch

from autoshard.cluster.measurements import BYTES, FLOPS, INTENSITY, Grouping, family
from autoshard.cluster.samples import Sample, groupings, samples
from autoshard.specs.axes import MeshShape

SAMPLES = samples(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.family}-{sample.amounts_are}")
def test_larger_calls_do_more(sample: Sample) -> None:
    small, large = (sample.make(sample.sizes[index]) for index in (0, 2))
    (flops, bytes), (more_flops, more_bytes) = small.amounts(), large.amounts()
    name = small.op.overloadpacket.__name__
    assert family(name, "add" if sample.amounts_are == BYTES else "mm") == sample.family
    if sample.amounts_are == BYTES:
        assert flops == more_flops == 0
        assert more_bytes > bytes
    elif sample.amounts_are == FLOPS:
        assert more_flops > flops > 0
    else:
        assert sample.amounts_are == INTENSITY
        assert more_flops / more_bytes > flops / bytes


def test_a_copy_is_made_by_the_sample_of_copies() -> None:
    call = next(sample for sample in SAMPLES if sample.family == "copy").make(4096)
    assert not call.args[0].is_contiguous()
    assert call().is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_run_too(dtype: torch.dtype) -> None:
    for sample in samples(dtype, torch.device("cpu")):
        assert sample.make(sample.sizes[0])() is not None


@pytest.mark.parametrize(
    ("operator", "default", "expected"),
    [("addmm", "mm", "mm"), ("_softmax", "add", "softmax"), ("relu", "add", "add"), ("lstm_steps", "mm", "mm")],
)
def test_operators_have_families(operator: str, default: str, expected: str) -> None:
    assert family(operator, default) == expected


def test_groupings_of_eight() -> None:
    result = [(one.size, one.stride) for one in groupings(8)]
    assert result == [(8, 1), (4, 1), (4, 2), (2, 1), (2, 2), (2, 4)]


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2), (3, 2), (6,), (2, 3, 4)])
def test_every_axis_of_a_mesh_groups_its_devices_in_one_of_them(sizes: tuple[int, ...]) -> None:
    mesh = MeshShape.of({f"a{index}": size for index, size in enumerate(sizes)})
    coordinates = list(mesh.coordinates())
    for axis, size in enumerate(sizes):
        grouping = Grouping(size, math.prod(sizes[axis + 1 :]))
        assert grouping in groupings(mesh.size)
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(coordinates):
            lines.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        assert sorted(map(list, grouping.groups(mesh.size))) == sorted(lines.values())
