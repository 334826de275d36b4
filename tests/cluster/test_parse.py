"""Texts that name the devices of a cluster."""

from __future__ import annotations

import pytest

from autoshard.cluster.parse import Devices, is_devices, parse_devices
from autoshard.errors import MeshError


def test_counts_kinds_and_memories_are_read_in_order() -> None:
    assert parse_devices("8xV100-32GB + 8 x p100") == (
        Devices(8, "v100", 32 * 10**9, "V100-32GB"),
        Devices(8, "p100", None, "p100"),
    )


@pytest.mark.parametrize(("text", "devices"), [("8xV100", True), ("v100+p100", True), ("v100", False), ("my", False)])
def test_counts_tell_devices_from_presets(text: str, devices: bool) -> None:
    assert is_devices(text) == devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xV100 +", "'' in the cluster '8xV100 \\+' names no devices: write a count and a preset"),
        ("V100 + 8xP100", "'V100' in the cluster"),
        ("8xV100@25GB/s", "'8xV100@25GB/s' in the cluster"),
        ("0xV100", "is no device at all"),
        ("8xV100-32XB", "has the unit 'XB'"),
        ("8xV100-1.2.3GB", "is not an amount of memory"),
    ],
)
def test_what_is_not_understood_is_quoted(text: str, said: str) -> None:
    with pytest.raises(MeshError, match=said):
        parse_devices(text)
