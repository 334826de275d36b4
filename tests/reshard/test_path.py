"""Prices and shortest paths.

Prices of many pairs from one graph against those from a graph for each two groups.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.errors import InputError
from autoshard.reshard import path
from autoshard.reshard.path import Path, Resharder
from autoshard.reshard.states import closure, plain_nests, spec_of_state, state_graph, state_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, is_even, local_shape
from autoshard.specs.spec import Spec, is_shard, split_factor_of
from tests.reshard._torch import redistribution
from tests.reshard.prices import ring_price, wire_price
from tests.reshard.ranks import ranks
from tests.specs.strategies import placed_shapes, specs

CUBE = MeshShape.of({"a": 2, "b": 2, "c": 2})
GRID = MeshShape.of({"dp": 2, "tp": 2})


def every_spec(axes: int, texts: Sequence[str]) -> list[Spec]:
    return [Spec.parse(" ".join(choice)) for choice in itertools.product(texts, repeat=axes)]


def kinds(path: Path) -> list[tuple[str, int, str]]:
    return [(step.kind, step.axis, str(step.target)) for step in path.steps]


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("S(0) R", "S(0) R", []),
        ("S(0) R", "R R", [("all_gather", 0, "R R")]),
        ("R P(sum)", "R R", [("all_reduce", 1, "R R")]),
        ("R P(sum)", "R S(1)", [("reduce_scatter", 1, "R S(1)")]),
        ("R S(0)", "R S(1)", [("all_to_all", 1, "R S(1)")]),
        ("R R", "R S(0,f=3)", [("slice", 1, "R S(0,f=3)")]),
        ("R R", "P(sum) R", [("make_partial", 0, "P(sum) R")]),
        ("R S(0,f=6)", "R S(0,f=3)", [("all_to_all", 1, "R S(0,f=3)")]),
        ("S(0) S(0)", "R S(0,f=2)", [("all_gather", 0, "R S(0,f=2)")]),
        ("S(0) S(0)", "S(1) S(0)", [("all_to_all", 0, "S(1) S(0,f=2)"), ("all_to_all", 1, "S(1) S(0)")]),
    ],
)
def test_known_paths(source: str, target: str, steps: list[tuple[str, int, str]]) -> None:
    resharder = Resharder(GRID, ring_price(GRID))
    path = resharder.path((96, 64), 4, Spec.parse(source), Spec.parse(target))
    assert kinds(path) == steps
    assert path.seconds == sum(step.seconds for step in path.steps)


def test_pieces_of_one_dim_that_overlap_pass_by_another() -> None:
    """Between thirds and quarters of one dim blocks are not equal: no single all-to-all."""
    mesh = MeshShape.of({"tp": 4})
    path = Resharder(mesh, ring_price(mesh)).path((9600, 6400), 4, Spec.parse("S(0,f=3)"), Spec.parse("S(0)"))
    assert kinds(path) == [("all_to_all", 0, "S(1)"), ("all_to_all", 0, "S(0)")]


def test_bytes_are_what_a_rank_holds_before() -> None:
    resharder = Resharder(GRID, ring_price(GRID))
    gather = resharder.path((96, 64), 4, Spec.parse("S(0) S(1)"), Spec.parse("S(0) R")).steps[0]
    assert gather.bytes == 48 * 32 * 4
    reduce = resharder.path((96, 64), 4, Spec.parse("S(0) P(sum)"), Spec.parse("S(0) R")).steps[0]
    assert reduce.bytes == 48 * 64 * 4
    padded = resharder.path((7, 64), 2, Spec.parse("S(0) R"), Spec.parse("R R")).steps[0]
    assert padded.bytes == 4 * 64 * 2


def test_copies_are_priced_where_blocks_do_not_lie_one_behind_the_other() -> None:
    asked: list[str] = []

    def price(kind: str, amount: int, axis: int) -> float:
        asked.append(kind)
        return 1.0 if kind == "copy" else 8.0

    resharder = Resharder(GRID, price)
    assert resharder.path((8, 8), 4, Spec.parse("S(0) R"), Spec.parse("R R")).seconds == 8
    assert resharder.path((8, 8), 4, Spec.parse("S(1) R"), Spec.parse("R R")).seconds == 9
    assert resharder.path((1, 8, 8), 4, Spec.parse("S(1) R"), Spec.parse("R R")).seconds == 8
    assert resharder.path((8, 8), 4, Spec.parse("R P(sum)"), Spec.parse("R S(1)")).seconds == 9
    assert resharder.path((8, 8), 4, Spec.parse("R S(0,f=2)"), Spec.parse("R S(1)")).seconds == 10
    assert "copy" in asked


def test_size_one_axes_take_no_step() -> None:
    mesh = MeshShape.of({"a": 1, "b": 2})
    resharder = Resharder(mesh, ring_price(mesh))
    path = resharder.path((4, 4), 4, Spec.parse("S(0) S(-1)"), Spec.parse("P(sum) S(1)"))
    assert path.steps == ()
    assert path.source is path.target is Spec.parse("R S(1)")


def test_no_path_leads_from_a_shard_to_a_partial_alone() -> None:
    resharder = Resharder(
        MeshShape.of({"a": 2}), lambda kind, amount, axis: float("inf") if kind == "make_partial" else 1
    )
    shard, partial = Spec.parse("S(0)"), Spec.parse("P(sum)")
    assert np.isinf(resharder.seconds((4,), 4, [shard], [partial])).all()
    with pytest.raises(ValueError, match=r"from S\(0\) to P\(sum\)"):
        resharder.path((4,), 4, shard, partial)


def test_what_no_program_can_hold_has_no_price() -> None:
    resharder = Resharder(GRID, ring_price(GRID))
    odd, whole = Spec.parse("S(0) S(0)"), Spec.all_replicated(2)
    assert np.isinf(resharder.seconds((7,), 4, [odd, whole], [whole])).tolist() == [[True], [False]]
    with pytest.raises(ValueError, match=r"can not lie as S\(0\) S\(0\)"):
        resharder.path((7,), 4, whole, odd)


def test_a_tensor_of_more_bytes_than_can_be_priced_is_refused() -> None:
    resharder = Resharder(GRID, ring_price(GRID))
    source, target = Spec.parse("S(0) R"), Spec.parse("R R")
    assert resharder.path((2**49,), 4, source, target).seconds > 0
    with pytest.raises(InputError, match=r"shape \(1000000, 2000000000\) has 7276\.0 TiB, and 4096\.0 TiB"):
        resharder.path((1000000, 2000000000), 4, source, target)


def test_routed_rows_stay_as_they_are() -> None:
    resharder = Resharder(GRID, ring_price(GRID))
    routed, other, split = map(Spec.parse, ("S(0,by=group) S(0,by=source)", "S(0,by=group) R", "S(0) S(0)"))
    table = resharder.seconds((8, 8), 4, [routed, split], [split, routed, other])
    assert np.isinf(table).tolist() == [[True, False, True], [False, True, True]]
    assert table[0, 1] == table[1, 0] == 0
    with pytest.raises(ValueError, match="the data decides which rows"):
        resharder.path((8, 8), 4, routed, split)


def test_tables_are_remembered_and_read_only() -> None:
    resharder = Resharder(GRID, ring_price(GRID))
    specs_ = every_spec(2, ("R", "S(0)"))
    table = resharder.seconds((8, 8), 4, specs_, specs_)
    assert table is resharder.seconds((8, 8), 4, list(specs_), tuple(specs_))
    assert not table.flags.writeable
    assert (np.diag(table) == 0).all()


def _role(placement: Placement) -> object:
    """Return the reduction or the dim of a placement. Other axes of the dim decide whether a shard is strided."""
    return placement.reduce_op if isinstance(placement, Partial) else getattr(placement, "dim", None)


@settings(max_examples=40)
@given(placed_shapes())
@example((GRID, (4, 1), Spec.parse("P(sum) S(0,f=2)")))
def test_steps_lead_from_source_to_target(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    assume(state_of(shape, spec, mesh) is not None)
    resharder = Resharder(mesh, ring_price(mesh))
    whole = Spec.all_replicated(mesh.ndim)
    for source, target in ((spec, whole), (whole, spec)):
        path = resharder.path(shape, 8, source, target)
        ends = [path.source, *(step.target for step in path.steps)]
        assert [step.source for step in path.steps] == ends[:-1]
        assert ends[0] is canonical(shape, source, mesh)
        assert ends[-1] is path.target is canonical(shape, target, mesh)
        for step in path.steps:
            before, after = step.source, step.target
            changed = [axis for axis in range(mesh.ndim) if _role(before[axis]) != _role(after[axis])]
            assert changed in ([], [step.axis])
            local_shape(shape, step.target, mesh)


def test_a_path_costs_what_its_pair_is_priced_at() -> None:
    """Whatever else is priced in the same table, so that ranks asked differently find the same path."""
    shape, texts = (12, 8, 24), ("R", "P(sum)", "S(0)", "S(1)", "S(2)", "S(0,f=3)", "S(2,f=3)")
    chosen = random.Random(0).sample(every_spec(3, texts), 40)
    chosen = [spec for spec in chosen if state_of(shape, spec, CUBE) is not None]
    table = Resharder(CUBE, ring_price(CUBE)).seconds(shape, 4, chosen, chosen)
    alone = Resharder(CUBE, ring_price(CUBE))
    for row, column in random.Random(1).sample(list(np.ndindex(table.shape)), 60):
        path = alone.path(shape, 4, chosen[row], chosen[column])
        assert table[row, column] == pytest.approx(path.seconds, rel=1e-12)


@settings(max_examples=30)
@given(specs(2, 2, (1, 2)), specs(2, 2, (1, 2)), specs(2, 2, (1, 2)))
def test_a_detour_is_never_shorter(source: Spec, middle: Spec, target: Spec) -> None:
    """Among specs that all paths may pass."""
    shape = (64, 64)
    assume(all(state_of(shape, spec, GRID) is not None for spec in (source, middle, target)))
    assume(len({placement for spec in (source, middle, target) for placement in spec if not _plain(placement)}) < 2)
    resharder = Resharder(GRID, ring_price(GRID))
    table = resharder.seconds(shape, 4, [source, middle], [middle, target])
    assert table[0, 1] <= (table[0, 0] + table[1, 1]) * (1 + 1e-12)


def _plain(placement: Placement) -> bool:
    return is_shard(placement) or isinstance(placement, Replicate)


def _priced_as_torch_does(steps: Sequence[tuple[int, Placement, Placement]], held: float, mesh: MeshShape) -> float:
    """Price of DTensor's steps for a rank that holds `held` bytes before them."""
    price, total = wire_price(mesh), 0.0
    for axis, before, after in steps:
        size = mesh.sizes[axis]
        if is_shard(before):
            total += price("all_to_all" if is_shard(after) else "all_gather", int(held), axis)
            held *= 1 if is_shard(after) else size
        elif not isinstance(before, Replicate):
            total += price("reduce_scatter" if is_shard(after) else "all_reduce", int(held), axis)
            held /= size if is_shard(after) else 1
        else:
            held /= size if is_shard(after) else 1
    return total


def test_never_dearer_than_torch() -> None:
    """All pairs of specs of a 3-d tensor on a (2, 2, 2) mesh; torch's greedy steps, and its own graph on a sample."""
    shape = (8, 16, 24)
    chosen = every_spec(3, ("R", "P(sum)", "S(0)", "S(1)", "S(2)"))
    held = {spec: np.prod(local_shape(shape, spec, CUBE)) for spec in chosen}
    amounts = (4, 4 << 16)  # bytes of an element, which torch's steps do not depend on
    with ranks(a=2, b=2, c=2) as world:
        tables = [Resharder(CUBE, wire_price(CUBE)).seconds(shape, amount, chosen, chosen) for amount in amounts]
        assert np.isfinite(tables).all()
        sample = set(random.Random(0).sample(range(len(chosen) ** 2), 150))
        cheaper = [0, 0]
        for number, (row, column) in enumerate(np.ndindex(tables[0].shape)):
            source, target = chosen[row], chosen[column]
            if any(is_shard(a) and not _plain(b) for a, b in zip(source, target, strict=True)):
                continue
            for graph in (False, True) if number in sample else (False,):
                steps = redistribution(world.device_mesh, shape, source, target, graph=graph)
                for place, (amount, table) in enumerate(zip(amounts, tables, strict=True)):
                    torchs = _priced_as_torch_does(steps, held[source] * amount, CUBE)
                    assert table[row, column] <= torchs * (1 + 1e-12), (source, target, steps, amount)
                    cheaper[place] += table[row, column] < torchs * (1 - 1e-9)
        assert min(cheaper) > 0


def _nests(spec: Spec) -> bool:
    """Whether every dim with a strided piece is split by one axis alone: what DTensor's steps then mean is clear."""
    dims = [placement.dim for placement in spec if is_shard(placement)]  # type: ignore[attr-defined]
    return all(
        split_factor_of(placement) == 1 or dims.count(placement.dim) == 1  # type: ignore[attr-defined]
        for placement in spec
        if is_shard(placement)
    )


def _on_the_way(source: Spec, steps: Sequence[tuple[int, Placement, Placement]]) -> Iterator[Spec]:
    """The specs that DTensor's steps go through."""
    spec = source
    yield spec
    for axis, _, after in steps:
        spec = spec.replace(axis, after)
        yield spec


def test_never_dearer_than_torch_between_strided_specs() -> None:
    """All pairs of specs with strided pieces on (2, 2).

    Left out are the steps through specs in which one dim is split by several axes, one of them strided: DTensor takes
    such a piece from the local shard as if that were the whole dim, and so leaves other elements there than it says.
    """
    shape, amount = (8, 16, 24), 4
    square = MeshShape.of({"a": 2, "b": 2})
    texts = ("R", "P(sum)", "S(0)", "S(1)", "S(0,f=2)", "S(1,f=4)")
    chosen = [spec for spec in every_spec(2, texts) if is_even(shape, spec, square) and _nests(spec)]
    held = {spec: np.prod(local_shape(shape, spec, square)) * amount for spec in chosen}
    compared = refused = 0
    with ranks(a=2, b=2) as world:
        table = Resharder(square, wire_price(square)).seconds(shape, amount, chosen, chosen)
        for row, column in np.ndindex(table.shape):
            source, target = chosen[row], chosen[column]
            if any(is_shard(a) and b.is_partial() for a, b in zip(source, target, strict=True)):
                continue
            for graph in (False, True):
                steps = redistribution(world.device_mesh, shape, source, target, graph=graph)
                if steps is None:
                    refused += 1
                elif all(map(_nests, _on_the_way(source, steps))):
                    torchs = _priced_as_torch_does(steps, held[source], square)
                    assert table[row, column] <= torchs * (1 + 1e-12), (source, target, steps)
                    compared += 1
    assert compared > (200 if refused else 1000)


CASES = [
    ({"a": 2, "b": 2}, (4, 2, 4, 16)),
    ({"a": 2, "b": 2}, (16, 64, 64)),
    ({"a": 2, "b": 4}, (4, 64, 96)),
    ({"a": 2, "b": 2, "c": 2}, (8, 24)),
    ({"a": 4}, (8, 16, 4)),
]
SECONDS = {"all_gather": 1e-6, "copy": 3e-7, "all_to_all": 2e-6}


def _price(kind: str, amount: int, axis: int) -> float:
    return SECONDS.get(kind, 1.5e-6) + amount * (1e-11 if kind == "copy" else 1e-10) * (1 + axis)


def _specs(shape: tuple[int, ...], mesh: MeshShape, chance: random.Random) -> list[Spec]:
    """Specs of shards and of strided shards, with steps above them of several sizes."""
    nests = []
    for size in shape:
        result = set(plain_nests(size, mesh))
        for outer in (2, 3, 4, 8):
            if size % outer == 0:
                more = plain_nests(size // outer, mesh)
                result |= {tuple(loop._replace(outer=loop.outer * outer) for loop in nest) for nest in more}
        nests.append(closure(result, mesh))
    states = state_graph(tuple(nests), frozenset({"sum"}), mesh).states
    return [spec_of_state(state, shape, mesh) for state in chance.sample(states, min(len(states), 24))]


@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_one_graph_prices_every_pair_as_its_own_graph_does(
    axes: dict[str, int], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, chance = MeshShape.of(axes), random.Random(0)
    sources, targets = _specs(shape, mesh, chance), _specs(shape, mesh, chance)
    together = Resharder(mesh, _price).seconds(shape, 4, sources, targets)
    monkeypatch.setattr(path, "_MOST_STATES", 0)
    assert np.array_equal(together, Resharder(mesh, _price).seconds(shape, 4, sources, targets))


def test_a_table_of_many_groups_makes_one_graph() -> None:
    mesh, shape = MeshShape.of({"a": 2, "b": 2}), (16, 64, 64)
    specs = _specs(shape, mesh, random.Random(0))
    resharder = Resharder(mesh, _price)
    resharder.seconds(shape, 4, specs, specs)
    assert len(resharder._graphs) == 1
