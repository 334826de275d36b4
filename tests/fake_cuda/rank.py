"""One rank of a job on eight GPUs, all of them fake: `rank.py FOLDER [MODEL ...]`, in a process that believes in them.

Reads plans from the folder, and writes what became of all cases to `rank-RANK.json`. Which of `RANKS` it is, the
variable `RANK` tells.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.pipeline.plan.pipeline_devices import forward_fingerprint
from autoshard.pipeline.run.stage_runtime import StageCall
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.step import RunnableStep
from tests.fake_cuda.attention import prefer_kernels
from tests.fake_cuda.cases import KERNELS, RANKS, WORLD, Case, build, cases, pipelines
from tests.fake_cuda.devices import exit_process
from tests.kernels.choice import MATH
from tests.program_lint import exposed_gathers, gathers, program_findings
from tests.training import loss_of, outputs_of

WAIT = torch.ops._c10d_functional.wait_tensor.default


class Collectives(TorchDispatchMode):
    """While active, notes the collectives that are called: operator, shapes and types, options, mesh axes for groups.

    Args:
        mesh: whose groups they are called on.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []
        self._axes = {mesh.get_group(axis).group_name: axis for axis in range(mesh.ndim)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func is not WAIT:
            told = [self._word(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
            self.calls.append([str(func), *told])
        return func(*args, **(kwargs or {}))

    def _word(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return [*leaf.shape, str(leaf.dtype)]
        return f"axis {self._axes[leaf]}" if leaf in self._axes else leaf


def run(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """Parallelise a model as planned elsewhere, run one step of it without numbers, and say what came of it."""
    plan = autoshard.ShardingPlan.load(folder / case.plan)
    sizes = case.axes()
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    order = KERNELS[rank][case.mesh]
    module, inputs = build(case.model)  # on the CPU; its tensors lose their numbers on their way to the device
    with FakeTensorMode(allow_non_fake_inputs=True), prefer_kernels(order), Collectives(mesh) as collectives:
        autoshard.parallelize(module, mesh, (), inputs, plan=plan, compile=False)
        collectives.calls.clear()  # parameters are sent from the first rank
        device = torch.device("cuda", torch.cuda.current_device())
        outputs = outputs_of(module(**pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)))
        loss_of(outputs).backward()
    return _describe_step(module, [module], outputs, collectives)


def run_pipeline(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """The same for the stages of a rank of a pipeline."""
    plan = autoshard.PipelinePlan.load(folder / case.plan)
    sizes = case.axes()
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    module, inputs = build(case.model)
    outputs: dict[str, Tensor] = {}

    def note(stage: torch.nn.Module, operands: Any, results: Any) -> None:
        if isinstance(stage, StageCall):
            outputs.update((f"{len(outputs)}", result) for result in results)

    with FakeTensorMode(allow_non_fake_inputs=True), prefer_kernels((MATH,)), Collectives(mesh) as collectives:
        pipeline = autoshard.parallelize(module, mesh, (), inputs, plan=plan, compile=False)
        collectives.calls.clear()
        device = torch.device("cuda", torch.cuda.current_device())
        with register_module_forward_hook(note):
            batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
            loss = pipeline.train_step(**batch)
    ((serving,),) = pipeline._prepared_calls.values()
    stages = [stage.module for stage in serving.stages]
    told = _describe_step(pipeline, stages, outputs | {"loss": loss}, collectives)
    return told | {"fingerprints": [plan.fingerprint, forward_fingerprint(serving.call_format.step)]}


def _describe_step(
    module: torch.nn.Module,
    parallelized: list[torch.nn.Module],
    outputs: dict[str, Tensor],
    collectives: Collectives,
) -> dict[str, Any]:
    """What is said of a step: of the tensors of a module, and of the programs of what was parallelised of it."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    tensors = {"output": outputs, "gradient": gradients, "parameter": dict(module.named_parameters())}
    devices = {
        f"{kind} {name}": str(_local(tensor).device) for kind, held in tensors.items() for name, tensor in held.items()
    }
    programs = [program for part in parallelized for program in _programs(part)]
    findings = [finding for program in programs for finding in program_findings(program)]
    graphs = [graph for program in programs for graph in program.halves.graphs]
    return {
        "devices": devices,
        "without gradient": sorted(_trainable_names(module) - gradients.keys()),
        "collectives": collectives.calls,
        "gathers": sum(map(gathers, graphs)),
        "exposed gathers": sum(len(exposed_gathers(graph)) for graph in graphs),
        "lint": [f"{finding.node}: {finding.problem}" for finding in findings],
    }


def _programs(module: torch.nn.Module) -> list[RunnableStep]:
    served = module.__dict__[RUNTIME].programs.table
    return [call.program for call in served.values()]


def _trainable_names(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(rank: int, folder: Path, *models: str) -> None:
    """Run the cases of a rank, model by model, and write the report."""
    warnings.simplefilter("ignore")  # operators without a rule
    logging.disable(logging.WARNING)
    torch.cuda.set_device(rank)
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    report: dict[str, Any] = {}
    for serve, made in ((run, cases(rank)), (run_pipeline, pipelines())):
        for case in made:
            if not models or case.model in models:
                report[case.plan] = _run_catching(serve, case, rank, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))


def _run_catching(
    run: Callable[[Case, int, Path], dict[str, Any]], case: Case, rank: int, folder: Path
) -> dict[str, Any]:
    try:
        return run(case, rank, folder) | {"error": ""}
    except Exception:
        return {"error": traceback.format_exc()[-4000:]}


if __name__ == "__main__":
    main(RANKS[int(os.environ["RANK"])], Path(sys.argv[1]), *sys.argv[2:])
    exit_process()
