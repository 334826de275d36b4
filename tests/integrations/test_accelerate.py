"""A loop of accelerate on two processes beside one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, Dataset

import autoshard
from autoshard.errors import InputError, MeshError, PlanError
from tests.workers import Workers

pytest.importorskip("accelerate")

from accelerate import Accelerator, DataLoaderConfiguration

from autoshard.integrations.accelerate import AutoshardAccelerator, check_parallelised, data_axes_of

ROWS = 10


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down(torch.relu(self.up(x)))
        return (out - y).square().mean(), out


def train(
    accelerator: Accelerator, model: torch.nn.Module, rows: int, folder: Path | None = None, load: bool = False
) -> tuple[list[float], int]:
    """The loop that accelerate's pages show; returns losses, and the number of predictions."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    # As the seed of a program, by which rows are shuffled.
    torch.manual_seed(5)
    loader = DataLoader(Points(), batch_size=rows, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if load:
        accelerator.load_state(str(folder))
    losses = []
    for epoch in (1,) if load else (0, 1):
        loader.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss, _ = model(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if folder is not None and epoch == 0:
            accelerator.save_state(str(folder))
    count = 0
    with torch.no_grad():
        for _, y in loader:
            count += len(accelerator.gather_for_metrics(y))
    return losses, count


def _parallel(mesh: DeviceMesh, **options: Any) -> Net:
    model = Net()
    x, y = Points()[:4]
    hints = {"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}} if "tp" in mesh.mesh_dim_names else None
    autoshard.parallelize(model, mesh, (x, y), hints=hints, **options)
    return model


def _on_ranks(folder: Path) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = _parallel(mesh)
    accelerator = AutoshardAccelerator(mesh, cpu=True, gradient_accumulation_steps=2)
    run = train(accelerator, model, 4, folder)
    state = accelerator.get_state_dict(model)
    rows = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    placements = {"x": (Shard(0),), "y": (Shard(0),)}
    accelerator = AutoshardAccelerator(rows, ("dp",), cpu=True, gradient_accumulation_steps=2)
    other = _parallel(rows, inputs="local", input_placements=placements, accumulate=2)
    with accelerator.no_sync(other), accelerator.no_sync(model):
        # Only where the plan counts the sums.
        assert other._autoshard_runtime.programs.accumulation.active
        assert not model._autoshard_runtime.programs.accumulation.active
    assert data_axes_of(check_parallelised(model)) == ()
    assert data_axes_of(check_parallelised(other)) == ("dp",)
    resumed = train(accelerator, other, 2, folder, load=True)
    errors = []
    for wrong in (
        lambda: accelerator.prepare(Net()),
        lambda: AutoshardAccelerator(rows, ("tp",)),
        lambda: AutoshardAccelerator(rows, mixed_precision="bf16"),
        lambda: accelerator.gather_for_metrics(["a text"]),
    ):
        with pytest.raises((InputError, MeshError, PlanError)) as info:
            wrong()
        errors.append(str(info.value))
    return run, resumed, {name: value.shape for name, value in state.items()}, errors


def test_the_loop_of_accelerate(two: Workers, tmp_path: Path) -> None:
    # Rows in an order that a seed gives, as on ranks.
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    expected, count = train(Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config), Net(), 4)
    assert count == ROWS
    (run, resumed, state, errors), (run_too, resumed_too, none, _) = two.run(_on_ranks, tmp_path / "state")
    shapes = {name: value.shape for name, value in Net().state_dict().items()}
    assert state == shapes
    assert none == {}
    assert run == run_too == (pytest.approx(expected, rel=1e-9), ROWS)
    losses, count = resumed
    assert resumed == resumed_too
    # Ranks with rows of their own fill the last batch, which has two rows on one device.
    assert losses[:2] == pytest.approx(expected[3:5], rel=1e-9)
    assert (len(losses), count) == (3, ROWS)
    assert "Net is not parallelised" in errors[0]
    assert "out of dp" in errors[1]
    assert "pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in errors[2]
    assert "gathers tensors" in errors[3]
