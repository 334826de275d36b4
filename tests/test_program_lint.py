"""The lint of programs: what it finds in graphs made for it, and in programs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.capture.joint import capture
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.step import RunnableStep
from tests import models
from tests.memory_tracker import first_rank
from tests.option_groups import grouped
from tests.program_lint import exposed_gathers, gathers, graph_findings, named_devices, program_findings
from tests.training import fast_links

collectives = torch.ops._c10d_functional


def traced(function: Callable[..., Any], *tensors: Tensor) -> fx.Graph:
    return make_fx(function, _error_on_data_dependent_ops=False)(*tensors).graph


HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x + x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave((x > 0).long()),
}


@pytest.mark.parametrize("case", HOST_READS)
def test_reads_of_the_device_by_the_host(case: str) -> None:
    assert graph_findings(traced(HOST_READS[case], torch.arange(-3.0, 4.0)))


def test_copies_to_the_host() -> None:
    graph = fx.Graph()
    there = graph.placeholder("x")
    there.meta["val"] = torch.empty(3, device="meta")
    copied = graph.call_function(torch.ops.aten._to_copy.default, (there,), {"device": torch.device("cpu")})
    copied.meta["val"] = torch.empty(3)
    assert not graph_findings(graph)
    there.meta["val"] = _Elsewhere(torch.empty(3))
    assert [finding.node for finding in graph_findings(graph)] == [str(copied)]


class _Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 3)


def test_what_is_no_read() -> None:
    def step(x: Tensor, place: Tensor) -> Tensor:
        y = x.masked_fill(x > 0, 0.0)[place] + x.sum()
        return y.repeat_interleave(2, 0).to(torch.bfloat16)

    assert not graph_findings(traced(step, torch.randn(4, 4), torch.tensor([1, 2])))


def _reduced(dtype: torch.dtype, reduction: str) -> fx.Graph:
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(4, dtype=dtype)
    graph.call_function(collectives.all_reduce.default, (source, reduction, "0"))
    return graph


def _gathered(dtype: torch.dtype) -> fx.Graph:
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(4, dtype=dtype)
    graph.call_function(collectives.all_gather_into_tensor.default, (source, 2, "0"))
    return graph


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        (torch.int16, "sum"),
        (torch.uint16, "sum"),
        (torch.float8_e4m3fn, "sum"),
        (torch.bool, "avg"),
        (torch.float32, "band"),
        (torch.complex64, "max"),
    ],
)
def test_reductions_that_nccl_does_not_have(dtype: torch.dtype, reduction: str) -> None:
    assert len(graph_findings(_reduced(dtype, reduction))) == 1


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint32, torch.complex64])
def test_gathers_that_nccl_does_not_have(dtype: torch.dtype) -> None:
    assert len(graph_findings(_gathered(dtype))) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int64])
def test_collectives_that_nccl_has(dtype: torch.dtype) -> None:
    assert not graph_findings(_gathered(dtype))
    if dtype != torch.float8_e5m2:
        assert not graph_findings(_reduced(dtype, "sum"))


def _two_gathers(*, ahead: bool, joined: bool = False) -> fx.Graph:
    """Two layers with gathered weights; the second gather starts before the first product, or behind it.

    A gather may be joined of several, though it is of one.
    """
    graph = fx.Graph()
    x, first, second = (graph.placeholder(name) for name in ("x", "first", "second"))

    def start(weight: fx.Node) -> fx.Node:
        view = graph.call_function(torch.ops.aten.view.default, (weight, [4]))
        cast = graph.call_function(torch.ops.aten._to_copy.default, (view,), {"dtype": torch.bfloat16})
        if not joined:
            return graph.call_function(collectives.all_gather_into_tensor.default, (cast, 2, "0"))
        started = graph.call_function(collectives.all_gather_into_tensor_coalesced.default, ([cast], 2, "0"))
        return graph.call_function(operator.getitem, (started, 0))

    def wait(started: fx.Node) -> fx.Node:
        return graph.call_function(collectives.wait_tensor.default, (started,))

    started = [start(first), start(second) if ahead else None]
    x = graph.call_function(torch.ops.aten.mm.default, (x, wait(started[0])))
    x = graph.call_function(torch.ops.aten.mm.default, (x, wait(started[1] or start(second))))
    graph.output(x)
    return graph


@pytest.mark.parametrize("joined", [False, True])
def test_gathers_that_nothing_hides(joined: bool) -> None:
    assert gathers(_two_gathers(ahead=True, joined=joined)) == 2
    assert not exposed_gathers(_two_gathers(ahead=True, joined=joined))
    assert len(exposed_gathers(_two_gathers(ahead=False, joined=joined))) == 1


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def program_of(module: nn.Module, inputs: dict[str, Tensor], sizes: dict[str, int], **options: Any) -> RunnableStep:
    with first_rank(sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), **grouped(options))
    (served,) = module.__dict__[RUNTIME].programs.table.values()
    return served.program


def test_gathers_of_a_stack_run_behind_its_products() -> None:
    hints = {"layers.*": {"x": Shard(0)}}
    program = program_of(Stack(), {"x": torch.randn(4096, 16)}, {"x": 2}, hints=hints)
    assert not program_findings(program)
    graph = program.halves.graphs[0]
    assert gathers(graph) == 6
    assert not exposed_gathers(graph)


@pytest.mark.parametrize("name", ["mlp", "resnet18", "lstm", "dlrm"])
def test_programs_of_models(name: str) -> None:
    module, inputs = models.ZOO[name](dtype=torch.float32)
    assert not program_findings(program_of(module, inputs, {"x": 2}, effort="fast", time_limit=5.0))


@pytest.mark.parametrize("name", ["mlp", "hf_gpt2", "lstm"])
def test_no_graph_names_a_device(name: str) -> None:
    module, inputs = models.ZOO[name](dtype=torch.float32)
    assert not named_devices(capture(module, (), inputs))
