"""Every rank's part of the batches of a loader: which rows, in which order, and where it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import autoshard
from autoshard.errors import InputError
from autoshard.runtime.data_loader import BatchPart, ShardedDataLoader
from tests.training import TOLERANCE, fast_links
from tests.workers import Workers

Rows = list[int]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A rank that is told nothing by others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows with their index, and a random number; those that are read are noted."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([index]), "noise": torch.rand(1)}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(Numbers(10)[index] for index in range(10))


def part(loader: DataLoader[Any], mesh: DeviceMesh, index: int, count: int = 2) -> ShardedDataLoader:
    torch.manual_seed(3)  # the first rank's, from which all have the seed
    sharded = ShardedDataLoader(loader, mesh, BatchPart(count, index))
    torch.manual_seed(index)
    return sharded


def rows(batches: Any) -> list[Rows]:
    return [batch["x"].flatten().tolist() for batch in batches]


def loader(kind: type[DataLoader[Any]] = DataLoader, data: Any = None, **options: Any) -> DataLoader[Any]:
    return kind(data or Numbers(10), **{"batch_size": 4, **options})


@pytest.mark.parametrize("data", [Numbers(10), Stream()], ids=["by-index", "iterated"])
@pytest.mark.parametrize(("count", "last"), [(2, [[8], [9]]), (4, [[8], [9], [], []]), (1, [[8, 9]])])
def test_parts_are_those_of_shard_and_the_last_ones_may_be_empty(
    mesh: DeviceMesh, data: Any, count: int, last: list[Rows]
) -> None:
    parts = [rows(part(loader(data=data), mesh, index, count)) for index in range(count)]
    assert [list(itertools.chain(*whole)) for whole in zip(*parts, strict=True)] == rows(loader())
    assert [own[-1] for own in parts] == last
    assert len(part(loader(data=data) if isinstance(data, Numbers) else loader(), mesh, 0, count)) == 3


def test_a_rank_reads_its_own_rows_alone(mesh: DeviceMesh) -> None:
    data = Numbers(8)
    assert rows(part(loader(data=data), mesh, 1)) == [[2, 3], [6, 7]]
    assert data.read == [2, 3, 6, 7]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_draw_one_order_and_the_numbers_of_their_part(mesh: DeviceMesh, workers: int) -> None:
    options = {"shuffle": True, "num_workers": workers}
    first, again, other = (part(loader(**options), mesh, index) for index in (0, 0, 1))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    epochs = [[list(each) for each in (first, again, other)] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    orders = []
    for own, same, rest in epochs:
        assert rows(own) == rows(same)
        assert all(torch.equal(one["noise"], two["noise"]) for one, two in zip(own, same, strict=True))
        assert not torch.equal(own[0]["noise"], rest[0]["noise"])
        orders.append([row for pair in zip(rows(own), rows(rest), strict=True) for each in pair for row in each])
        assert sorted(orders[-1]) == list(range(10))
    assert orders[0] != orders[1]
    first.set_epoch(0)
    assert rows(first) == rows(epochs[0][0])


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("data", [Numbers(10), Stream()], ids=["by-index", "iterated"])
def test_a_run_goes_on_behind_the_last_batch(mesh: DeviceMesh, kind: Any, data: Any) -> None:
    options: dict[str, Any] = {} if isinstance(data, Stream) else {"shuffle": True}
    sharded = part(loader(kind, data, **options), mesh, 1)
    list(sharded)
    iterator = iter(sharded)
    next(iterator)
    state = sharded.state_dict()
    left = rows(iterator)
    after = rows(sharded)
    torch.manual_seed(77)
    resumed = ShardedDataLoader(loader(kind, data, **options), mesh, BatchPart(2, 1))
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert [rows(resumed), rows(resumed)] == [left, after]
    assert len(left) == 2


def test_loaders_that_cannot_be_cut(mesh: DeviceMesh) -> None:
    for wrong, text in ((Numbers(4), "got Numbers"), (loader(batch_size=None), "batch_size=None")):
        with pytest.raises(InputError, match=text):
            part(wrong, mesh, 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cut it into 4 equal parts"):
        list(ShardedDataLoader(loader(batch_size=6), mesh, BatchPart(4, 0, nested=True)))
    with pytest.raises(InputError, match="Linear is not parallelised"):
        autoshard.shard_dataloader(loader(), nn.Linear(1, 1))


class Squares(nn.Module):
    """The rows and, with labels, their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        rows = self.linear(x)
        return {"rows": rows} if y is None else {"loss": (rows - y).square().mean(), "rows": rows}


def batches(length: int, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(length, size, dtype=torch.float64, generator=generator) for size in (3, 2))
    return DataLoader([{"x": x[row], "y": y[row]} for row in range(length)], batch_size=4, **options)  # type: ignore[arg-type]


def train(module: nn.Module, loader: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rows = []
    for batch in loader:
        optimizer.zero_grad()
        result = module(**batch)
        result["loss"].backward()
        optimizer.step()
        rows.append(result["rows"].detach())
    module.eval()
    with torch.no_grad():
        return [*rows, *(module(batch["x"])["rows"] for batch in loader)]


def train_on_parts() -> tuple[list[Tensor], dict[str, Tensor], dict[str, int], str]:
    """Nine rows in batches of four: the last one leaves a rank without rows."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = Squares()
    example = {"x": torch.empty(2, 3, dtype=torch.float64), "y": torch.empty(2, 2, dtype=torch.float64)}
    autoshard.parallelize(
        *(module, mesh, (), example),
        cluster=fast_links(),
        inputs="local",
        outputs="local",
        example_inputs="local",
    )
    torch.manual_seed(dist.get_rank())
    rows = train(module, autoshard.shard_dataloader(batches(9), module))
    data = batches(9).dataset
    wrong: DataLoader[Any] = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, dist.get_rank()))
    with pytest.raises(InputError) as caught:
        next(iter(autoshard.shard_dataloader(wrong, module)))
    weights = {name: gathered(value) for name, value in module.state_dict().items()}
    return rows, weights, autoshard.sampler_arguments(module), str(caught.value)


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_training_on_parts_equals_one_device(two: Workers) -> None:
    alone = Squares()
    expected = train(alone, batches(9))
    (rows, weights, arguments, error), (others, _, other_arguments, _) = two.run(train_on_parts)
    for own, rest, whole in itertools.zip_longest(rows, others, expected):
        torch.testing.assert_close(torch.cat([own, rest]), whole, rtol=TOLERANCE, atol=TOLERANCE)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert (arguments, other_arguments) == tuple({"num_replicas": 2, "rank": rank} for rank in (0, 1))
    assert "without a DistributedSampler" in error
