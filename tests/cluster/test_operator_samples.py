"""The calls that are timed: they run, grow with their size, and are counted as plans count them."""

from __future__ import annotations

import pytest
import torch

from autoshard.cluster.operator_curves import BYTES, FLOPS, INTENSITY, family
from autoshard.cluster.operator_samples import Sample, samples

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
