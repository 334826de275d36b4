"""Attention with one fused projection, sharded by heads: torchrun --nproc-per-node 4 examples/fused_qkv.py

A fused weight has 3 · heads · head_dim rows. Cut plainly into four, a shard would hold, say, queries only. autoshard
follows the views of the projection's output back to the weight, finds that the heads are its middle factor, and places
it as `_StridedShard(0, split_factor=3)`: every rank holds the queries, keys and values of its own heads, the weight is
not rearranged, and nothing is communicated between the projection and the attention.
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


class Attention(nn.Module):
    def __init__(self, split: str) -> None:
        super().__init__()
        self.split = split
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        fused = self.qkv(x)
        if self.split == "view + unbind":
            parts = fused.view(batch, length, 3, WIDTH).unbind(2)
        elif self.split == "chunk(3, -1)":
            parts = fused.chunk(3, -1)
        else:
            parts = fused.split(WIDTH, -1)
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))


class Model(nn.Module):
    def __init__(self, split: str) -> None:
        super().__init__()
        self.attention = Attention(split)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).square().mean()


def checkpoint_is_equal(model: nn.Module, original: Tensor) -> bool:
    """Save the sharded weight with `torch.distributed.checkpoint`, load it unsharded, compare bit for bit."""
    folder = [tempfile.mkdtemp(prefix="autoshard-qkv-")]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    whole = {"attention.qkv.weight": torch.zeros_like(original)}
    dcp.load(whole, checkpoint_id=folder[0])
    return torch.equal(whole["attention.qkv.weight"], original)


def show(split: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Model(split)
    x = torch.randn(1, LENGTH, WIDTH)  # a batch of one: there is nothing to gain from data parallelism
    expected = model(x).item()
    original = model.attention.qkv.weight.detach().clone()

    autoshard.parallelize(model, mesh, example_args=(x,))
    plan = model.sharding_plan
    loss = model(x)
    loss.backward()
    equal = checkpoint_is_equal(model, original)

    if dist.get_rank() == 0:
        inside = [c for c in plan.collectives if c.module in ("attention", "attention.qkv")]
        print(f"\n{split}")
        print(f"  fused weight:   {plan.placements['attention.qkv.weight']}")
        print(f"  output weight:  {plan.placements['attention.out.weight']}")
        print(f"  collectives between projection and attention output: {len(inside)}")
        print(
            "  collectives in all:",
            ", ".join(f"{c.count} {c.kind} in {c.module or 'the model'}" for c in plan.collectives),
        )
        print(f"  loss {loss.item():.6f}, on one device {expected:.6f}; checkpoint equal bit for bit: {equal}")
        print(plan.explain("attention"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for split in ("view + unbind", "chunk(3, -1)", "split(D, -1)"):
        show(split, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
