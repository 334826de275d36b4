"""The program of a rank: one for all ranks, every copy made once, every gradient in memory of its own."""

from __future__ import annotations

import operator
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.strategy import WHOLE
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.localize import localize
from autoshard.program.split import split
from autoshard.reshard.path import Path
from autoshard.specs.layout import local_shape
from tests import models
from tests.planner.steps import account_of, every_parameter, flow_of, joint_graph, planner_of, program_of


def _planned(
    graph: JointGraph, mesh: dict[str, int], constraints: Constraints | None = None
) -> tuple[Planner, ShardingPlan]:
    planner = planner_of(graph, mesh, constraints)
    return planner, planner.plan()


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_ranks_differ_in_the_names_of_their_groups_alone(name: str) -> None:
    """Two ranks build one program; what tells them apart are inputs."""
    planner, plan = _planned(joint_graph(name), {"x": 2, "y": 2} if name == "mlp" else {"x": 4})
    texts = []
    for rank in range(2):
        groups = [f"{axis}_{rank}" for axis in planner.mesh.names]
        text = localize(flow_of(planner, plan), planner.resharder, groups).graph_module.code
        for axis in planner.mesh.names:
            text = text.replace(f"'{axis}_{rank}'", f"'{axis}'")
        texts.append(text)
    assert texts[0] == texts[1]
    assert "'x'" in texts[0]


def test_a_plan_from_a_file_gives_the_same_program() -> None:
    planner, plan = _planned(joint_graph("mlp"), {"x": 2, "y": 2})
    loaded = ShardingPlan.from_json(plan.to_json())
    fresh = planner_of(joint_graph("mlp"), {"x": 2, "y": 2})
    assert program_of(planner, plan).graph_module.code == program_of(fresh, loaded).graph_module.code


def test_inputs_are_local_tensors_then_coordinates_the_seed_and_the_tangents() -> None:
    planner, plan = _planned(joint_graph("mlp"), {"x": 2, "y": 2})
    step = program_of(planner, plan)
    placeholders = list(step.graph_module.graph.find_nodes(op="placeholder"))
    primals = [border for border in step.inputs if border.kind != "tangent"]
    assert [node.target for node in placeholders] == [
        *(f"primals_{index}" for index in range(len(primals))),
        "coordinate_x",
        "coordinate_y",
        "host_coordinate_x",
        "host_coordinate_y",
        "seed",
        "tangents_0",
    ]
    for border, node in zip(primals, placeholders, strict=False):
        assert tuple(node.meta["val"].shape) == border.local_shape(planner.mesh)
        if border.kind == "parameter":
            assert border.spec.placements == plan.placements[border.name]
    assert [border.name for border in step.tangents] == ["output"]


def test_outputs_come_first_then_buffers_then_gradients() -> None:
    planner, plan = _planned(joint_graph("resnet18", batch=2, size=16), {"x": 2})
    step = program_of(planner, plan)
    kinds = [border.kind for border in step.outputs]
    assert kinds == sorted(kinds, key=["output", "mutation", "gradient"].index)
    assert set(kinds) == {"output", "mutation", "gradient"}
    assert step.forward_outputs == tuple(border for border in step.outputs if border.kind != "gradient")
    results = next(iter(step.graph_module.graph.find_nodes(op="output"))).args[0]
    for border, node in zip(step.outputs, results, strict=True):
        assert tuple(node.meta["val"].shape) == local_shape(border.shape, border.spec, planner.mesh)


def test_the_order_of_outputs_is_that_of_the_model_where_one_is_handed_back_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            return y, y.sum(), y

    graph = capture(Twice(), (torch.randn(4, 8),), {})
    planner, plan = _planned(graph, {"x": 2})
    assert [border.name for border in program_of(planner, plan).forward_outputs] == [
        "output[0]",
        "output[1]",
        "output[2]",
    ]


def test_the_forward_half_comes_first() -> None:
    planner, plan = _planned(joint_graph("gpt"), {"x": 2})
    tags = [
        node.meta["partitioner_tag"]
        for node in program_of(planner, plan).graph_module.graph.nodes
        if node.op == "call_function"
    ]
    assert set(tags) == {"is_forward", "is_backward"}
    assert tags == sorted(tags, reverse=True)


@pytest.mark.parametrize("forced", [False, True])
def test_every_copy_is_made_once(forced: bool) -> None:
    graph = joint_graph("gpt")
    planner, plan = _planned(graph, {"x": 2}, Constraints(forced=every_parameter(graph) if forced else frozenset()))
    legs = account_of(planner, plan).reshards
    assert len({leg.key for leg in legs}) == len(legs)
    calls = Counter(
        (node.target, node.args)
        for node in program_of(planner, plan).graph_module.graph.nodes
        if node.op == "call_function" and "c10d" in str(node.target)
    )
    assert max(calls.values()) == 1


def test_pins_leave_no_operator() -> None:
    class Pinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return autoshard.shard(self.linear(x), Shard(1)).square().mean()

    graph = capture(Pinned(), (torch.randn(4, 8),), {})
    assert any("pin" in str(node.target) for node in graph.graph.nodes)
    planner, plan = _planned(graph, {"x": 2})
    assert "autoshard" not in program_of(planner, plan).graph_module.code


class Contracted(nn.Module):
    """A product whose contracted dim, of six, is to be split over four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() @ self.weight


@pytest.mark.parametrize(("sharded", "masks"), [(False, 0), (True, 1)])
def test_padding_that_is_zero_already_is_not_masked(sharded: bool, masks: int) -> None:
    """Parameters and slices are padded with zeros; what an exponential makes of them is not zero."""
    graph = capture(Contracted(), (torch.randn(2, 6),), {}, grad=False)
    planner, plan = _planned(graph, {"x": 4}, Constraints(pinned={"weight": (Shard(0),)}))
    decisions = Decisions.from_data(plan.decisions)
    exponential, product = planner.rules.operators
    decisions.choices[product.name] = planner.rules.rules[product].indices("k")
    decisions.choices[exponential.name] = planner.rules.rules[exponential].indices("dim1") if sharded else (WHOLE,)
    flow = Flow(planner.rules, Decisions(decisions.choices, decisions.rest, decisions.outputs), planner.mesh)
    code = localize(flow, planner.resharder, ["x"]).graph_module.code
    assert code.count("aten.masked_fill.Scalar(") == masks
    assert planner.rules.zeros == {exponential: (True,), product: (False, True)}


def test_gradients_that_are_cast_back_take_the_paths_that_the_plan_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a policy the reduction stands before a cast, and is priced as one that is joined with others."""
    module, inputs = models.gpt(dtype=torch.float64, layers=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    planner = planner_of(capture(module, (), inputs, mp_policy=policy), {"x": 2})
    plan = planner.plan()
    gradients = planner.resharder.gradients
    taken: list[Path] = []

    def path(*args: Any) -> Path:
        taken.append(gradients.path(*args))
        return taken[-1]

    monkeypatch.setattr(planner.resharder, "gradients", SimpleNamespace(path=path))
    localize(flow_of(planner, plan), planner.resharder, planner.mesh.names)
    monkeypatch.undo()
    priced = [leg.path for leg in account_of(planner, plan).reshards if leg.gradient]
    assert priced
    assert [path for path in taken if path.steps] == priced


class Shared(nn.Module):
    """The gradients of `a`, `b` and `c` are the same numbers; that of `d` is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(*shape)) for shape in ((8,), (8,), (2, 4), (8,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.a + self.b + self.c.reshape(8)).square().sum() + self.d.sum()


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}], ids=str)
def test_every_gradient_has_contiguous_memory_of_its_own(mesh: dict[str, int]) -> None:
    graph = capture(Shared(), (torch.randn(4, 8),), {})
    pinned = dict.fromkeys(every_parameter(graph), (Replicate(),))
    planner, plan = _planned(graph, mesh, Constraints(pinned=pinned))
    step = program_of(planner, plan)
    results = next(iter(step.graph_module.graph.find_nodes(op="output"))).args[0]
    gradients = [node for border, node in zip(step.outputs, results, strict=True) if border.kind == "gradient"]
    roots = []
    for node in gradients:
        assert node.meta["val"].is_contiguous()
        while node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default, operator.getitem):
            node = node.args[0]
        assert node.op == "call_function"
        roots.append(node)
    assert len(set(roots)) == len(roots) == 4


def test_gradients_are_not_copied_where_they_are_alone_already() -> None:
    """A clone of every gradient would cost a pass over memory."""
    planner, plan = _planned(joint_graph("gpt"), {"x": 1})
    step = program_of(planner, plan)
    results = next(iter(step.graph_module.graph.find_nodes(op="output"))).args[0]
    assert all(node.target is not torch.ops.aten.clone.default for node in results)


class PassesOn(nn.Module):
    """Returns what it is given beside what it makes of it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.nn.functional.gelu(y)


def test_the_gradient_of_what_is_passed_on_is_made_in_the_backward_half() -> None:
    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    graph = capture(PassesOn(), (x, y), {}, grad=True)
    planner, plan = _planned(graph, {"x": 2})
    halves = split(program_of(planner, plan), compile=False)
    assert halves.backward is not None
    results = halves.backward.graph.output_node().args[0]
    assert len(results) == 2
    assert {node.name for node in halves.forward.graph.nodes}.isdisjoint(node.name for node in results)
