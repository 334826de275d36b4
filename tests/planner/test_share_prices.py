"""What a program of equal shares costs a rank that has another share."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn.utils.parametrizations import weight_norm

from autoshard.capture.joint import capture
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.schedule import SharePrices
from autoshard.planner.target_constraints import batch_of
from autoshard.program.kernels import COLLECTIVE_KINDS
from autoshard.program.predicted_program import PredictedProgram
from autoshard.specs.shared_axis import SharedAxis
from tests.planner.steps import flow_of, links, planner_of

aten = torch.ops.aten


class Normalized(nn.Module):
    """Of its operators, those of the norm of the weight do not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).tanh().square().mean()


@pytest.fixture(scope="module")
def planner() -> Planner:
    graph = capture(Normalized(), (), {"x": torch.randn(4096, 64)}, dynamic={"x": {0: "batch"}})
    batch = batch_of(graph)
    assert batch is not None
    return planner_of(graph, {"dp": 2}, Constraints(shared=SharedAxis(0, 2, batch)), links(1e12, 1e-9))


def kernels(program: PredictedProgram) -> list[fx.Node]:
    calls = [node for half in (program.forward, program.backward) for node in half.graph.nodes]
    return [node for node in calls if node.op == "call_function" and node.target not in COLLECTIVE_KINDS]


def test_what_computes_with_a_share_takes_as_many_times_as_long(planner: Planner) -> None:
    flow = flow_of(planner, planner.plan())
    program, shared = planner.program(flow), planner.constraints.shared
    equal, larger = (SharePrices(flow, planner.cluster, shared, share) for share in (1.0, 1.5))
    overhead = planner.cluster.device.kernel_overhead
    grown, kept = set(), set()
    for node in kernels(program):
        before, after = equal.seconds(node), larger.seconds(node)
        assert before == pytest.approx(planner.prices.seconds(node))
        if before > overhead:
            assert after == pytest.approx(before) or after - overhead == pytest.approx(1.5 * (before - overhead))
            (grown if after > before else kept).add(node.target)
    assert {aten.tanh.default, aten.tanh_backward.default} <= grown
    assert any("weight_norm" in str(target) or target is aten.linalg_vector_norm.default for target in kept), kept


def test_the_step_is_that_of_the_share(planner: Planner) -> None:
    flow = flow_of(planner, planner.plan())
    program, shared = planner.program(flow), planner.constraints.shared

    def seconds(share: float) -> float:
        return planner.replay(program, SharePrices(flow, planner.cluster, shared, share))[0]

    assert seconds(1.0) == pytest.approx(planner.replay(program, planner.prices)[0])
    assert seconds(0.5) < seconds(1.0) < seconds(1.5) < 1.5 * seconds(1.0)
