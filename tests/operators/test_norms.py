"""Root-mean-square norms as an operator."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.capture import capture
from autoshard.operators.norms import operators, rms_norm
from tests.capture.interpret import run_joint

DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_it_is_the_norm_of_torch(dtype: torch.dtype, weight_dtype: torch.dtype, eps: float | None) -> None:
    x, weight = torch.randn(4, 6, 8).to(dtype).requires_grad_(), torch.randn(8).to(weight_dtype).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that element types differ
        expected = functional.rms_norm(x, [8], weight, eps)
    found = rms_norm(x, [8], weight, eps, dtype=dtype)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_tells_without_numbers_is_what_it_gives(weight: bool, dtype: torch.dtype) -> None:
    x, scale = torch.randn(4, 6, 8).to(dtype), torch.randn(6, 8).to(dtype) if weight else None
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.rms_norm.default, (x, [6, 8], scale, 1e-5), test_utils=checks)
    rstd = operators.rms_norm(x, [6, 8], scale, 1e-5)[1]
    for mask in ([True, weight], [not weight, weight]):
        args = (x, x, [6, 8], rstd, scale, mask)
        torch.library.opcheck(operators.rms_norm_backward.default, args, test_utils=checks)


def test_a_graph_has_one_operator_for_it() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)).double(), torch.randn(4, 8, dtype=torch.float64)
    graph = capture(module, (x,), {})
    targets = [str(node.target) for node in graph.graph_module.graph.nodes]
    assert targets.count("autoshard.rms_norm.default") == 1
    assert targets.count("autoshard.rms_norm_backward.default") == 1
    output = module(x)
    output.backward(torch.ones_like(output))
    run = run_joint(graph, module, (x,))
    torch.testing.assert_close(run.output, output)
    torch.testing.assert_close(run.gradients["1.weight"], module[1].weight.grad)
