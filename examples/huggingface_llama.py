"""Save Llama on a (2, 2) mesh, resume on (4,): torchrun --nproc-per-node 4 examples/huggingface_llama.py

The model comes from a configuration, so nothing is downloaded. Its checkpoint is an ordinary
`torch.distributed.checkpoint`: it can be read on any other mesh, under any other plan, or on one device.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

VOCABULARY, LENGTH = 512, 64


def batch(step: int) -> dict[str, Tensor]:
    """Return the same batch in every process: sequences that count upwards, which the model can learn."""
    starts = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def make(layers: int, mesh: DeviceMesh) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = autoshard.parallelize(LlamaForCausalLM(config), mesh, example_kwargs=batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    return model, optimizer


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(path: str, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(path: str, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    layers = parser.parse_args().layers

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    folder = [tempfile.mkdtemp(prefix="autoshard-llama-") if first else None]
    dist.broadcast_object_list(folder)
    (path,) = folder
    assert path is not None

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = make(layers, square)
    if first:
        print(model.sharding_plan)
    before = train(model, optimizer, range(10))
    save(path, model, optimizer)
    expected = train(model, optimizer, range(10, 15))

    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, optimizer = make(layers, line)
    load(path, model, optimizer)
    resumed = train(model, optimizer, range(10, 15))

    if first:
        print("\nloss on (2, 2), steps  0-9: ", *(f"{loss:.5f}" for loss in before))
        print(f"checkpoint of model and optimizer in {path}")
        print("loss on (2, 2), steps 10-14:", *(f"{loss:.5f}" for loss in expected), "  going on")
        print("loss on (4,),   steps 10-14:", *(f"{loss:.5f}" for loss in resumed), "  resumed from the checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
