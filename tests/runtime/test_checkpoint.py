from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.checkpoint import checkpointable, install_hooks
from autoshard.runtime.shards import blocks_of, distribute, local_of, replace_parameters
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard
from tests.runtime.meshes import SPECS, get_full, per_rank, simulated_mesh
from tests.workers import Workers


@pytest.mark.parametrize("shape", [(12, 10), (7, 5), (1, 9), (0, 3)])
def test_blocks_are_the_shards(shape: tuple[int, int]) -> None:
    mesh = MeshShape.of({"a": 2, "b": 3})
    value = torch.randn(shape)
    for spec, coordinate in itertools.product(SPECS, mesh.coordinates()):
        expected = shard(value, spec, mesh, coordinate)
        local = torch.full_like(expected, torch.nan)
        for block in blocks_of(shape, spec, mesh, coordinate):
            assert torch.isnan(local[block.local]).all()
            assert block.offsets == tuple(place.start for place in block.whole)
            assert local[block.local].shape == block.sizes
            local[block.local] = value[block.whole]
        assert torch.equal(local, expected)


def test_a_plain_shard_is_one_block_and_a_fused_one_one_per_part() -> None:
    mesh = MeshShape.of({"a": 4})
    assert len(list(blocks_of((24, 2), Spec.parse("S(0)"), mesh, (1,)))) == 1
    assert len(list(blocks_of((24, 2), Spec.parse("S(0,f=3)"), mesh, (1,)))) == 3


class Block(nn.Module):
    """A fused projection, an uneven weight, tied weights, a scalar and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused = nn.Linear(8, 24)
        self.uneven = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.uneven.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("mean", torch.randn(3))


def placed(seed: int, mesh: dist.DeviceMesh, fused: str, uneven: str) -> Block:
    module = Block(seed)
    specs = {
        "fused.weight": fused,
        "fused.bias": fused,
        "uneven.weight": uneven,
        "scale": " ".join("R" for _ in range(mesh.ndim)),
    }
    replace_parameters(module, {name: Spec.parse(text) for name, text in specs.items()}, mesh)
    install_hooks(module)
    return module


def wholes(module: nn.Module) -> dict[str, Tensor]:
    return {name: get_full(module, name) for name in module.state_dict()}


# How to place the fused projection and the uneven weight.
LAYOUTS = [
    ((4,), "S(0,f=3)", "S(0)"),
    ((2, 2), "S(0,f=3) S(0,f=3)", "S(0) S(1)"),
    ((2, 2), "S(0) S(0)", "S(0) S(0)"),
    ((4,), "S(0)", "S(1)"),
    ((2, 2), "R S(0,f=6)", "R S(0,f=2)"),
    ((2, 2), "S(0,f=2) S(0)", "R R"),
]


def as_one_file(checkpoint: str) -> str:
    """What torch's converter makes of a distributed checkpoint, written by this process for itself."""
    file = f"{checkpoint}-{dist.get_rank()}.pt"
    dcp_to_torch_save(checkpoint, file)
    return file


def every_checkpoint_fits_every_mesh(folder: str) -> None:
    original = Block(0)
    for number, layout in enumerate(LAYOUTS):
        mesh = init_device_mesh("cpu", layout[0])
        dcp.save(placed(0, mesh, *layout[1:]).state_dict(), checkpoint_id=f"{folder}/{number}")
        whole = Block(1)
        state = whole.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        held = torch.load(as_one_file(f"{folder}/{number}"))
        for name, value in original.state_dict().items():
            assert torch.equal(state[name], value), (layout, name)
            assert torch.equal(held[name], value), (layout, name)
    for number, layout in itertools.product((0, 1), (LAYOUTS[1], LAYOUTS[3], LAYOUTS[4])):
        module = placed(1, init_device_mesh("cpu", layout[0]), *layout[1:])
        state = module.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        module.load_state_dict(state)
        for name, value in wholes(module).items():
            assert torch.equal(value, original.state_dict()[name]), (LAYOUTS[number], layout, name)


def optimizers_are_saved_and_resumed(folder: str) -> None:
    def trained(
        seed: int, steps: int, layout: tuple[tuple[int, ...], str, str]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh("cpu", layout[0])
        module = placed(seed, mesh, *layout[1:])
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(steps):
            torch.manual_seed(step)
            for parameter in module.parameters():
                parameter.grad = distribute(torch.randn(parameter.shape), mesh, Spec(tuple(parameter.placements)))
            optimizer.step()
        return module, optimizer

    module, optimizer = trained(0, 2, LAYOUTS[0])
    checkpointable(optimizer)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/optimizer")

    other, resumed = trained(1, 1, LAYOUTS[1])
    model_state, optimizer_state = get_state_dict(other, resumed)
    state = checkpointable({"model": model_state, "optimizer": optimizer_state})
    dcp.load(state, checkpoint_id=f"{folder}/optimizer")
    set_state_dict(other, resumed, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for name, value in wholes(module).items():
        assert torch.equal(get_full(other, name), value), name
    for ours, expected_value in zip(other.parameters(), module.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            expected = distribute(
                optimizer.state[expected_value][key], expected_value.device_mesh, Spec.all_replicated(1)
            )
            moments = distribute(resumed.state[ours][key], ours.device_mesh, Spec.all_replicated(2))
            assert torch.equal(local_of(moments), local_of(expected))


def saving_asynchronously_takes_a_picture(folder: str) -> None:
    module = placed(0, init_device_mesh("cpu", (4,)), *LAYOUTS[0][1:])
    future = dcp.async_save(module.state_dict(), checkpoint_id=f"{folder}/async", process_group=dist.new_group())
    for parameter in module.parameters():
        local_of(parameter).zero_()
    future.result()
    state = Block(1).state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/async")
    assert all(torch.equal(state[name], value) for name, value in Block(0).state_dict().items())


def all_of_it(folder: str) -> None:
    every_checkpoint_fits_every_mesh(folder)
    optimizers_are_saved_and_resumed(folder)
    saving_asynchronously_takes_a_picture(folder)


def test_distributed_checkpoints_of_four_processes(four: Workers, tmp_path: Path) -> None:
    four.run(all_of_it, str(tmp_path))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_whole_tensors_are_loaded(assign: bool, meta: bool) -> None:
    state = Block(0).state_dict()
    original = copy.deepcopy(state)
    for shape, fused, uneven in LAYOUTS:
        sizes = dict(zip("ab", shape, strict=False))
        with simulated_mesh(**sizes) as mesh:
            if meta and not assign:
                continue
            with torch.device("meta" if meta else "cpu"):
                module = placed(1, mesh, fused, uneven)
            parameters = list(module.parameters())
            assert module.load_state_dict(state, assign=assign).missing_keys == []
            assert module.head.weight is module.uneven.weight
            assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
            assert (next(iter(module.parameters())) is parameters[0]) == (not assign)
            for name, value in original.items():
                for actual in per_rank(get_full(module, name), mesh).values():
                    assert torch.equal(actual, value), (fused, name)
            # what was loaded is a copy, whole or sharded
            for parameter in module.parameters():
                local_of(parameter).add_(1)
            assert all(torch.equal(value, original[name]) for name, value in state.items())


def test_tied_parameters_stay_tied_when_only_one_name_is_assigned() -> None:
    for missing in ("head.weight", "uneven.weight"):
        state = Block(0).state_dict()
        expected = state.pop(missing)
        with simulated_mesh(a=2) as mesh:
            with torch.device("meta"):
                module = placed(1, mesh, "S(0)", "S(0)")
            assert module.load_state_dict(state, assign=True, strict=False).missing_keys == [missing]
            assert module.head.weight is module.uneven.weight
            assert all(torch.equal(value, expected) for value in per_rank(get_full(module, missing), mesh).values())


def test_state_dicts_of_other_placements_are_loaded() -> None:
    with simulated_mesh(a=2, b=2) as mesh:
        source = placed(0, mesh, *LAYOUTS[1][1:])
        for assign in (False, True):
            module = placed(1, mesh, *LAYOUTS[4][1:])
            module.load_state_dict(source.state_dict(), assign=assign)
            assert str(Spec(tuple(module.fused.weight.placements))) == "R S(0,f=6)"
            for name, value in Block(0).state_dict().items():
                assert all(torch.equal(actual, value) for actual in per_rank(get_full(module, name), mesh).values())


def test_a_parallelised_part_of_a_larger_module_is_loaded() -> None:
    with simulated_mesh(a=2) as mesh:
        outer = nn.ModuleDict({"inner": placed(1, mesh, "S(0,f=3)", "S(0)"), "plain": nn.Linear(2, 2)})
        outer.load_state_dict(nn.ModuleDict({"inner": Block(0), "plain": nn.Linear(2, 2)}).state_dict())
        for name, value in Block(0).state_dict().items():
            assert all(torch.equal(actual, value) for actual in per_rank(get_full(outer["inner"], name), mesh).values())


def test_what_does_not_fit_is_reported_as_torch_does() -> None:
    state = Block(0).state_dict()
    with simulated_mesh(a=2) as mesh:
        module = placed(1, mesh, "S(0,f=3)", "S(0)")
        with pytest.raises(RuntimeError, match=r"size mismatch for fused.bias: .*torch.Size\(\[3\]\)"):
            module.load_state_dict({**state, "fused.bias": torch.zeros(3)})
        del state["fused.bias"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"fused.bias"'):
            module.load_state_dict(state)


def test_describing_shards_makes_no_reference_cycle() -> None:
    with simulated_mesh(a=2) as mesh:
        state = placed(1, mesh, "S(0,f=3)", "S(0)").state_dict()
        local = local_of(state["fused.weight"])
        pieces = local.__create_chunk_list__.__self__
        assert pieces.local is not local
        assert not hasattr(local_of(state["uneven.weight"]), "__create_chunk_list__")
