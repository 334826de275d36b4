from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.api import load_safetensors
from autoshard.errors import InputError
from autoshard.runtime.materialize import materialize_module
from autoshard.runtime.shards import replace_parameters
from autoshard.specs.spec import Spec
from tests.runtime.meshes import get_full, per_rank, simulated_mesh


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.fused = nn.Linear(6, 18)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("steps", torch.arange(3))


SPECS = {"embedding.weight": "S(0) S(1)", "fused.weight": "S(0,f=3) S(0)", "fused.bias": "S(0,f=3) R", "scale": "R R"}


def place(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    replace_parameters(module, {name: Spec.parse(text) for name, text in SPECS.items()}, mesh)
    return module


def assert_loaded(module: nn.Module, state: dict[str, Tensor], mesh: DeviceMesh) -> None:
    for name, value in state.items():
        for actual in per_rank(get_full(module, name), mesh).values():
            assert torch.equal(actual, value), name


@pytest.fixture
def state() -> dict[str, Tensor]:
    """What a file holds: tied weights once."""
    state = {name: value.clone() for name, value in Small().state_dict().items()}
    state["steps"] += 5
    del state["head.weight"]
    return state


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_fills_shards_and_buffers(device: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device(device):
            module = place(Small(), mesh)
        parameters = list(module.parameters())
        assert load_safetensors(module, file) == ([], [])
        assert_loaded(module, state, mesh)
        assert module.head.weight is module.embedding.weight
        assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
        assert module.fused.weight.requires_grad


def test_tied_weights_are_found_under_either_name(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["head.weight"] = state.pop("embedding.weight")
    save_file(state, tmp_path / "model.safetensors")
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = place(Small(), mesh)
        load_safetensors(module, str(tmp_path / "model.safetensors"))
        assert_loaded(module, state, mesh)
        assert module.head.weight is module.embedding.weight


@pytest.mark.parametrize("named", ["folder", "index", "list", "folder without index"])
def test_several_files_are_read(named: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    names = list(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    if named in ("folder", "index"):
        table = {name: file for file, held in parts.items() for name in held}
        index.write_text(json.dumps({"weight_map": table}))
    paths = {"index": index, "list": [tmp_path / file for file in parts]}.get(named, tmp_path)
    with simulated_mesh(a=2, b=2) as mesh:
        module = place(Small(), mesh)
        load_safetensors(module, paths)
        assert_loaded(module, state, mesh)


def test_numbers_are_cast_to_the_models_type(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    with simulated_mesh(a=2, b=2) as mesh:
        module = place(Small().to(torch.bfloat16), mesh)
        load_safetensors(module, tmp_path)
        assert_loaded(module, {"fused.weight": state["fused.weight"].to(torch.bfloat16)}, mesh)


def test_names_that_do_not_match_are_reported(state: dict[str, Tensor], tmp_path: Path) -> None:
    expected = state.pop("fused.bias")
    state["stranger"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = place(Small(), mesh)
        message = r"(?s)Missing key\(s\): fused\.bias\..*Unexpected key\(s\): stranger\."
        with pytest.raises(InputError, match=message):
            load_safetensors(module, tmp_path)
        assert all(parameter.is_meta for parameter in module.parameters())
        keys = load_safetensors(module, tmp_path, strict=False)
        assert keys.missing_keys == ["fused.bias"]
        assert keys.unexpected_keys == ["stranger"]
        assert module.fused.bias.is_meta
        assert not module.fused.weight.is_meta
    assert expected.shape == (18,)


def test_shapes_that_do_not_match_are_reported(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["fused.bias"] = torch.zeros(9)
    save_file(state, tmp_path / "model.safetensors")
    with simulated_mesh(a=2, b=2) as mesh:
        module = place(Small(), mesh)
        before = get_full(module, "fused.weight")
        for strict in (True, False):
            with pytest.raises(InputError, match=r"size mismatch for fused\.bias: .*\[9\] .*\[18\]"):
                load_safetensors(module, tmp_path, strict=strict)
        assert torch.equal(get_full(module, "fused.weight"), before)


def test_buffers_that_no_file_holds_are_computed_first(tmp_path: Path) -> None:
    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4, bias=False)
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

        def reset_parameters(self) -> None:
            if hasattr(self, "frequencies"):
                self.frequencies.copy_(torch.arange(4.0))
            nn.init.zeros_(self.weight)

    save_file({"weight": torch.eye(4)}, tmp_path / "model.safetensors")
    with simulated_mesh(a=2) as mesh:
        with torch.device("meta"):
            module = Rotary()
        replace_parameters(module, {"weight": Spec.parse("S(0)")}, mesh)
        with pytest.raises(InputError, match=r"frequencies is on the meta device.*autoshard\.materialize"):
            load_safetensors(module, tmp_path)
        load_safetensors(materialize_module(module), tmp_path)
        assert_loaded(module, {"weight": torch.eye(4), "frequencies": torch.arange(4.0)}, mesh)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    (tmp_path / "broken.json").write_text("[]")
    with simulated_mesh(a=2, b=2) as mesh:
        module = place(Small(), mesh)
        for name, message in (
            ("absent.safetensors", "no safetensors file"),
            ("broken.safetensors", "is no safetensors file"),
            ("broken.json", "is no index"),
        ):
            with pytest.raises(InputError, match=message):
                load_safetensors(module, tmp_path / name)
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match=r"holds no \.safetensors file"):
            load_safetensors(module, tmp_path / "empty")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match="pip install safetensors"):
        load_safetensors(nn.Linear(2, 2), tmp_path)
