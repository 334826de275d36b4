"""Views that copy, against torch: the factors of the views, and memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.padding import emit_local
from autoshard.patterns.strategy import WHOLE
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(12, 6)


@pytest.mark.parametrize(
    ("name", "shards", "args"),
    [
        ("alias", "dim0 dim1", (X,)),
        ("as_strided", "f0 f1", (X, [6, 12], [1, 6])),
        ("detach", "dim0 dim1", (X,)),
        ("diagonal", "d2", (normal(6, 6, 4), 0, 0, 1)),
        ("expand", "d0 new1", (normal(12, 1), [12, 6])),
        ("narrow", "cut d0", (X, 1, 2, 4)),
        ("permute", "d0 d1 d2", (normal(6, 4, 2), [2, 0, 1])),
        ("select.int", "d0 d1", (X, 1, 2)),
        ("slice.Tensor", "cut d1", (X, 0, 0, 6)),
        ("split.Tensor", "cut d1", (X, 4)),
        ("split_with_sizes", "cut d1", (X, [8, 4])),
        ("squeeze", "d0 d1", (normal(12, 1, 6),)),
        ("squeeze.dim", "d0 d1", (normal(12, 1, 6), 1)),
        ("squeeze.dims", "d0 d1", (normal(12, 1, 6), [1])),
        ("t", "d0 d1", (X,)),
        ("transpose.int", "d0 d1", (X, 0, 1)),
        ("unbind.int", "d0", (X, 1)),
        ("unfold", "d1 window windows", (X, 0, 4, 4)),
        ("unsqueeze", "d0 d1", (X, 1)),
        ("view", "d0 d1 d2", (X, [3, 4, 6])),
        ("view.dtype", "d0 d1", (X, torch.int64)),
        ("view_as_complex", "d0 d1", (normal(12, 6, 2),)),
        ("view_as_real", "d0 d1", (torch.complex(X, X + 1),)),
    ],
)
def test_a_copy_is_split_as_the_view(name: str, shards: str, args: tuple[Any, ...]) -> None:
    view, _, overload = name.partition(".")
    op = getattr(getattr(aten, f"{view}_copy"), overload or "default")
    assert_sound(op, *args, shards=shards)


def test_results_share_no_memory_with_the_operand() -> None:
    mesh = MeshShape.of({"x": 2})
    call, rule = bound(aten.split_copy.Tensor, X, 4)
    results = emit_local(LocalCall(call, rule, (WHOLE,), mesh, Lockstep(mesh), [PerRank((X, X))]))
    memory = {value.untyped_storage().data_ptr() for result in results for value in result.values}
    assert X.untyped_storage().data_ptr() not in memory
    assert len(memory) == len(results) * mesh.size
