from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import InputError
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.shards import replace_parameters
from autoshard.specs.spec import Spec
from tests.workers import Workers


class Block(nn.Module):
    """A fused projection, an uneven weight, tied weights, a scalar and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused = nn.Linear(8, 12)
        self.uneven = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.uneven.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("mean", torch.randn(3))


SPECS = {"fused.weight": "S(0,f=3)", "fused.bias": "S(0,f=3)", "uneven.weight": "S(0)", "scale": "R"}


def place(module: Block, mesh: DeviceMesh) -> Block:
    replace_parameters(module, {name: Spec.parse(spec) for name, spec in SPECS.items()}, mesh)
    install_hooks(module)
    return module


def _gathered() -> tuple[dict[str, Tensor], list[str], list[str], bool]:
    """What a rank gets by default, for some names, and everywhere."""
    module = place(Block(1), init_device_mesh("cpu", (2,)))
    state = autoshard.full_state_dict(module)
    some = autoshard.full_state_dict(module, names={"scale", "mean"})
    everywhere = autoshard.full_state_dict(module, rank0_only=False)
    tied = everywhere["uneven.weight"] is everywhere["head.weight"]
    return state, list(some), list(everywhere), tied


def test_the_first_rank_gets_what_one_device_has(two: Workers) -> None:
    (state, some, everywhere, tied), (none, none_of_some, everywhere_too, tied_too) = two.run(_gathered)
    expected = Block(1).state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        assert state[name].dtype == value.dtype
        assert not isinstance(state[name], DTensor)
    assert none == {}
    assert some == ["scale", "mean"]
    assert none_of_some == []
    assert everywhere == everywhere_too == list(expected)
    assert tied
    assert tied_too


def _loaded(meta: bool) -> tuple[bool, bool, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta" if meta else "cpu"):
        module = place(Block(2), mesh)
    scale = module.scale
    first = torch.distributed.get_rank() == 0
    keys = autoshard.load_full_state_dict(module, Block(1).double().state_dict() if first else None)
    return keys == ([], []), module.scale is scale, autoshard.full_state_dict(module, rank0_only=False)


@pytest.mark.parametrize("meta", [False, True])
def test_all_ranks_are_filled_from_the_first(two: Workers, meta: bool) -> None:
    expected = Block(1).state_dict()
    for complete, same_objects, state in two.run(_loaded, meta):
        assert complete
        assert same_objects
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
            assert state[name].dtype == torch.float32


def _mismatches() -> tuple[str, str, tuple[list[str], list[str]], bool]:
    module = place(Block(2), init_device_mesh("cpu", (2,)))
    first = torch.distributed.get_rank() == 0
    before = autoshard.full_state_dict(module, rank0_only=False)
    state = Block(1).state_dict()
    del state["mean"]
    # Tied: the other name is enough.
    del state["head.weight"]
    state["more"] = torch.zeros(2)
    errors = []
    for given in (state, state | {"scale": torch.zeros(3)}):
        with pytest.raises(InputError) as info:
            autoshard.load_full_state_dict(module, given if first else {}, strict="scale" in given)
        errors.append(str(info.value))
    after = autoshard.full_state_dict(module, rank0_only=False)
    unchanged = all(torch.equal(after[name], value) for name, value in before.items())
    keys = autoshard.load_full_state_dict(module, state if first else {}, strict=False)
    return errors[0], errors[1], (keys.missing_keys, keys.unexpected_keys), unchanged


def test_every_rank_reports_what_does_not_fit(two: Workers) -> None:
    for names, shapes, keys, unchanged in two.run(_mismatches):
        assert "Missing key(s): mean." in names
        assert "Unexpected key(s): more." in names
        assert "size mismatch for scale: the shape is [3] in the state, and [] in the model." in shapes
        assert keys == (["mean"], ["more"])
        assert unchanged


def _refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        meta = place(Block(1), mesh)
    texts = []
    for module in (Block(1), meta):
        with pytest.raises(InputError) as info:
            autoshard.full_state_dict(module)
        texts.append(str(info.value))
    return texts


def test_modules_without_whole_numbers_are_refused(two: Workers) -> None:
    for plain, meta in two.run(_refused):
        assert "call autoshard.parallelize(model, mesh) first" in plain
        assert "'scale' is on the meta device" in meta
