"""Calls that are new on some ranks and known on others: an error that names both, before any exchange."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import InputError
from autoshard.runtime import call_order
from tests.training import fast_links
from tests.workers import Workers


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).mean(0)


class _TwoOutputs(_Model):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y.square().mean(), y


class _Loss(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _batch(rows: int) -> torch.Tensor:
    return torch.arange(rows * 6, dtype=torch.float32).reshape(rows, 6) / 100


def _parallel(model: type[nn.Module] = _Model, **options: Any) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    hints = {"layers.0.weight": (torch.distributed.tensor.Shard(0),)}
    module = autoshard.parallelize(model(), mesh, (_batch(4),), cluster=fast_links(), hints=hints, **options)
    module(_batch(4))
    return module


Calls = tuple[Callable[[], Any], Callable[[], Any]]
"""A call that is new where rank 0 makes it, and the known one that other ranks make in its place."""


def _other_rows() -> Calls:
    module = _parallel()
    return lambda: module(_batch(6 + 2 * dist.get_rank())).sum(), lambda: module(_batch(4)).sum()


def _other_rows_than_those_of_the_example() -> Calls:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    module = autoshard.parallelize(_Model(), mesh, (_batch(4),), cluster=fast_links())
    return lambda: module(_batch(6)).sum(), lambda: module(_batch(4)).sum()


def _another_attribute(**options: Any) -> Calls:
    module = _parallel(**options)

    def scaled(scale: float) -> torch.Tensor:
        module.scale = scale
        return module(_batch(4)).sum()

    return lambda: scaled(2.0), lambda: scaled(1.0)


def _another_attribute_beside_compared_sizes() -> Calls:
    return _another_attribute(dynamic={"x": {0: "rows"}})


def _other_rows_of_a_method() -> Calls:
    module = _parallel()
    autoshard.register_forward_method(module, "features")
    module.features(_batch(4))
    return lambda: module.features(_batch(6)).sum(), lambda: module.features(_batch(4)).sum()


def _a_method_beside_forward() -> Calls:
    module = _parallel()
    autoshard.register_forward_method(module, "features")
    return lambda: module.features(_batch(4)).sum(), lambda: module(_batch(4)).sum()


def _outputs_besides_the_loss() -> Calls:
    loss, y = _parallel(_TwoOutputs)(_batch(4))
    return lambda: (loss + y.sum()).backward(), lambda: loss.backward()


def _a_batch_of_a_pipeline() -> Calls:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = autoshard.Pipeline(microbatches=2)
    module: Any = autoshard.parallelize(_Loss(), mesh, (_batch(4),), pipeline=pipeline, cluster=fast_links())
    module.train_step(_batch(4))
    return lambda: module.train_step(_batch(8)), lambda: module.train_step(_batch(4))


CASES: dict[Callable[[], Calls], str] = {
    _other_rows: r"differ in the input x: torch.float32 \(6, 6\) on rank 0; torch.float32 \(4, 6\) on rank 1.*local",
    _other_rows_than_those_of_the_example: r"torch.float32 \(6, 6\) on rank 0; torch.float32 \(4, 6\) on rank 1",
    _another_attribute: r"the program of the call: a new one \(.*scale: 2.0\) on rank 0; one that is there on rank 1",
    _other_rows_of_a_method: r"torch.float32 \(6, 6\) on rank 0; torch.float32 \(4, 6\) on rank 1",
    _a_method_beside_forward: r"the program of the call: a new one on rank 0; one that is there on rank 1",
    _a_batch_of_a_pipeline: r"torch.float32 \(8, 6\) on rank 0; torch.float32 \(4, 6\) on rank 1.*the whole batch",
}
# After these, rank 0 is behind another exchange than rank 1 and cannot make the known call.
ENDING_CASES: dict[Callable[[], Calls], str] = {
    _another_attribute_beside_compared_sizes: r"a new one \(.*scale: 2.0\) on rank 0; one that is there on rank 1",
    _outputs_besides_the_loss: r"\(the outputs that are differentiated: .*\) on rank 0; one that is there on rank 1",
}


def _said(case: Callable[[], Calls]) -> tuple[str, float]:
    """Return what the last rank logs, what others raise, and the result of the known call, which all ranks make."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("autoshard")
    with mock.patch.object(call_order, "_LOOK_SECONDS", 0.1):
        new, known = case()
        if dist.get_rank() < dist.get_world_size() - 1:
            with pytest.raises(InputError) as caught:
                new()
            return str(caught.value), known().item()
        log.addHandler(handler)
        try:
            result = known().item()
            return "; ".join(records), result
        finally:
            log.removeHandler(handler)


def _end_after_error(case: Callable[[], Calls]) -> None:
    with mock.patch.object(call_order, "_LOOK_SECONDS", 0.1):
        new, known = case()
        if dist.get_rank():
            known()
        try:
            new()
        except InputError:
            os._exit(1)


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2, timeout=60.0) as workers:
        yield workers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_a_new_call_beside_a_known_one_is_an_error_and_the_known_one_may_follow(
    two: Workers, case: Callable[[], Calls]
) -> None:
    (raised, first), (logged, second) = two.run(_said, case)
    assert re.search(CASES[case], raised), raised
    assert logged == f"rank 1 is in a call that other ranks do not make: {raised}"
    assert first == second


@pytest.mark.slow
def test_of_three_ranks_two_raise_the_error_of_the_third() -> None:
    with Workers(3, timeout=60.0) as three:
        (raised, *_), (also_raised, *_), (logged, *_) = three.run(_said, _other_rows)
    assert raised == also_raised
    assert re.search(r"differ in the input x: .*; torch.float32 \(4, 6\) on rank 2", raised), raised
    assert logged.endswith(raised)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDING_CASES, ids=lambda case: case.__name__[1:])
def test_a_rank_in_a_known_call_raises_the_error_of_a_rank_that_ends(two: Workers, case: Callable[[], Calls]) -> None:
    with pytest.raises(AssertionError) as caught:
        two.run(_end_after_error, case)
    assert "rank 0: the process ended" in str(caught.value)
    assert re.search(f"InputError: the ranks differ in .*{ENDING_CASES[case]}", str(caught.value)), caught.value


def _late(limit: float) -> str:
    module = _parallel()
    world: Any = dist.group.WORLD
    store = world.get_group_store()
    before = store.timeout
    store.set_timeout(timedelta(seconds=limit))
    try:
        if dist.get_rank() and limit < 1:
            store.wait(["rank 0 raised"], timedelta(seconds=60))
        elif dist.get_rank():
            time.sleep(0.5)
        module(_batch(6))
    except InputError as error:
        store.set("rank 0 raised", "")
        return str(error)
    finally:
        store.set_timeout(before)
    return "nothing was raised"


def test_a_rank_may_be_late_for_a_new_call_up_to_the_timeout_of_the_group(two: Workers) -> None:
    assert two.run(_late, 100.0) == ["nothing was raised"] * 2
    first, second = two.run(_late, 0.2)
    assert first == second
    assert re.match(r"rank 1 began no new call within 0.2 s, the timeout of .* rank 0 did \(.*\(6, 6\)", first), first
