"""Train a small GPT on four processes, then on one, and compare: torchrun --nproc-per-node 4 examples/train_gpt.py

The text is the source code of Python's standard library, character by character. The model is written for one device,
with one fused projection for queries, keys and values. `autoshard.parallelize` decides how it is sharded on the mesh.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard

VOCABULARY = 128  # ASCII
BATCH, CONTEXT = 2, 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def standard_library() -> Tensor:
    """Return the source text of Python's standard library, as ASCII codes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8).long()


def batches(text: Tensor, batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same endless batches in every process: characters, and the characters that follow them."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (batch, 1), generator=generator)
        window = text[starts + torch.arange(CONTEXT + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def make_model(layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(layers)


def train(model: nn.Module, text: Tensor, steps: int, title: str, quiet: bool, batch: int = BATCH) -> list[float]:
    """Run an ordinary training loop and return the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_column = TextColumn("loss {task.fields[loss]:.4f}")
    columns = [TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss_column]
    losses: list[float] = []
    with Progress(*columns, disable=quiet) as progress:
        task = progress.add_task(title, total=steps, loss=float("nan"))
        for _, (tokens, targets) in zip(range(steps), batches(text, batch), strict=False):
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    steps, layers = options.steps, options.layers

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    text = standard_library()

    model = autoshard.parallelize(make_model(layers), mesh, example_args=next(batches(text)))
    if first:
        print(f"{len(text):,} characters, {sum(p.numel() for p in model.parameters()):,} parameters\n")
        print(model.sharding_plan)
    sharded = train(model, text, steps, "four processes", quiet=not first)

    if first:
        alone = train(make_model(layers), text, steps, "one process   ", quiet=False)
        difference = max(abs(a - b) / abs(b) for a, b in zip(sharded, alone, strict=True))
        print(f"\nloss {sharded[0]:.4f} -> {sharded[-1]:.4f}")
        print(f"largest relative difference in loss between four processes and one: {difference:.1e}")
    dist.barrier()  # the others wait for the first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
