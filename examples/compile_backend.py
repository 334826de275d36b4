"""Use autoshard as a backend of torch.compile: torchrun --nproc-per-node 2 examples/compile_backend.py

The mesh is an option of the backend or comes from `autoshard.use_mesh`. Both losses are compared with one device's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Tanh(), nn.Linear(256, 16))


def train(call: nn.Module, model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Train `call`, a compiled form of `model`, for five steps and return the losses."""
    optimizer: torch.optim.Optimizer | None = None
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(call(x), y)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)  # the first call places the parameters
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 6))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 256, generator=generator), torch.randint(16, (64,), generator=generator)

    one_device = make_model()
    model = make_model()
    by_option = train(torch.compile(model, backend="autoshard", options={"mesh": mesh}), model, x, y)

    other = make_model()
    with autoshard.use_mesh(mesh):
        by_context = train(torch.compile(other, backend="autoshard"), other, x, y)

    if dist.get_rank() == 0:
        print("one device:         ", train(one_device, one_device, x, y))
        print("options={'mesh':..}:", by_option)
        print("use_mesh(mesh):     ", by_context)
        print("placements:", {name: getattr(p, "placements", "plain") for name, p in model.named_parameters()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
