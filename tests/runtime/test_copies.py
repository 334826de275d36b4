"""Deep copies of a parallelised module, averages of its weights, and pickles."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import autoshard
from autoshard.errors import InputError
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.runtime.shards import gather_full_tensor, local_of
from autoshard.specs.spec import shard_placement
from tests.runtime.meshes import simulated_mesh
from tests.training import fast_links
from tests.workers import Workers

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Net(nn.Module):
    """A fused projection, batch norm, tied weights, and an output besides the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fused = nn.Linear(6, 24)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.down, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.fused(x).chunk(3, -1)
        y = self.up(self.down(self.dropout(self.norm(query * key.sigmoid() + value))).tanh())
        return y.square().mean(), y


HINTS = {"fused.weight": [shard_placement(0, 3)], "fused.bias": [shard_placement(0, 3)], "down.weight": [Shard(1)]}


def batch(seed: int) -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def parallel(*, example: bool = True, dropout: float = 0.0, **options: Any) -> Net:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    args = (batch(0),) if example else ()
    options = {"hints": HINTS, "cluster": fast_links(), **options}
    model = autoshard.parallelize(Net(dropout).double(), mesh, args, **options)
    assert isinstance(model, Net)
    return model


def train(model: nn.Module, seeds: range, after_step: Callable[[], None] = lambda: None) -> list[float]:
    """Train by the loss, then by the other output."""
    # Not Adam: the batch norm leaves rounding errors for gradients of a bias, which Adam would scale up.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for seed in seeds:
        loss, y = model(batch(seed))
        (y.sin().mean() if seed == seeds[-1] else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        losses.append(float(loss.detach()))
    return losses


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather_full_tensor(value) for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, alone: nn.Module) -> None:
    state, expected = whole_state(model), alone.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, **TOLERANCE, msg=name)


def runtime_of(model: nn.Module) -> Any:
    return vars(model)["_autoshard_runtime"]


def _copy_and_train() -> None:
    model, alone = parallel(), Net().double()
    train(model, range(2))
    train(alone, range(2))
    copied, copied_alone = copy.deepcopy(model), copy.deepcopy(alone)

    assert type(copied) is Net
    assert copied.up.weight is copied.down.weight
    assert copied.sharding_plan is model.sharding_plan
    for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert isinstance(original, DTensor)
        assert parameter.placements == original.placements
        assert parameter.device_mesh is original.device_mesh
        assert local_of(parameter).data_ptr() != local_of(original).data_ptr()

    assert train(copied, range(2, 6)) == pytest.approx(train(copied_alone, range(2, 6)), rel=1e-9)
    assert_same_state(copied, copied_alone)
    # The original is as it was, and trains by itself.
    assert_same_state(model, alone)
    assert train(model, range(6, 9)) == pytest.approx(train(alone, range(6, 9)), rel=1e-9)
    assert_same_state(model, alone)
    assert_same_state(copied, copied_alone)
    for served, served_alone in ((model, alone), (copied, copied_alone), (copy.deepcopy(copied), copied_alone)):
        with torch.no_grad():
            y, expected = served.eval()(batch(9))[1], served_alone.eval()(batch(9))[1]
        torch.testing.assert_close(gather_full_tensor(y), expected, **TOLERANCE)


def test_a_copy_trains_and_evaluates_by_itself(two: Workers) -> None:
    two.run(_copy_and_train)


def _programs() -> None:
    model = parallel()
    plan = runtime_of(model).maker.planner.plan
    copied = copy.deepcopy(copy.deepcopy(model))
    maker = runtime_of(copied).maker
    planned = []
    maker.planner.plan = lambda call: planned.append(call) or plan(call)
    copied(batch(1))
    (program,), (original,) = (
        [served.program for served in runtime_of(each).programs.table.values()] for each in (copied, model)
    )
    assert program.halves is original.halves
    assert program.ranks is original.ranks
    assert not planned
    # Another kind of call is planned, with the parameters where they are.
    placements = [parameter.placements for parameter in model.parameters()]
    copied.eval()(batch(1))
    assert len(planned) == 1 - torch.distributed.get_rank()
    assert [parameter.placements for parameter in copied.parameters()] == placements
    assert [parameter.placements for parameter in model.parameters()] == placements


def test_a_copy_runs_the_programs_of_the_original(two: Workers) -> None:
    two.run(_programs)


def _before_the_first_call() -> None:
    model, alone = parallel(example=False), Net().double()
    copied = copy.deepcopy(model)
    expected = train(alone, range(3))
    for each in (copied, model):
        assert train(each, range(3)) == pytest.approx(expected, rel=1e-9)
        assert_same_state(each, alone)
        assert not each.down.weight.placements[0].is_replicate()


def test_a_module_is_copied_before_it_was_planned(two: Workers) -> None:
    two.run(_before_the_first_call)


def _dropout() -> None:
    model = parallel(dropout=0.5)
    copied = copy.deepcopy(model)
    outputs = []
    for served in (model, copied, copied):
        if served is not copied or len(outputs) == 1:
            torch.manual_seed(7)
        loss, _ = served(batch(0))
        outputs.append(float(loss.detach()))
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_copy_draws_as_the_original_would(two: Workers) -> None:
    two.run(_dropout)


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "exponential in lists with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.8), "use_buffers": True},
    "exponential with buffers": {"avg_fn": lambda old, new, count: 0.8 * old + 0.2 * new, "use_buffers": True},
}


def _trained_averages(model: Net) -> dict[str, AveragedModel]:
    """The averages of every kind of one training."""
    averages = {kind: AveragedModel(model, **options) for kind, options in AVERAGES.items()}
    train(model, range(4), lambda: [average.update_parameters(model) for average in averages.values()].clear())
    return averages


def _average() -> list[str]:
    """The kinds of averages that are not as on one device."""
    model, alone = parallel(), Net().double()
    averages, expected = _trained_averages(model), _trained_averages(alone)
    assert_same_state(model, alone)
    wrong = []
    for kind, average in averages.items():
        try:
            assert_same_state(average, expected[kind])
            with torch.no_grad():
                y, other = average.eval()(batch(5))[1], expected[kind].eval()(batch(5))[1]
            torch.testing.assert_close(gather_full_tensor(y), other, **TOLERANCE)
        except AssertionError as error:
            wrong.append(f"{kind}: {error}")
    return wrong


def test_averages_of_weights_are_those_of_one_device(two: Workers) -> None:
    assert two.run(_average) == [[], []]


def _checkpoint() -> None:
    model, alone = parallel(), Net().double()
    copied = copy.deepcopy(model)
    train(copied, range(2))
    train(alone, range(2))
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(copied, options=options)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, **TOLERANCE, msg=name)
    assert_same_state(model, Net().double())
    copied.load_state_dict(Net().double().state_dict(), assign=True)
    assert copied.up.weight is copied.down.weight
    assert_same_state(copied, Net().double())
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)


def test_checkpoints_of_a_copy(two: Workers) -> None:
    two.run(_checkpoint)


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return scale * self.linear(x)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(x=2) as mesh:
        yield mesh


def _around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def double(x: Tensor, scale: float = 2.0) -> Tensor:
        return 2 * forward(x, scale)

    return double


@pytest.mark.parametrize("patched", [False, True])
def test_forward_keeps_its_signature(mesh: DeviceMesh, patched: bool) -> None:
    module = Patched()
    if patched:
        module.forward = _around(module.forward)  # type: ignore[method-assign]
    before = inspect.signature(module.forward)
    autoshard.parallelize(module, mesh)
    assert inspect.signature(module.forward) == before
    assert module.forward.__name__ == ("double" if patched else "forward")


def test_a_copy_that_would_call_the_original_is_refused(mesh: DeviceMesh) -> None:
    module = Patched()
    autoshard.parallelize(module, mesh)
    module.forward = _around(module.forward)  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"forward of Patched was replaced by <function .*Replace forward before"):
        copy.deepcopy(module)


def _pickle() -> None:
    module = Patched()
    autoshard.parallelize(module, init_device_mesh("cpu", (2,)))
    for pickled in (module, nn.Sequential(module)):
        for write in (pickle.dumps, partial(torch.save, f=io.BytesIO())):
            with pytest.raises(InputError) as info:
                write(pickled)
            for way in ("model.state_dict()", "torch.distributed.checkpoint.save", "autoshard.full_state_dict"):
                assert way in str(info.value)


def test_a_pickle_is_refused(two: Workers) -> None:
    two.run(_pickle)


def test_a_pickle_of_a_pipeline_is_refused() -> None:
    pipeline = PipelineModule.__new__(PipelineModule)
    with pytest.raises(InputError, match=r"a pipeline cannot be pickled.*state_dict"):
        pickle.dumps(pipeline)


def _batch_norm() -> None:
    batches = [batch(0), batch(1)]
    alone, averaged = AveragedModel(Net().double()), AveragedModel(parallel())
    for model in (alone, averaged):
        update_bn(batches, model)
    for name, expected in alone.named_buffers():
        torch.testing.assert_close(averaged.get_buffer(name), expected, rtol=1e-9, atol=1e-12)


def test_update_bn(two: Workers) -> None:
    two.run(_batch_norm)
