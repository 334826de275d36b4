"""Results of operators do not depend on how ranks come to hold operands in memory, in forward or in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.registry import call_of
from autoshard.patterns.rule import FACTORS_BY_LAYOUT, Rule, build
from autoshard.program.graph_emitter import supports_layout
from autoshard.specs.axes import MeshShape
from tests.random_plans import random_plan
from tests.training import captured_as

EYE = 2 * torch.eye(4, dtype=torch.float64)


def _padded(value: Tensor) -> Tensor:
    """The same numbers, with a gap behind every row."""
    return F.pad(value, (0, 1))[..., :-1] if value.ndim else value


def _columns(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).contiguous().transpose(-1, -2) if value.ndim > 1 else _padded(value)


def _reversed(value: Tensor) -> Tensor:
    order = list(range(value.ndim))[::-1]
    return value.permute(order).contiguous().permute(order)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda value: value.clone(memory_format=torch.contiguous_format),
    "columns": _columns,
    "reversed": _reversed,
    "gaps": _padded,
}

# Operands of 12 rows of 16 numbers, made from a linear layer: (3, 4, 4) in different orders of memory.
OPERANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y[:3].view(3, 4, 4) + EYE,
    "transposed": lambda y: y[:3].view(3, 4, 4).transpose(1, 2) + EYE,
    "sliced": lambda y: y.view(3, 4, 16)[:, :, :4],
    "expanded": lambda y: y[:1].view(1, 4, 4).expand(3, 4, 4),
    "diagonal": lambda y: y.view(3, 4, 4, 4).permute(1, 2, 3, 0)[..., 0][:3],
}

# Every kind of function with results that autograd keeps for itself, or indices and factors beside its result.
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "logdet": lambda a: torch.logdet(a @ a.mT + 1e-3 * EYE),
    "solve": lambda a: torch.linalg.solve_ex(a, a.mT)[0],
    "vectors": lambda a: torch.linalg.solve_ex(a, a[..., 0])[0],
    "tensorsolve": lambda a: torch.linalg.solve_ex(a, a[0])[0],
    "inv": lambda a: torch.linalg.inv_ex(a)[0],
    "lu_factor": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(a)[:2], a),
    "lu": lambda a: torch.linalg.lu(a)[2],
    "cholesky": lambda a: torch.linalg.cholesky_ex(a @ a.mT + 1e-3 * EYE)[0],
    "qr": lambda a: torch.linalg.qr(a)[1].abs(),
    "svd": lambda a: torch.linalg.svd(a)[1],
    "eigh": lambda a: torch.linalg.eigh(a + a.mT)[0],
    "eig": lambda a: torch.linalg.eig(a)[0].abs().sort()[0],
    "lstsq": lambda a: torch.linalg.lstsq(a, a.mT)[0],
    "max_pool": lambda a: F.max_pool2d(a[None], 2, 1),
    "adaptive_max_pool": lambda a: F.adaptive_max_pool2d(a[None], 3),
    "batch_norm": lambda a: F.batch_norm(a, None, None, training=True).square(),
    "layer_norm": lambda a: F.layer_norm(a, (4,)).square(),
    "group_norm": lambda a: F.group_norm(a, 2).square(),
    "instance_norm": lambda a: F.instance_norm(a).square(),
    "lstm": lambda a: torch.lstm(
        a, (a[:1], a[:1]), [torch.ones(16, 4).to(a) / 8] * 2, False, 1, 0.0, False, False, False
    )[0],
    "max": lambda a: a.max(1)[0],
    "median": lambda a: a.median(1)[0],
    "kthvalue": lambda a: a.kthvalue(2, 2)[0],
    "sort": lambda a: a.sort(0)[0],
    "topk": lambda a: a.topk(2, 2)[0],
    "cummax": lambda a: a.cummax(1)[0],
    "mode": lambda a: a.round().mode(1)[0] + a[:, 0],
    "log_sigmoid": F.logsigmoid,
    "prelu": lambda a: F.prelu(a, a[0, 0]),
    "nll_loss": lambda a: F.nll_loss(a.log_softmax(1), torch.arange(12).view(3, 4) % 4),
    "grid_sample": lambda a: F.grid_sample(a[None], a[None, :2, :, :2].tanh(), align_corners=False),
    "cdist": lambda a: torch.cdist(a, a + 1),
    "ctc_loss": lambda a: F.ctc_loss(a.log_softmax(-1), torch.ones(4, 1).long(), (3,) * 4, (1,) * 4, reduction="sum"),
    "attention": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]),
    "weight_norm": lambda a: torch._weight_norm(a, a.norm(dim=(1, 2), keepdim=True), 0),
}


def _weighted(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, y.numel() + 1, dtype=torch.float64).view(y.shape)).sum()


class _InLayout(fx.Interpreter):
    """Runs a graph of forward and backward, every operand but those of views in another layout."""

    def __init__(self, module: fx.GraphModule, layout: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self.layout = layout

    def run_node(self, n: fx.Node) -> Any:
        if not isinstance(n.target, torch._ops.OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            return args[0].reshape(args[1])
        if any(result.alias_info is not None for result in n.target._schema.returns):
            return n.target(*args, **kwargs)

        def moved(value: Tensor) -> Tensor:
            value = self.layout(value)
            return value if supports_layout(n.target, value) else value.contiguous()

        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, moved, (args, kwargs))
        if n.target._schema.name in FACTORS_BY_LAYOUT:
            args = (_as_captured(n, args[0]), *args[1:])
        return n.target(*args, **kwargs)


def _as_captured(node: fx.Node, matrix: Tensor) -> Tensor:
    """The matrix as a local program gives it to the operator: by the library's own code, on one rank."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    call = call_of(node.target, node.args, node.kwargs, node.meta["val"])
    local = LocalCall(call, _whole(call), (-1,), MeshShape.of({"x": 1}), Lockstep(MeshShape.of({"x": 1})), [])
    value = local.emit.wrap(PerRank((matrix,)))
    return local._in_captured_layout([value])[0].raw.values[0]


def _whole(call: Any) -> Rule:
    return build({}, [[] for _ in call.operands], [[] for _ in call.results])


def _gradient_of(function: str, view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def step(y: Tensor) -> Tensor:
        return torch.autograd.grad(_weighted(FUNCTIONS[function](view(y))), (y,))[0]

    return step


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_do_not_depend_on_layouts(function: str) -> None:
    leaf = torch.randn(12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    for operand, view in OPERANDS.items():
        step = _gradient_of(function, view)
        traced = make_fx(step)(leaf)
        for name, layout in LAYOUTS.items():
            gradient = _InLayout(traced, layout).run(leaf.detach())
            torch.testing.assert_close(
                gradient, step(leaf), rtol=1e-9, atol=1e-9, msg=f"{function}, {operand}, run with operands in {name}"
            )


class Factored(nn.Module):
    """Every operator that factors a matrix by its layout, of every operand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(8, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        names = ("det", "slogdet", "solve", "vectors", "tensorsolve")
        return torch.stack([_weighted(FUNCTIONS[name](view(y))) for name in names for view in OPERANDS.values()]).sum()


@functools.cache
def factored_graph() -> JointGraph:
    return capture(Factored(), (torch.randn(12, 8, dtype=torch.float64),), {})


@pytest.mark.parametrize("size", [2, 3])
def test_factored_matrices_on_all_ranks(size: int) -> None:
    model, x = Factored(), torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    graph = factored_graph()
    plan = random_plan(graph, MeshShape.of({"a": size}), size, forced=1.0)
    with captured_as(graph):
        report = autoshard.verify(model, {"a": size}, (x,), plan=plan, steps=1)
    assert report.ok, str(report)
