"""Stages planned and parallelised like any module, every stage on a mesh of its own ranks."""

from __future__ import annotations

import copy

import pytest
import torch

import autoshard
from autoshard.capture.bound_call import BoundCall
from autoshard.options.options import collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.run.stage_planner import StageStepPlanner
from autoshard.runtime.module_runtime import Runtime
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.pipeline.chain import ModuleChain, balance_stages
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("name", ["gpt", "hf_gemma"])
def test_stages_on_meshes_do_what_the_model_does(name: str) -> None:
    options = {"tied": True, "layers": 1} if name == "gpt" else {}
    quickly = autoshard.Search(effort="fast")
    with simulated_mesh(x=2) as mesh:
        with Float64Mode():
            module, inputs = models.ZOO[name](dtype=torch.float64, batch=2, **options)
            alone = copy.deepcopy(module)
            loss = _loss(alone(**inputs))
            loss.backward()
            graph = capture_microbatch(module, (), inputs)
            stages = cut(graph, balance_stages(graph, 2), 2)
            for stage in stages:
                own = Target.of(collect_options("plan", {"cluster": fast_links(), "search": quickly}), "cpu")
                planner = StageStepPlanner(stage, MeshShape.of(mesh), own.on_mesh(MeshShape.of(mesh)))
                Runtime(ProgramMaker(stage.module, mesh, planner, None)).start(
                    BoundCall.of(stage.module, *stage.example)
                )
        chain = ModuleChain(graph, stages, (), inputs)
        with default_float64():
            ours = _loss(chain.forward())
            chain.backward()
        for held in per_rank(ours.detach(), mesh).values():
            torch.testing.assert_close(held, loss.detach(), **TOLERANCE)
        gradients: dict[str, torch.Tensor] = {}
        sharded = 0
        for stage in stages:
            for path, parameter in stage.module.named_parameters():
                gradients[path] = gradients.get(path, 0) + gather_full_tensor(parameter.grad)
                sharded += any(not placement.is_replicate() for placement in parameter.placements)
        assert sharded
        assert gradients.keys() == dict(alone.named_parameters()).keys()
        for path, parameter in alone.named_parameters():
            for held in per_rank(gradients[path], mesh).values():
                torch.testing.assert_close(held, parameter.grad, **TOLERANCE)


def _loss(output: object) -> torch.Tensor:
    return output[1] if isinstance(output, tuple) else output["loss"]  # type: ignore[index]
