"""Files of safetensors, written and read on two processes beside one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as single_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import AutoshardError, InputError
from autoshard.integrations.safetensors import load_model, save_file, save_model
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.shards import replace_parameters
from autoshard.specs.spec import Spec
from tests.workers import Workers


class Block(nn.Module):
    """A fused projection, an uneven weight that is tied twice, a scalar and buffers that share memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused = nn.Linear(8, 12)
        self.uneven = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.again = nn.Linear(5, 7, bias=False)
        self.head.weight = self.again.weight = self.uneven.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("mean", torch.randn(4, 3).T)


SPECS = {"fused.weight": "S(0,f=3)", "fused.bias": "S(0,f=3)", "again.weight": "S(0)", "uneven.weight": "S(0)"}


def _placed(seed: int) -> Any:
    module = Block(seed)
    specs = {name: Spec.parse(SPECS.get(name, "R")) for name, _ in module.named_parameters()}
    replace_parameters(module, specs, init_device_mesh("cpu", (2,)))
    install_hooks(module)
    return module


def _contents(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(file, framework="pt") as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}, reader.metadata()  # noqa: SIM118


def _same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def _save(folder: Path) -> None:
    model = _placed(1)
    save_model(model, folder / "model.safetensors", {"format": "pt"})
    # The other ranks waited for the file.
    assert load_model(_placed(2), folder / "model.safetensors") == ([], [])
    save_file({"renamed": model.state_dict()["fused.weight"], "mean": model.mean}, folder / "file.safetensors")
    loaded = _placed(2)
    load_model(loaded, str(folder / "model.safetensors"))
    _same(autoshard.full_state_dict(loaded, rank0_only=False), Block(1).state_dict())
    missing, unexpected = load_model(loaded, folder / "file.safetensors", strict=False)
    assert "scale" in missing
    assert unexpected == ["renamed"]


def test_files_are_those_of_one_device(two: Workers, tmp_path: Path) -> None:
    two.run(_save, tmp_path)
    alone = Block(1)
    single_device.save_model(alone, str(tmp_path / "expected.safetensors"), {"format": "pt"})
    (state, metadata), (expected, expected_metadata) = map(
        _contents, (tmp_path / "model.safetensors", tmp_path / "expected.safetensors")
    )
    _same(state, expected)
    assert metadata == expected_metadata
    loaded = Block(2)
    assert not any(single_device.load_model(loaded, tmp_path / "model.safetensors"))
    _same(loaded.state_dict(), alone.state_dict())
    state, _ = _contents(tmp_path / "file.safetensors")
    _same(state, {"mean": alone.get_buffer("mean"), "renamed": alone.fused.weight})


def _errors(folder: Path) -> list[str]:
    model = _placed(1)
    texts = []
    calls: list[Any] = [
        lambda: single_device.save_model(model, str(folder / "model.safetensors")),
        lambda: single_device.load_model(model, folder / "model.safetensors"),
        lambda: save_file({"mean": torch.ones(2)}, folder / "file.safetensors"),
        lambda: save_model(Block(1), folder / "file.safetensors"),
        lambda: save_model(model, folder / "absent" / "model.safetensors"),
    ]
    for call in calls:
        with pytest.raises((AutoshardError, SafetensorError)) as info:
            call()
        texts.append(f"{type(info.value).__name__}: {info.value}")
    return texts


def test_errors_say_what_to_do(two: Workers, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(single_device.save({"scale": torch.ones(())}))
    for rank, texts in enumerate(two.run(_errors, tmp_path)):
        for function, text in zip(("save_model", "load_model"), texts, strict=False):
            assert text.startswith(f"{InputError.__name__}: safetensors.torch.{function} takes whole tensors, and ")
            assert f"of Block: call autoshard.integrations.safetensors.{function}, on all ranks" in text
        assert "call safetensors.torch.save_file" in texts[2]
        assert "call autoshard.parallelize(model, mesh) first" in texts[3]
        # Of the rank that wrote, and of the one that waited.
        assert texts[4].startswith("SafetensorError: " if rank == 0 else f"{AutoshardError.__name__}: rank 0: ")
        assert "No such file" in texts[4]
