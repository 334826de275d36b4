"""Shard attention with one fused projection by heads: torchrun --nproc-per-node 4 examples/fused_qkv.py

A fused weight has 3 · heads · head_dim rows. With `Shard(0)` on four ranks, a shard could hold queries only. autoshard
follows the views of the projection's output back to the weight, finds that the heads are its middle factor, and places
it as `_StridedShard(0, split_factor=3)`: every rank holds the queries, keys and values of its own heads. The weight is
not rearranged, and nothing is communicated between the projection and the output of the attention.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard

WIDTH, HEADS, LENGTH = 512, 8, 512
SPLITS = ("view + unbind", "chunk(3, -1)", "split(D, -1)")


class Heads(nn.Module):
    """Compute attention from the output of the fused projection, which is split in one of three common ways."""

    def __init__(self, split: str) -> None:
        super().__init__()
        self.split = split

    def forward(self, fused: Tensor) -> Tensor:
        batch, length, _ = fused.shape
        if self.split == "view + unbind":
            parts = fused.view(batch, length, 3, WIDTH).unbind(2)
        elif self.split == "chunk(3, -1)":
            parts = fused.chunk(3, -1)
        else:
            parts = fused.split(WIDTH, -1)
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, WIDTH)


class Block(nn.Module):
    def __init__(self, split: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.heads = Heads(split)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.norm(x + self.out(self.heads(self.qkv(x)))), target)


def checkpoint_is_equal(model: nn.Module, original: Tensor) -> bool:
    """Save the sharded model with `torch.distributed.checkpoint`, load its fused weight whole, compare the bits."""
    folder = [tempfile.mkdtemp(prefix="autoshard-qkv-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    whole = {"qkv.weight": torch.zeros_like(original)}
    dcp.load(whole, checkpoint_id=folder[0])
    return torch.equal(whole["qkv.weight"], original)


def show(split: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Block(split)
    x, target = torch.randn(2, 1, LENGTH, WIDTH)  # a batch of one rules out data parallelism
    expected = model(x, target).item()
    original = model.qkv.weight.detach().clone()

    autoshard.parallelize(model, mesh, example_args=(x, target))
    loss = model(x, target)
    loss.backward()
    equal = checkpoint_is_equal(model, original)

    if dist.get_rank() == 0:
        plan = model.sharding_plan
        weight = plan.placements["qkv.weight"][0]
        inside = sum(collective.count for collective in plan.collectives if collective.module == "heads")
        print(f"\n{split}")
        print(f"  fused weight: {type(weight).__name__}({weight.dim}, split_factor={weight.split_factor})")
        print(f"  rows of it on this rank: {model.qkv.weight.to_local().shape[0]} of {3 * WIDTH}")
        print(f"  collectives between the projection and the output of the attention: {inside}")
        print(f"  loss {loss.item():.6f}, on one device {expected:.6f}; checkpoint equal bit for bit: {equal}")
        if split == SPLITS[-1]:
            print(f"\nThe same plan in full, and what it says about the heads:\n\n{plan}\n\n{plan.explain('heads')}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for split in SPLITS:
        show(split, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
