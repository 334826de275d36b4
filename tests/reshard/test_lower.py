"""Lowered paths, run by all ranks, against the definition of specs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path, Resharder
from autoshard.reshard.states import state_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from tests.reshard._torch import LocalTensor, LocalTensorMode
from tests.reshard.eager import EagerEmitter
from tests.reshard.prices import ring_price
from tests.reshard.ranks import Ranks, ranks
from tests.specs.strategies import blocked_shapes

PLAIN = ("R", "P(sum)", "S(0)", "S(1)", "S(2)")
STRIDED = ("S(0,f=2)", "S(1,f=4)", "S(2,f=3)")


def whole_numbers(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(1, torch.Size(shape).numel() + 1) % 97 - 40).reshape(tuple(shape)).to(dtype)


def placed_specs(world: Ranks, shape: Sequence[int], texts: Sequence[str]) -> list[Spec]:
    every = [Spec.parse(" ".join(choice)) for choice in itertools.product(texts, repeat=world.mesh.ndim)]
    return [spec for spec in every if state_of(shape, spec, world.mesh) is not None]


def check(world: Ranks, shape: Sequence[int], pairs: Sequence[tuple[Spec, Spec]]) -> None:
    resharder = Resharder(world.mesh, ring_price(world.mesh))
    whole = whole_numbers(shape)
    for source, target in pairs:
        path = resharder.path(shape, 8, source, target)
        assert torch.equal(world.run(path, whole), whole), path


def test_a_sample_of_pairs_on_three_axes() -> None:
    with ranks(a=2, b=2, c=2) as world:
        chosen = placed_specs(world, (8, 16, 24), (*PLAIN, *STRIDED))
        draw = random.Random(0)
        check(world, (8, 16, 24), [(draw.choice(chosen), draw.choice(chosen)) for _ in range(100)])


@pytest.mark.slow
def test_every_step_of_many_pairs_on_three_axes() -> None:
    """Paths are chains of steps: where every step is right, every path is."""
    shape = (8, 16, 24)
    with ranks(a=2, b=2, c=2) as world:
        chosen = placed_specs(world, shape, PLAIN)
        resharder = Resharder(world.mesh, ring_price(world.mesh))
        paths = [resharder.path(shape, 8, *pair) for pair in itertools.product(chosen[::24], chosen)]
        whole = whole_numbers(shape)
        for step in dict.fromkeys(step for path in paths for step in path.steps):
            assert torch.equal(world.run(Path(shape, step.source, step.target, (step,)), whole), whole), step


@pytest.mark.parametrize(
    ("sizes", "shape", "texts"),
    [
        ((4,), (12, 9), ("R", "P(sum)", "P(max)", "S(0)", "S(1)", "S(0,b=4)", "S(0,f=2,b=2)", "S(1,b=3)")),
        ((2,), (9, 5), ("R", "P(sum)", "S(0)", "S(1)", "S(0,f=3,b=2)", "S(0,b=6)")),
        ((5,), (3, 16), ("R", "P(sum)", "S(0)", "S(1)", "S(1,b=4)", "S(1,f=8,b=1)")),
        ((2, 2), (6, 8), ("R", "P(sum)", "S(0)", "S(1)", "S(0,b=2)", "S(0,b=4)")),
        ((2, 3), (12, 9), ("R", "P(sum)", "S(0)", "S(1,f=3)", "S(0,f=4,b=2)", "S(0,b=8)", "S(0,f=2)")),
    ],
)
def test_blocks_come_and_go(sizes: tuple[int, ...], shape: tuple[int, ...], texts: Sequence[str]) -> None:
    with ranks(**{f"a{axis}": size for axis, size in enumerate(sizes)}) as world:
        pairs = list(itertools.product(placed_specs(world, shape, texts), repeat=2))
        check(world, shape, random.Random(0).sample(pairs, min(len(pairs), 120)))


@settings(max_examples=25)
@given(blocked_shapes(), st.data())
def test_any_blocks_come_and_go(case: tuple[MeshShape, tuple[int, ...], Spec], data: st.DataObject) -> None:
    mesh, shape, spec = case
    assume(mesh.size <= 30)
    plain = data.draw(st.tuples(*[st.sampled_from(("R", "S(1)", "P(sum)"))] * mesh.ndim).map(" ".join))
    other = Spec.parse(plain)
    assume(state_of(shape, other, mesh) is not None)
    with ranks(**dict(zip(mesh.names, mesh.sizes, strict=True))) as world:
        check(world, shape, [(spec, Spec.all_replicated(mesh.ndim)), (other, spec), (spec, other)])


@pytest.mark.parametrize(
    ("sizes", "shape", "texts"),
    [
        ((3,), (6, 9), ("R", "P(sum)", "S(0)", "S(1)", "S(0,f=2)", "S(1,f=3)")),
        ((3,), (7, 5, 1), ("R", "P(sum)", "S(0)", "S(1)", "S(2)")),
        ((4,), (2, 9), ("R", "P(sum)", "S(0)", "S(1)")),
        ((4,), (16, 48), ("R", "S(0)", "S(0,f=2)", "S(0,f=4)", "S(1,f=3)", "S(1,f=6)", "S(1,f=12)")),
        ((2, 3), (12, 7), ("R", "P(sum)", "S(0)", "S(1)", "S(0,f=2)")),
        ((2, 3), (5, 7), ("R", "P(sum)", "S(0)", "S(1)")),
        ((1, 2), (4, 3), ("R", "P(sum)", "S(0)", "S(1)")),
    ],
)
def test_all_pairs_on_odd_meshes_and_sizes(
    sizes: tuple[int, ...], shape: tuple[int, ...], texts: tuple[str, ...]
) -> None:
    with ranks(**{f"a{axis}": size for axis, size in enumerate(sizes)}) as world:
        pairs = list(itertools.product(placed_specs(world, shape, texts), repeat=2))
        check(world, shape, pairs if len(pairs) < 200 else random.Random(0).sample(pairs, 200))


@pytest.mark.parametrize("reduction", ["sum", "avg", "product", "max", "min"])
def test_every_reduction(reduction: str) -> None:
    with ranks(a=2, b=2) as world:
        texts = ("R", f"P({reduction})", "S(1)")
        check(world, (4, 6), list(itertools.product(placed_specs(world, (4, 6), texts), repeat=2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize(
    ("source", "target"), [("S(0)", "S(1)"), ("S(1)", "R"), ("R", "S(1,f=2)"), ("S(1)", "S(1,f=2)")]
)
def test_every_dtype(dtype: torch.dtype, source: str, target: str) -> None:
    with ranks(a=2) as world:
        path = Resharder(world.mesh, ring_price(world.mesh)).path((6, 8), 8, Spec.parse(source), Spec.parse(target))
        whole = whole_numbers((6, 8), dtype)
        result = world.run(path, whole)
        assert result.dtype == dtype
        assert torch.equal(result, whole)


def test_scalars_are_reduced() -> None:
    with ranks(a=2, b=2) as world:
        check(world, (), [(Spec.parse("P(sum) P(sum)"), Spec.all_replicated(2))])


def test_values_may_lie_in_any_order_in_memory() -> None:
    """Transposed inputs, such as gradients of weights, and contiguous results."""
    with ranks(a=2, b=2) as world:
        resharder, whole = Resharder(world.mesh, ring_price(world.mesh)), whole_numbers((4, 8))
        texts = ("R", "P(sum)", "S(0)", "S(1)", "S(1,f=2)")
        pairs = list(itertools.product(placed_specs(world, (4, 8), texts), repeat=2))
        for source, target in random.Random(0).sample(pairs, 100):
            path = resharder.path((4, 8), 8, source, target)
            with LocalTensorMode(4):
                scattered = world.scatter(whole, path.source)
                value = scattered.t().contiguous().t()
                result = lower(path, value, world.emit, whole.dtype)
            if any(step.kind != "make_partial" for step in path.steps):
                assert result.is_contiguous()
            assert torch.equal(world.gather(result, path.target, (4, 8)), whole), path


class Counting(EagerEmitter):
    """Runs operators and keeps their names."""

    def __init__(self, world: Ranks) -> None:
        coordinate = [world.emit.coordinate(axis) for axis in range(world.mesh.ndim)]
        super().__init__(world.mesh, [world.emit.group(axis) for axis in range(world.mesh.ndim)], coordinate)
        self.names: list[str] = []

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.names.append(op._opname)
        return super().call(op, *args, **kwargs)


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ("S(0)", "R", ["all_gather_into_tensor", "wait_tensor"]),
        ("P(sum)", "S(0)", ["reduce_scatter_tensor", "wait_tensor"]),
        ("P(sum)", "R", ["all_reduce", "wait_tensor"]),
        ("R", "P(max)", []),
        ("R", "S(0)", ["view", "view", "index_select", "view"]),
        ("S(1)", "R", ["all_gather_into_tensor", "wait_tensor", "view", "permute", "clone", "view"]),
    ],
)
def test_no_needless_operator(source: str, target: str, names: list[str]) -> None:
    with ranks(a=2) as world:
        path = Resharder(world.mesh, ring_price(world.mesh)).path((4, 4), 8, Spec.parse(source), Spec.parse(target))
        emit = Counting(world)
        with LocalTensorMode(2):
            lower(path, world.scatter(whole_numbers((4, 4)), path.source), emit, torch.float64)
        assert emit.names == names


def test_nothing_to_do_hands_the_value_back() -> None:
    mesh = MeshShape.of({"a": 2})
    spec = Spec.parse("S(0)")
    path = Resharder(mesh, ring_price(mesh)).path((4,), 8, spec, spec)
    value = torch.ones(2)
    assert lower(path, value, EagerEmitter(mesh, ["0"], [torch.tensor(0)]), torch.float32) is value


def test_every_rank_runs_the_same_operators() -> None:
    """A coordinate is a value: what it is changes no operator and no argument but itself."""
    with ranks(a=2, b=2) as world:
        path = Resharder(world.mesh, ring_price(world.mesh)).path(
            (4, 4), 8, Spec.parse("P(sum) R"), Spec.parse("S(1) S(1)")
        )
        emit = Counting(world)
        with LocalTensorMode(4):
            result = lower(path, world.scatter(whole_numbers((4, 4)), path.source), emit, torch.float64)
        assert isinstance(result, LocalTensor)
        assert len(result._local_tensors) == 4
