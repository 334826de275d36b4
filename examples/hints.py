"""Pin some placements and let the planner choose the others: python examples/hints.py

A hint names parameters or modules by a glob and gives a placement per mesh axis. `autoshard.shard` pins one activation
inside `forward`; outside of autoshard it returns its argument. Planning needs no process group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autoshard

MESH = {"dp": 2, "tp": 4}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, width: int = 256, classes: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.blocks(x)
        hidden = autoshard.shard(hidden, Shard(0), Replicate())  # sharded by rows over dp, replicated over tp
        return F.cross_entropy(self.head(hidden), labels)


def show(title: str, hints: dict[str, object] | None) -> None:
    examples = (torch.empty(256, 256), torch.zeros(256, dtype=torch.long))
    print(f"\n{title}")
    try:
        plan = autoshard.plan(Classifier(), MESH, examples, hints=hints, cluster="cpu")
    except autoshard.HintError as error:
        print(f"  HintError: {error}")
        return
    for name, placements in plan.placements.items():
        if name.endswith(".weight") and "norm" not in name:
            over = zip(MESH, placements, strict=True)
            print(f"  {name:21}", ", ".join(f"{axis}: {placement!r}" for axis, placement in over))


def main() -> None:
    show("Nothing pinned", None)
    show(
        "The head by classes over tp; both blocks as an expert would",
        {
            "head.weight": {"tp": Shard(0)},
            "blocks.*.up.weight": {"dp": Replicate(), "tp": Shard(0)},
            "blocks.*.down.weight": (Replicate(), Shard(1)),
        },
    )
    show("A whole module, that is, every parameter below it", {"blocks.0": {"dp": Replicate(), "tp": Replicate()}})
    show("Matches nothing", {"block.*.up.weight": {"tp": Shard(0)}})
    show("No such axis", {"head.weight": {"model": Shard(0)}})
    show("No such dim", {"head.weight": {"tp": Shard(2)}})
    show("Two hints that contradict", {"head.*": {"tp": Replicate()}, "*.weight": {"tp": Shard(0)}})


if __name__ == "__main__":
    main()
