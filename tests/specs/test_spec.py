"""Specs: equality, text, and change of one axis."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard.specs._torch import StridedShard
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Routed, Spec
from tests.specs.strategies import specs


@given(specs(axes=3, ndim=4))
def test_text_and_pickle_bring_the_same_object_back(spec: Spec) -> None:
    assert Spec.parse(str(spec)) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert Spec.of(*spec) is spec
    assert hash(Spec(spec.placements)) == hash(spec)
    assert Spec(spec.placements) == spec


def test_text() -> None:
    spec = Spec.of(Shard(0), Replicate(), Partial("sum"), StridedShard(1, split_factor=3))
    assert str(spec) == "S(0) R P(sum) S(1,f=3)"
    assert spec.shard_axes == (0, 3)
    assert spec.partial_axes == (2,)
    assert not spec.is_replicated
    assert Spec.all_replicated(2).is_replicated


def test_a_strided_shard_of_factor_one_is_a_shard() -> None:
    assert Spec.of(StridedShard(0, split_factor=1)) is Spec.of(Shard(0))


def test_replace_changes_one_axis() -> None:
    assert Spec.parse("S(0) R").replace(1, Shard(2)) is Spec.parse("S(0) S(2)")


def test_routed_rows_have_a_text_and_a_balanced_share() -> None:
    spec = Spec.of(Routed(0, "group"), Shard(1), Routed(None, "source"))
    assert str(spec) == "S(0,by=group) S(1) S(by=source)"
    assert Spec.parse(str(spec)) is spec
    assert spec.is_routed
    assert spec.shard_axes == (1,)
    assert spec.balanced is Spec.parse("S(0) S(1) R")
    assert spec.balanced.balanced is spec.balanced
    assert Routed(0, "group") == spec[0] != Routed(0, "source")
    assert local_shape((12, 6), spec, MeshShape.of({"ep": 4, "tp": 2, "dp": 3})) == (3, 3)


@pytest.mark.parametrize("text", ["S(0,by=)", "S(0,by=chance)", "X", "S", "S(a)", "P", "S(0,f=)"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        Spec.parse(text)
