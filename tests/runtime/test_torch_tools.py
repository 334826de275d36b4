"""Every tool of torch that meets the shards of a parallelised module, with every kind of placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoshard.errors import InputError
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.optimizers import prepare_optimizers
from autoshard.runtime.shards import distribute, gather_full_tensor, local_of, replace_parameters
from autoshard.specs.spec import Spec
from tests.runtime.meshes import get_full

ONE_AXIS = {
    "uneven": ((2,), "S(1)"),
    "strided": ((2,), "S(0,f=3)"),
    "strided uneven": ((2,), "S(1,f=3)"),
}
TWO_AXES = {
    "nested uneven": ((2, 2), "S(1) S(1)"),
    "strided twice": ((2, 2), "S(0,f=3) S(0,f=3)"),
}
LAYOUTS = ONE_AXIS | TWO_AXES
SHAPE = (24, 9)


@cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def plain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.float64))


def placed(layout: str, seed: int, device: str = "cpu") -> nn.Sequential:
    sizes, text = LAYOUTS[layout]
    module = plain(seed)
    module.to(device)
    replace_parameters(module, {"0.weight": Spec.parse(text)}, mesh_of(sizes))
    install_hooks(module)
    prepare_optimizers(module, lambda: None)
    return module


def weight_of(module: nn.Module) -> DTensor:
    weight = module.get_parameter("0.weight")
    assert isinstance(weight, DTensor)
    return weight


def near(value: Tensor, expected: Tensor) -> bool:
    if isinstance(value, DTensor):
        value = gather_full_tensor(value)
    return value.shape == expected.shape and torch.allclose(value, expected, rtol=1e-9, atol=0)


def expected_weight() -> Tensor:
    return plain(0)[0].weight.detach()


def full_tensor(layout: str, folder: str) -> bool:
    module = placed(layout, 0)
    return near(weight_of(module).full_tensor().detach(), expected_weight())


def redistribute(layout: str, folder: str) -> bool:
    weight = weight_of(placed(layout, 0)).detach()
    mesh = weight.device_mesh
    there = weight.redistribute(mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(1)])
    across = weight.redistribute(mesh, [Shard(1)] * mesh.ndim)
    back = there.redistribute(mesh, weight.placements)
    same = [near(value, expected_weight()) for value in (there, across, back)]  # every rank joins all
    return all(same)


def distribute_from_whole(layout: str, folder: str) -> bool:
    weight = weight_of(placed(layout, 0))
    built = distribute_tensor(expected_weight(), weight.device_mesh, weight.placements)
    return torch.equal(local_of(built), local_of(weight))


def gradient_through_full_tensor(layout: str, folder: str) -> bool:
    weight = weight_of(placed(layout, 0))
    weight.full_tensor().square().sum().backward()
    return near(weight.grad, 2 * expected_weight())


def clip(layout: str, folder: str) -> bool:
    module = placed(layout, 0)
    weight = weight_of(module)
    weight.grad = distribute(expected_weight(), weight.device_mesh, Spec(tuple(weight.placements)))
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    whole_norm = expected_weight().norm()
    same = [
        near(norm, whole_norm),
        near(weight.grad, expected_weight() * 0.5 / (whole_norm + 1e-6)),
    ]  # every rank joins all
    return all(same)


def clip_value(layout: str, folder: str) -> bool:
    module = placed(layout, 0)
    weight = weight_of(module)
    weight.grad = distribute(expected_weight(), weight.device_mesh, Spec(tuple(weight.placements)))
    torch.nn.utils.clip_grad_value_(module.parameters(), 0.1)
    return near(weight.grad, expected_weight().clamp(-0.1, 0.1))


def model_state_full(layout: str, folder: str) -> bool:
    options = StateDictOptions(full_state_dict=True)
    return near(get_model_state_dict(placed(layout, 0), options=options)["0.weight"], expected_weight())


def model_state_offloaded(layout: str, folder: str) -> bool:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(placed(layout, 0), options=options)
    return dist.get_rank() > 0 or near(state["0.weight"], expected_weight())


def set_model_full(layout: str, folder: str) -> bool:
    module = placed(layout, 1)
    set_model_state_dict(module, plain(0).state_dict(), options=StateDictOptions(full_state_dict=True))
    return near(get_full(module, "0.weight"), expected_weight())


def set_model_full_on_meta(layout: str, folder: str) -> bool:
    module = placed(layout, 1, "meta")
    set_model_state_dict(module, plain(0).state_dict(), options=StateDictOptions(full_state_dict=True))
    return near(get_full(module, "0.weight"), expected_weight())


def set_model_broadcast(layout: str, folder: str, device: str = "cpu") -> bool:
    module = placed(layout, 1, device)
    state = plain(0).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    before = local_of(weight_of(module)).clone()
    try:
        set_model_state_dict(module, state, options=options)
    except InputError:
        assert before.is_meta or torch.equal(local_of(weight_of(module)), before)
        raise
    return near(get_full(module, "0.weight"), expected_weight())


def set_model_broadcast_on_meta(layout: str, folder: str) -> bool:
    return set_model_broadcast(layout, folder, "meta")


def trained(module: nn.Module, seed: int, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(seed + step)
        gradient = torch.randn(SHAPE, dtype=torch.float64)
        weight = module.get_parameter("0.weight")
        weight.grad = (
            distribute(gradient, weight.device_mesh, Spec(tuple(weight.placements)))
            if isinstance(weight, DTensor)
            else gradient
        )
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    (state,) = optimizer.state.values()
    return [state["exp_avg"], state["exp_avg_sq"]]


def same_moments(optimizer: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> bool:
    same = [
        near(ours, expected_value) for ours, expected_value in zip(moments(optimizer), moments(expected), strict=True)
    ]  # every rank joins all
    return all(same)


def optimizer_steps(layout: str, folder: str) -> bool:
    module, alone = placed(layout, 0), plain(0)
    same = same_moments(trained(module, 5, 2), trained(alone, 5, 2))
    return all([same, near(get_full(module, "0.weight"), alone[0].weight.detach())])


FULL = StateDictOptions(full_state_dict=True)


def optimizer_state_full(layout: str, folder: str) -> bool:
    module, alone = placed(layout, 0), plain(0)
    state = get_optimizer_state_dict(module, trained(module, 5, 1), options=FULL)["state"]["0.weight"]
    result = [state["exp_avg"], state["exp_avg_sq"]]
    same = [near(*pair) for pair in zip(result, moments(trained(alone, 5, 1)), strict=True)]  # every rank joins all
    return all(same)


def set_optimizer_full(layout: str, folder: str, broadcast: bool = False) -> bool:
    alone, module = plain(0), placed(layout, 0)
    expected, optimizer = trained(alone, 5, 2), trained(module, 9, 1)
    state = get_optimizer_state_dict(alone, expected)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_optimizer_state_dict(module, optimizer, state if dist.get_rank() == 0 or not broadcast else {}, options=options)
    return same_moments(optimizer, expected)


def set_optimizer_broadcast(layout: str, folder: str) -> bool:
    return set_optimizer_full(layout, folder, broadcast=True)


def save_model(layout: str, folder: str) -> bool:
    dcp.save(placed(layout, 0).state_dict(), checkpoint_id=folder)
    state = plain(1).state_dict()
    dcp.load(state, checkpoint_id=folder)
    return near(state["0.weight"], expected_weight())


def save_asynchronously(layout: str, folder: str) -> bool:
    module = placed(layout, 0)
    saving = dcp.async_save(module.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # what is saved is what was there
    saving.result()
    state = plain(1).state_dict()
    dcp.load(state, checkpoint_id=folder)
    return near(state["0.weight"], expected_weight())


def load_model(layout: str, folder: str) -> bool:
    dcp.save(plain(0).state_dict(), checkpoint_id=folder)
    module = placed(layout, 1)
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state)
    return near(get_full(module, "0.weight"), expected_weight())


def save_optimizer(layout: str, folder: str) -> bool:
    module, alone = placed(layout, 0), plain(0)
    expected = trained(alone, 5, 2)
    dcp.save(get_optimizer_state_dict(module, trained(module, 5, 2)), checkpoint_id=folder)
    other = trained(alone, 9, 1)
    state = get_optimizer_state_dict(alone, other)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(alone, other, state)
    return same_moments(other, expected)


def load_fresh_optimizer(layout: str, folder: str) -> bool:
    """Of an optimizer that has taken no step."""
    module, alone = placed(layout, 0), plain(0)
    expected = trained(alone, 5, 2)
    dcp.save(get_optimizer_state_dict(alone, expected), checkpoint_id=folder)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = get_optimizer_state_dict(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(module, optimizer, state)
    return same_moments(optimizer, expected)


def hugging_face_writer(layout: str, folder: str) -> bool:
    dcp.save(
        placed(layout, 0).state_dict(),
        storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True),
    )
    state = plain(1).state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    return near(state["0.weight"], expected_weight())


def hugging_face_reader(layout: str, folder: str) -> bool:
    dcp.save(plain(0).state_dict(), storage_writer=HuggingFaceStorageWriter(folder))
    module = placed(layout, 1)
    state = module.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    module.load_state_dict(state)
    return near(get_full(module, "0.weight"), expected_weight())


TOOLS: dict[str, Callable[[str, str], bool]] = {
    tool.__name__: tool
    for tool in (
        full_tensor,
        gradient_through_full_tensor,
        redistribute,
        distribute_from_whole,
        clip,
        clip_value,
        optimizer_steps,
        model_state_full,
        model_state_offloaded,
        set_model_full,
        set_model_full_on_meta,
        set_model_broadcast,
        set_model_broadcast_on_meta,
        optimizer_state_full,
        set_optimizer_full,
        set_optimizer_broadcast,
        save_model,
        save_asynchronously,
        load_model,
        save_optimizer,
        load_fresh_optimizer,
        hugging_face_writer,
        hugging_face_reader,
    )
}


# What is refused, where a rank's part is no single stretch, and by whom.
REFUSED = {
    "set_model_broadcast": "InputError: broadcast_from_rank0=True puts wrong numbers into '0.weight'",
    "set_model_broadcast_on_meta": "InputError: broadcast_from_rank0=True puts wrong numbers into '0.weight'",
    "set_optimizer_broadcast": "InputError: broadcast_from_rank0=True puts wrong numbers into 'exp_avg of",
    "hugging_face_writer": "InputError: HuggingFaceStorageWriter keeps one stretch of '0.weight' per rank",
}
# Torch 2.11 says so of strided pieces in DTensors of its own, which it can't gather or place otherwise.
NO_ORDER = "unable to be interpreted into a corresponding shard_order"
# Torch's distribute_tensor can't make strided shards of a dim that they do not divide, and asserts that.
NOT_DISTRIBUTED = {"distribute_from_whole", "set_model_full", "set_model_full_on_meta", "set_optimizer_full"}
# Torch joins what several axes split wrongly, where one is strided. No plan has parameters lie so.
NOT_JOINED = {
    "full_tensor",
    "gradient_through_full_tensor",
    "redistribute",
    "model_state_full",
    "model_state_offloaded",
    "optimizer_state_full",
}


def expected(tool: str, layout: str) -> str:
    if tool in REFUSED and "strided" in layout:
        return REFUSED[tool]
    if tool in NOT_DISTRIBUTED and layout == "strided uneven":
        return "AssertionError"
    return "right"


def outcome(tool: str, layout: str, folder: str) -> str:
    try:
        return "right" if TOOLS[tool](layout, folder) else "wrong"
    except CheckpointException as error:
        return next(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(folder: str, layouts: list[str]) -> dict[tuple[str, str], str]:
    return {
        (tool, layout): outcome(tool, layout, f"{folder}/{tool}{number}")
        for tool in TOOLS
        for number, layout in enumerate(layouts)
        if not (tool in NOT_JOINED and layout == "strided twice")
    }


@pytest.mark.parametrize(("workers", "layouts"), [("two", ONE_AXIS), ("four", TWO_AXES)])
def test_torch_is_right_or_refused_with_every_placement(
    workers: str, layouts: dict[str, object], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for result in request.getfixturevalue(workers).run(outcomes, str(tmp_path), list(layouts)):
        other = {
            (tool, layout): reported
            for (tool, layout), reported in result.items()
            if not reported.startswith(expected(tool, layout)) and not ("strided" in layout and NO_ORDER in reported)
        }
        assert other == {}
