"""Ways of calling a model, on one of eight fake GPUs, by plans that were made without one.

`call_variants.py RANK FOLDER`, in a process that believes in GPUs, reads a plan for every way from the folder, runs a
step of each without numbers, and prints on which devices outputs and gradients lie.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from tests import models
from tests.fake_cuda.attention import prefer_kernels
from tests.fake_cuda.devices import exit_process
from tests.kernels.choice import HOPPER
from tests.training import fast_links, loss_of, outputs_of, unlike_devices

AXES = {"a": 2, "b": 4}
ROWS = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "labels")}
Inputs = dict[str, Tensor]


def _longer(inputs: Inputs, plan: autoshard.ShardingPlan) -> Inputs:
    return {name: torch.cat([value, value[:, :3]], dim=1) for name, value in inputs.items()}


def _own(inputs: Inputs, plan: autoshard.ShardingPlan) -> Inputs:
    """The shard of the first rank, whose shape is that of all."""
    own = {}
    for name, value in inputs.items():
        for size, placement in zip(AXES.values(), plan.input_placements[name], strict=True):
            value = value.chunk(size, placement.dim)[0] if isinstance(placement, Shard) else value
        own[name] = value
    return own


def _same(inputs: Inputs, plan: autoshard.ShardingPlan) -> Inputs:
    return inputs


@dataclass(frozen=True)
class CallVariant:
    """One way of calling a model.

    Attributes:
        options: of `plan` and of `parallelize`.
        planned: further ones of `plan` alone.
        given: what a call is given, of the example and the plan.
        autocast: whether the call is under `torch.autocast("cuda")`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=lambda: {"cluster": fast_links()})
    given: Callable[[Inputs, autoshard.ShardingPlan], Inputs] = _same
    autocast: bool = False

    def plan(self) -> autoshard.ShardingPlan:
        """The plan, for which no device is needed."""
        module, inputs = _model()
        plan = autoshard.plan(
            module, AXES, (), inputs, search=autoshard.Search(effort="fast"), **self.options, **self.planned
        )
        assert isinstance(plan, autoshard.ShardingPlan)
        return plan


CALL_VARIANTS = {
    "dynamic sizes": CallVariant({"dynamic": ROWS}, given=_longer),
    "local inputs": CallVariant({"inputs": "local", "data_axes": ("a",)}, given=_own),
    "autocast": CallVariant(autocast=True),
    "hints": CallVariant({"hints": {"*.weight": {"b": Shard(0)}}}),
    "shares": CallVariant(planned={"cluster": unlike_devices("4xV100 + 4xP100"), "shares": {"a": (5, 3)}}),
}


def _model() -> tuple[torch.nn.Module, Inputs]:
    return models.ZOO["gpt"](dtype=torch.float32, batch=8, layers=1)


def run(way: CallVariant, plan: autoshard.ShardingPlan) -> list[str]:
    """The devices on which outputs and gradients of a step lie."""
    mesh = init_device_mesh("cuda", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    module, inputs = _model()
    device = torch.device("cuda", torch.cuda.current_device())
    surrounding = torch.autocast("cuda", dtype=torch.bfloat16) if way.autocast else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), prefer_kernels(HOPPER):
        autoshard.parallelize(module, mesh, (), inputs, plan=plan, compile=False, **way.options)
        with surrounding:
            outputs = outputs_of(module(**{name: value.to(device) for name, value in way.given(inputs, plan).items()}))
        loss_of(outputs).backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in gradients)
    local = (each.to_local() if isinstance(each, DTensor) else each for each in (*outputs.values(), *gradients))
    return sorted({str(tensor.device) for tensor in local})


def main(rank: int, folder: Path) -> None:
    """Run all ways and print what lies where."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.cuda.set_device(rank)
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    found = {
        name: run(way, autoshard.ShardingPlan.load(folder / f"{name}.json")) for name, way in CALL_VARIANTS.items()
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    exit_process()
