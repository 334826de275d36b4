"""Norms of gradients in parts, against whole ones; that pipelines clip as one device does is in every comparison."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard.errors import InputError
from autoshard.pipeline.run.clipping import total_norm
from autoshard.runtime.shards import replace_parameters
from autoshard.specs import Spec
from tests.workers import Workers

SPECS = {"strided": "S(0,f=2)", "uneven": "S(0)", "replicated": "R", "of one row": "S(0)"}
"""Two pipeline ranks have two of these each."""
ORDERS = (0.0, 1.0, 2.0, 3.0, math.inf)


def parameters() -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    shapes = {"strided": (8, 6), "uneven": (5,), "replicated": (4, 3), "of one row": (1, 3)}
    return nn.ParameterDict(
        {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    )


def norms() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    places = {name: place for place, name in enumerate(SPECS)}
    held = parameters()
    for name in list(held):
        if places[name] // 2 != mesh.get_local_rank("pp"):
            del held[name]
    replace_parameters(held, {name: Spec.parse(SPECS[name]) for name in held}, mesh["tp"])
    gradients = {places[name]: parameter.detach() for name, parameter in held.items()}
    with pytest.raises(InputError, match=r"norm_type=-1\.0"):
        total_norm(gradients, len(SPECS), mesh, -1.0, torch.float64)
    return [total_norm(gradients, len(SPECS), mesh, order, torch.float64) for order in ORDERS]


def test_norms_are_those_of_whole_gradients(four: Workers) -> None:
    whole = [parameter.detach() for parameter in parameters().values()]
    expected = [nn.utils.get_total_norm(whole, order) for order in ORDERS]
    for found in four.run(norms):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
