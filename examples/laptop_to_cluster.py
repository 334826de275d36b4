"""Plan on a laptop, then train with that plan on the cluster: python examples/laptop_to_cluster.py

The first command needs no process group and no GPU. The second runs on the machines that the plan is for:

    python examples/laptop_to_cluster.py --plan gpt.plan.json
    torchrun --nproc-per-node 4 examples/laptop_to_cluster.py --plan gpt.plan.json

The second command trains on GPUs if there are any. The plan names no device: each machine selects its own kernels.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import autoshard

AXES = {"dp": 2, "tp": 2}
BATCH, LENGTH, VOCABULARY = 8, 64, 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(device: torch.device | str) -> dict[str, Tensor]:
    """Return a batch in which each token is followed by the next number."""
    tokens = torch.arange(BATCH * LENGTH, device=device).view(BATCH, LENGTH) % VOCABULARY
    return {"tokens": tokens, "targets": (tokens + 1) % VOCABULARY}


def save_plan(path: Path) -> autoshard.ShardingPlan:
    """Plan the step of a model on the meta device, for a mesh that is only described."""
    with torch.device("meta"):
        model = Decoder()
    plan = autoshard.plan(model, AXES, example_kwargs=batch("meta"), cluster="h100")
    assert isinstance(plan, autoshard.ShardingPlan)
    plan.save(path)
    return plan


def train(path: Path, mesh: DeviceMesh, steps: int) -> list[Tensor]:
    """Train with a saved plan and return the losses."""
    torch.manual_seed(0)
    inputs = batch(mesh.device_type)
    model = autoshard.parallelize(
        Decoder(), mesh, example_kwargs=inputs, plan=autoshard.ShardingPlan.load(path), cluster="h100"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for _ in range(steps):
        loss = model(**inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, default=Path("gpt.plan.json"), help="file of the plan")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print(save_plan(options.plan))
        print(f"saved as {options.plan}")
        return
    if not options.plan.exists():
        raise SystemExit(f"there is no plan {options.plan}: make it first with python examples/laptop_to_cluster.py")
    accelerated = torch.cuda.is_available()
    if accelerated:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if accelerated else "gloo")
    mesh = init_device_mesh("cuda" if accelerated else "cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    losses = train(options.plan, mesh, options.steps)
    if dist.get_rank() == 0:
        print(f"loss on {mesh.size()} {mesh.device_type} devices: {losses[0]:.4f} to {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
