"""The second command of `examples/laptop_to_cluster.py` on one of eight fake GPUs.

`example.py RANK PLAN` trains without numbers, in a process that believes in GPUs, by a plan that the first command
made, and prints the devices of losses, parameters, gradients and states of the optimizer.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_cuda.attention import prefer_kernels
from tests.fake_cuda.devices import exit_process
from tests.kernels.choice import HOPPER
from tests.programs import ROOT


def main(rank: int, plan: Path) -> None:
    """Train for two steps and print what lies where."""
    example = runpy.run_path(str(ROOT / "examples" / "laptop_to_cluster.py"))
    axes = example["AXES"]
    torch.cuda.set_device(rank)
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    held: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            held.extend([parameter, parameter.grad, *state.values()])

    register_optimizer_step_post_hook(note)
    mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with FakeTensorMode(allow_non_fake_inputs=True), prefer_kernels(HOPPER):
        losses = example["train"](plan, mesh, steps=2)
    tensors = (each.to_local() if isinstance(each, DTensor) else each for each in itertools.chain(losses, held))
    devices = {str(tensor.device) for tensor in tensors}
    sys.stdout.write(json.dumps({"tensors": len(held), "devices": sorted(devices)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    exit_process()
