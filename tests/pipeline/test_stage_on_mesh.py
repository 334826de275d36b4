"""Stages planned and parallelised like any module, every stage on a mesh of its own ranks."""

from __future__ import annotations

import copy

import pytest
import torch

import autoshard
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.stage_modules import cut
from autoshard.runtime.shards import gather_full_tensor
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.pipeline.chain import Chain, balance_stages
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
            graph = export_forward(module, (), inputs)
            stages = cut(graph, balance_stages(graph, 2), 2)
            for stage in stages:
                autoshard.parallelize(stage.module, mesh, *stage.example, cluster=fast_links(), search=quickly)
        chain = Chain(graph, stages, (), inputs)
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
