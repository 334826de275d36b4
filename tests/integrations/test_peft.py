"""LoRA adapters of peft on two processes beside one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.training import fast_links
from tests.workers import Workers

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer

from autoshard.integrations.transformers import AutoshardTrainer, save_pretrained
from tests.integrations.hugging_face import Rows, arguments, gpt2, recording

Result = tuple[list[float], Tensor, Tensor]


def adapted() -> Any:
    """A model with an adapter that is not zero."""
    model = gpt2()
    torch.manual_seed(2)
    config = LoraConfig(
        r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def batch() -> dict[str, Tensor]:
    rows = Rows(2, 3)
    return torch.utils.data.default_collate([rows[index] for index in range(2)])


def _train(folder: Path, mesh: DeviceMesh | None, checkpoint: Path | None = None) -> tuple[Any, list[float]]:
    keywords = {} if mesh is None else {"mesh": mesh, "options": {"cluster": fast_links()}}
    base = Trainer if mesh is None else AutoshardTrainer
    args = arguments(folder, save_strategy="steps", save_steps=1)
    trainer = recording(base)(adapted(), args, train_dataset=Rows(6), **keywords)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer.model, trainer.losses


def _logits(model: Any) -> tuple[Tensor, Tensor]:
    """With the adapter, and without it."""

    def whole(logits: Tensor) -> Tensor:
        return logits.full_tensor() if isinstance(logits, DTensor) else logits

    model.eval()
    with torch.no_grad():
        with_adapter = whole(model(**batch()).logits)
        with model.disable_adapter():
            without = whole(model(**batch()).logits)
        # The program of the first call serves again.
        assert torch.equal(whole(model(**batch()).logits), with_adapter)
    return with_adapter, without


def _train_on_ranks(folder: Path) -> tuple[list[float], Tensor, Tensor, list[float], int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, losses = _train(folder, mesh)
    logits = _logits(model)
    save_pretrained(model, folder / "adapter")
    _, resumed = _train(folder, mesh, folder / "checkpoint-1")
    parameters = dict(model.named_parameters())
    sharded = sum(any(p.is_shard() for p in parameter.placements) for parameter in parameters.values())
    return losses, *logits, resumed, sharded


def test_lora_trains_saves_and_is_disabled(two: Workers, tmp_path: Path) -> None:
    model, expected_losses = _train(tmp_path / "one", None)
    expected, expected_without = _logits(model)
    for losses, logits, without, resumed, sharded in two.run(_train_on_ranks, tmp_path / "ranks"):
        assert losses == pytest.approx(expected_losses, rel=1e-9)
        assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-9)
        assert torch.allclose(without, expected_without, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(without, logits, rtol=1e-3)
        # The second of two steps, which is one batch.
        assert resumed == losses[-1:]
        assert sharded
    for folder in ("adapter", "checkpoint-2"):
        loaded = PeftModel.from_pretrained(gpt2(), tmp_path / "ranks" / folder)
        assert torch.allclose(_logits(loaded)[0], expected, rtol=1e-9, atol=1e-9)
    # Adapters alone.
    assert (tmp_path / "ranks" / "adapter" / "adapter_model.safetensors").stat().st_size < 10_000
