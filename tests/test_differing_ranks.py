"""Ranks that are about to do different things: one error on all of them, before any waits for another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoshard
from autoshard.errors import InputError
from tests.training import fast_links
from tests.workers import Workers


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def _parallel(example: torch.Tensor | None = None, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    given = {} if example is None else {"example_args": (example,)}
    return autoshard.parallelize(_model(), mesh, cluster=fast_links(), **given, **options)


def _batch(rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * 6, dtype=torch.float32).reshape(rows, 6).to(dtype)


_ROWS = {"input": {0: "rows"}}


def _samplers_batches(rank: int) -> None:
    data = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, rank))
    (batch,) = next(iter(loader))
    _parallel()(batch)


def _tokens_of_other_batches(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    embedding = autoshard.parallelize(nn.Embedding(50, 4), mesh, cluster=fast_links())
    embedding(torch.arange(8) + rank)


def _other_lengths(rank: int) -> None:
    _parallel()(_batch(4 + rank))


def _other_lengths_later(rank: int) -> None:
    module = _parallel()
    module(_batch(4))
    module(_batch(6 + 2 * rank))


def _other_numbers_later(rank: int) -> None:
    module = _parallel()
    module(_batch(4))
    module(_batch(6) + rank)


def _other_dynamic_sizes(rank: int) -> None:
    _parallel(dynamic=_ROWS)(_batch(6 + 2 * rank))


def _other_dynamic_sizes_later(rank: int) -> None:
    module = _parallel(dynamic=_ROWS)
    module(_batch(4))
    module(_batch(4 + 2 * rank)).sum().backward()


def _other_local_rows_later(rank: int) -> None:
    module = _parallel(_batch(4), inputs="local")
    module(_batch(2))
    module(_batch(2 + rank))


def _other_rows_where_rows_are_not_split(rank: int) -> None:
    _parallel(_batch(4), inputs="local", input_placements={"input": torch.distributed.tensor.Replicate()})(
        _batch(4) + rank
    )


def _other_dtypes(rank: int) -> None:
    _parallel()(_batch(dtype=torch.float64 if rank else torch.float32))


def _other_gradient_modes(rank: int) -> None:
    with torch.set_grad_enabled(rank == 0):
        _parallel()(_batch())


def _other_training_modes(rank: int) -> None:
    _parallel().train(rank == 0)(_batch())


def _an_example_on_one(rank: int) -> None:
    _parallel(_batch() if rank == 0 else None)


def _a_plan_on_one(rank: int) -> None:
    plan = autoshard.plan(_model(), {"x": 2}, (_batch(),), cluster=fast_links())
    _parallel(_batch(), plan=plan if rank == 0 else None)


def _other_plans(rank: int) -> None:
    hints = {"0.weight": (torch.distributed.tensor.Shard(rank),)}
    _parallel(_batch(), plan=autoshard.plan(_model(), {"x": 2}, (_batch(),), cluster=fast_links(), hints=hints))


def _other_options(rank: int) -> None:
    _parallel(_batch(), inputs="local" if rank else "global")


_SEED = [0]
"""Of this rank's generator; no part of a module, so that nothing tells that it differs."""


class _Random(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin() if np.random.default_rng(_SEED[0]).random() < 0.4 else super().forward(x)


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _pipeline(rows: int = 4, microbatches: int = 2) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    return autoshard.parallelize(
        _Loss(), mesh, (_batch(rows),), pipeline=autoshard.Pipeline(microbatches=microbatches), cluster=fast_links()
    )


def _pipelines_of_other_lengths(rank: int) -> None:
    _pipeline(4 + 4 * rank)


def _pipelines_of_other_options(rank: int) -> None:
    _pipeline(8, 2 + 2 * rank)


def _pipelines_with_other_lengths_later(rank: int) -> None:
    _pipeline().train_step(_batch(8 + 4 * rank))


def _pipelines_with_other_batches(rank: int) -> None:
    _pipeline().train_step(_batch(4) + rank)


def _chance(rank: int) -> None:
    _SEED[0] = 1 if rank else 2
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    autoshard.parallelize(_Random(6, 6), mesh, (_batch(),))


CASES: dict[Callable[[int], None], str] = {
    _samplers_batches: r'input has other numbers on rank 1 than on rank 0.*DistributedSampler.*inputs="local"',
    _tokens_of_other_batches: r'the input input has other numbers on rank 1.*inputs="local"',
    _other_lengths: r"differ in the input input: torch.float32 \(4, 6\) on rank 0; torch.float32 \(5, 6\) on rank 1",
    _other_lengths_later: r"torch.float32 \(6, 6\) on rank 0; torch.float32 \(8, 6\) on rank 1",
    _other_numbers_later: r"the input input has other numbers on rank 1 than on rank 0",
    _other_dynamic_sizes: r"input: torch.float32 \(6, 6\) on rank 0; torch.float32 \(8, 6\) on rank 1",
    _other_dynamic_sizes_later: r"input: torch.float32 \(4, 6\) on rank 0; torch.float32 \(6, 6\) on rank 1",
    _other_local_rows_later: r"given 2, 3 elements of dim 0 of input; the parts that Shard\(0\) makes of 5 are 3, 2",
    _other_rows_where_rows_are_not_split: r"other numbers on rank 1 than on rank 0.*over no axis.*data_axes",
    _other_dtypes: r"torch.float32 \(4, 6\) on rank 0; torch.float64 \(4, 6\) on rank 1",
    _other_gradient_modes: r"whether gradients are wanted: yes on rank 0; no on rank 1",
    _other_training_modes: r"in training mode: yes on rank 0; no on rank 1",
    _an_example_on_one: r"whether an example call is given: one on rank 0; none on rank 1",
    _a_plan_on_one: r"the plan that is given: one of the graph \w+ on rank 0; none on rank 1",
    _other_plans: r"the decisions of the plan that is given: \w+ on rank 0; \w+ on rank 1",
    _chance: r"the graph that was captured: \w+ on rank 0; \w+ on rank 1.*chance",
    _pipelines_of_other_lengths: r"the input x: torch.float32 \(4, 6\) on rank 0; torch.float32 \(8, 6\) on rank 1",
    _pipelines_of_other_options: r"the options of the pipeline: .*microbatches=2.* on rank 0; .* on rank 1",
    _pipelines_with_other_lengths_later: r"the input x: torch.float32 \(8, 6\) on rank 0; torch.float32 \(12, 6\) on",
    _pipelines_with_other_batches: r"the input x has other numbers on rank 1 than on rank 0",
    _other_options: r"the option inputs: global on rank 0; local on rank 1",
}


def _said() -> list[str]:
    said = []
    for case in CASES:
        try:
            case(torch.distributed.get_rank())
        except InputError as error:
            said.append(str(error))
        else:
            said.append("nothing was raised")
    return said


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2, timeout=100.0) as workers:
        yield workers


@pytest.fixture(scope="module")
def messages(two: Workers) -> list[list[str]]:
    return two.run(_said)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_all_ranks_raise_one_error_that_says_who_differs(
    messages: list[list[str]], case: Callable[[int], None]
) -> None:
    first, second = (said[list(CASES).index(case)] for said in messages)
    assert first == second
    assert re.search(CASES[case], first), first


class _Exchanges(TorchDispatchMode):
    """While active, notes the bytes that this rank's collectives send of what is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            sent = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not any(tensor.is_floating_point() for tensor in sent):
                self.sizes.append(sum(tensor.nbytes for tensor in sent))
        return func(*args, **(kwargs or {}))


def _exchanges(options: dict[str, Any]) -> list[list[int]]:
    module = _parallel(_batch(), **options)
    noted = []
    for _ in range(3):
        with _Exchanges() as exchanges:
            module(_batch())
        noted.append(exchanges.sizes)
    return noted


@pytest.mark.parametrize(
    ("options", "steady"),
    [({}, []), ({"dynamic": _ROWS}, [16]), ({"inputs": "local"}, [32])],
    ids=["whole-batches", "dynamic-sizes", "local-rows"],
)
def test_later_calls_of_a_kind_compare_one_number_or_none(
    two: Workers, options: dict[str, Any], steady: list[int]
) -> None:
    """The first compares the whole batch, or makes a program; later ones only sizes that need no new program."""
    for first, *later in two.run(_exchanges, options):
        assert first
        assert later == [steady, steady]
