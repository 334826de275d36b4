"""Uneven shares of the batch: what real ranks compute with 4 and 2 of 6 rows is what one device does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import autoshard
from autoshard.errors import InputError, MeshError, PlanError
from tests.models.common import fixed_seed
from tests.training import (
    OF_ONE_LAYER,
    TOLERANCE,
    Float64Mode,
    Rows,
    build,
    compare,
    default_float64,
    fast_links,
    train,
    unlike_devices,
)
from tests.workers import Workers

Inputs = dict[str, torch.Tensor]
ROWS = {"x": {0: "batch"}, "target": {0: "batch"}}
SHARES = {"dp": (4, 2)}
QUICKLY: dict[str, Any] = {"cluster": fast_links(), "search": autoshard.Search(effort="fast")}
COUNTS = ((4, 2), (3, 1))
"""Rows of two ranks, of 6 and of 4 rows in the proportion of 4 to 2."""


class Scores(nn.Module):
    """A loss with all that makes a mean over shares differ from the mean of their means.

    Labels that are ignored, more of them on one rank than on the other, batch norm, and the scores of all rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(functional.gelu(self.norm(self.taken(x))).transpose(1, 2))
        return scores, functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-1)


def scores() -> tuple[nn.Module, Inputs]:
    with fixed_seed(torch.float64, 0):
        target = torch.randint(8, (12, 6))
        target[1:4] = -1
        target[0, 2:] = -1
        return Scores(), {"x": torch.randn(12, 2, 6), "target": target}


def mlp() -> tuple[nn.Module, Inputs]:
    return build("mlp")


def first_rows(inputs: Mapping[str, torch.Tensor], count: int) -> Inputs:
    return {name: torch.cat([tensor, tensor])[:count].contiguous() for name, tensor in inputs.items()}


def own_rows(inputs: Inputs, counts: tuple[int, ...], rank: int) -> Inputs:
    start = sum(counts[:rank])
    return {name: tensor[start : start + counts[rank]] for name, tensor in inputs.items()}


def check(made: Callable[[], tuple[nn.Module, Inputs]], inputs: str, counts: Any, **options: Any) -> set[int]:
    """Two steps with each of these shares, beside one device; the rows that this rank activates in the last."""
    (module, example), (alone, _) = made(), made()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"dynamic": ROWS, "shares": SHARES, "inputs": inputs} | QUICKLY | options
    with Float64Mode():
        autoshard.parallelize(module, mesh, (), first_rows(example, 6), **options)
    seen = Rows()
    for shares in counts:
        batch = first_rows(example, sum(shares))
        with Float64Mode():
            expected = train(alone, batch, 2)
        own = own_rows(batch, shares, mesh.get_local_rank()) if inputs == "local" else batch
        seen.rows.clear()
        with default_float64(), seen:
            trained = train(module, own, 2)
        assert compare(trained, expected).worst <= TOLERANCE, shares
    return seen.rows


def test_means_and_statistics_are_those_of_the_whole_batch(two: Workers) -> None:
    assert two.run(check, scores, "global", COUNTS) == [{3}, {1}]


def test_local_inputs_come_in_any_shares(two: Workers) -> None:
    assert two.run(check, mlp, "local", ((4, 2), (1, 4), (3, 3))) == [{3}, {3}]


def test_parameters_may_lie_in_shards_on_the_axis_that_shares_the_batch(two: Workers) -> None:
    two.run(sharded_at_rest)


def sharded_at_rest() -> None:
    check(mlp, "global", ((4, 2),), hints={"up": (Shard(0),), "down.weight": (Shard(0),)})


def test_devices_of_two_kinds_take_shares_by_themselves(two: Workers) -> None:
    """15.7 and 10.6 TFLOP/s: 4 and 2 of 6 rows are done sooner than 3 and 3."""
    assert two.run(by_speed) == [{4}, {2}]


def by_speed() -> set[int]:
    return check(mlp, "global", ((4, 2),), shares="auto", cluster=unlike_devices())


def test_shares_beside_an_axis_of_even_ones(four: Workers) -> None:
    four.run(beside_tensor_parallelism)


def beside_tensor_parallelism() -> None:
    (module, example), (alone, _) = mlp(), mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = first_rows(example, 6)
    hints = {"up": (Replicate(), Shard(0)), "down.weight": (Replicate(), Shard(1))}
    autoshard.parallelize(module, mesh, (), batch, hints=hints, **QUICKLY, dynamic=ROWS, shares=SHARES)
    seen = Rows()
    with seen:
        trained = train(module, batch, 2)
    assert compare(trained, train(alone, batch, 2)).worst <= TOLERANCE
    assert seen.rows == {(4, 2)[mesh.get_coordinate()[0]]}


@pytest.mark.slow
def test_a_language_model_in_shares(two: Workers) -> None:
    two.run(language_model)


def language_model() -> None:
    dynamic = {"input_ids": {0: "batch"}, "labels": {0: "batch"}}
    check(lambda: build("hf_gpt2" + OF_ONE_LAYER), "local", ((4, 2), (3, 1)), dynamic=dynamic)


def test_what_cannot_be_shared_is_refused_on_every_rank(two: Workers) -> None:
    two.run(refused)


def refused() -> None:
    module, example = mlp()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batch = first_rows(example, 6)
    options = {"cluster": fast_links(), "dynamic": ROWS, "inputs": "local"}
    for shares, error, said in (
        ({"tp": (4, 2)}, MeshError, "no axis 'tp'"),
        ({"dp": (4, 2, 1)}, PlanError, "has 2 ranks and 3 shares"),
    ):
        with pytest.raises(error, match=said):
            autoshard.parallelize(module, mesh, (), batch, shares=shares, **options)
    other = autoshard.plan(module, mesh, (), batch, dynamic=ROWS, cluster=fast_links(), hints={"up": Shard(0)})
    with pytest.raises(PlanError, match=r"Plan with the same shares|plan with the same shares"):
        autoshard.parallelize(module, mesh, (), batch, shares=SHARES, plan=other, cluster=fast_links(), dynamic=ROWS)
    autoshard.parallelize(module, mesh, (), batch, shares=SHARES, **options)
    rank = mesh.get_local_rank()
    with pytest.raises(InputError, match=r"were given 4, 1 rows of target and 4, 2 of x"):
        module(batch["x"][: (4, 2)[rank]], batch["target"][: (4, 1)[rank]])
    with pytest.raises(InputError, match="a rank takes equally many of all inputs, and one at least"):
        module(**own_rows(batch, (6, 0), rank))


def test_a_batch_too_small_for_the_shares_is_refused(two: Workers) -> None:
    two.run(too_small)


def too_small() -> None:
    module, example = mlp()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"cluster": fast_links(), "dynamic": ROWS, "shares": {"dp": (9, 1)}}
    autoshard.parallelize(module, mesh, (), first_rows(example, 10), **options)
    with pytest.raises(InputError, match=r"a batch of 4 leaves a rank without a row in the shares \[9, 1\]"):
        module(**first_rows(example, 4))


@pytest.mark.parametrize("dynamic", [None, ROWS])
def test_a_single_rank_takes_all(dynamic: dict[str, dict[int, str]] | None) -> None:
    module, example = mlp()
    options = {"cluster": fast_links(), "dynamic": dynamic}
    plan = autoshard.plan(module, {"dp": 1, "tp": 2}, (), example, shares={"dp": (3,)}, **options)
    assert not plan.shares
    assert plan.decisions == autoshard.plan(module, {"dp": 1, "tp": 2}, (), example, **options).decisions
    with pytest.raises(PlanError, match="axis 'tp' has 2 ranks and 1 shares"):
        autoshard.plan(module, {"dp": 1, "tp": 2}, (), example, shares={"tp": (3,)}, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shares": {"dp": (4, 3)}}, "no dim that is split along it can be divided in 7 equal parts"),
        ({"shares": {"dp": (4, 2)}, "inputs": "local"}, "shares of what is not the batch are for inputs="),
        ({"shares": {"dp": (4, 0)}, "dynamic": ROWS}, "every rank takes a whole number above zero"),
        ({"shares": {"dp": 4}, "dynamic": ROWS}, "every rank takes a whole number above zero"),
        ({"shares": {}, "dynamic": ROWS}, "name one mesh axis"),
        ({"shares": SHARES, "dynamic": ROWS, "output_placements": "planned"}, "outputs come back whole"),
        (
            {"shares": SHARES, "dynamic": {"x": {1: "width"}, "target": {1: "width"}}},
            "give that dim of all inputs one name",
        ),
        ({"shares": SHARES, "dynamic": {"x": {0: "a"}, "target": {0: "b"}}}, "give that dim of all inputs one name"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return x.sum() + target.sum()

    with pytest.raises(PlanError, match=said):
        autoshard.plan(Sum(), {"dp": 2}, (torch.ones(6, 4), torch.ones(6, 4)), **options)
