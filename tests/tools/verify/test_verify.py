"""`autoshard.verify`: all ranks in this process, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autoshard
from autoshard.errors import InputError, MeshError, PlanError, VerifyError
from autoshard.patterns.registry import register_rule
from autoshard.specs.axes import MeshShape
from tests import models
from tests.random_plans import random_plan
from tests.training import ONE_LAYER, TOLERANCE, build, fast_links, joint_graph

SQUARE = {"dp": 2, "tp": 2}


def _operator(name: str, rule: str) -> Any:
    """An operator that divides every row by the sum of its squares, with a rule."""

    @torch.library.custom_op(f"autoshard_tests::{name}", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x / (1 + x.square().sum(-1, keepdim=True))

    @scaled.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    scaled.register_autograd(lambda ctx, gradient: gradient)  # a straight-through estimate
    register_rule(f"autoshard_tests::{name}", rule)
    return getattr(torch.ops.autoshard_tests, name).default


scaled_by_all = _operator("verify_scaled_by_all", "... d! -> ... d!")
scaled_by_shard = _operator("verify_scaled_by_shard", "... -> ...")


class Scaling(nn.Module):
    """Linear layers with an operator of the user between them."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operator(self.up(x))).square().mean()


class Everything(nn.Module):
    """Statistics that change, a parameter without a gradient, a constant, and outputs beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10)
        self.frozen = nn.Parameter(torch.randn(10, 1, 1), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(10, 7)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        features = (self.norm(self.conv(image)) + self.frozen).relu().mean((2, 3))
        logits = self.head(features)
        return {"loss": nn.functional.cross_entropy(logits, label), "best": logits.argmax(-1), "logits": logits}


def _options(**options: Any) -> dict[str, Any]:
    return {"cluster": fast_links(), "search": autoshard.Search(effort="fast")} | options


def _everything() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Everything(), {"image": torch.randn(9, 3, 6, 6), "label": torch.arange(9) % 7}


def test_all_that_a_step_computes_equals_one_device_and_the_model_stays_as_it_was() -> None:
    module, inputs = _everything()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    report = autoshard.verify(module, {"x": 3}, kwargs=inputs, **_options())
    assert report.ok
    report.raise_if_wrong()
    assert set(report.largest) == {"loss", "output", "gradient", "parameter", "buffer"}
    assert max(report.largest.values()) <= TOLERANCE
    compared = {(difference.kind, difference.name) for difference in report.differences}
    assert {("loss", "loss"), ("output", "best"), ("output", "logits"), ("parameter", "frozen")} <= compared
    assert {("buffer", "norm.running_mean"), ("buffer", "steps"), ("gradient", "head.weight")} <= compared
    assert ("gradient", "frozen") not in compared
    text = str(report)
    assert "3 training steps in float64 on x=3 (3 ranks) equal one device" in text
    assert "gradient" in text
    after = module.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


@pytest.mark.parametrize(("model", "mesh", "seed"), [("mlp", SQUARE, 0), ("mlp", {"x": 3}, 1), (ONE_LAYER, SQUARE, 2)])
def test_random_plans_equal_one_device(model: str, mesh: dict[str, int], seed: int) -> None:
    plan = random_plan(joint_graph(model), MeshShape.of(mesh), seed, forced=0.7, uneven=0.3)
    module, inputs = build(model)
    report = autoshard.verify(module, mesh, kwargs=inputs, plan=plan, steps=2)
    assert report.ok, str(report)
    assert report.plan is plan
    assert any(placement.is_shard() for placements in plan.placements.values() for placement in placements)


def test_a_plan_of_the_model_in_its_own_dtype() -> None:
    module, inputs = models.mlp()
    plan = autoshard.plan(module, SQUARE, (), inputs, **_options())
    report = autoshard.verify(lambda: models.mlp(), SQUARE, plan=plan, **_options())
    assert report.ok
    assert report.steps == 3


def test_partial_and_sharded_outputs_that_are_no_losses() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6)), torch.randn(7, 12, requires_grad=True)
    report = autoshard.verify(module, SQUARE, (x,), **_options(output_placements="planned"))
    assert report.ok, str(report)
    assert {(each.kind, each.name) for each in report.differences} >= {("output", "output"), ("gradient", "input")}


def test_dynamic_sizes_and_inference() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5)), torch.randn(10, 8)
    options = _options(dynamic={"input": {0: "batch"}})
    assert autoshard.verify(module, {"dp": 4}, (x,), **options).ok
    with torch.no_grad():
        report = autoshard.verify(module, {"dp": 4}, (x,), **options)
    assert report.ok
    assert "gradient" not in report.largest


def test_a_right_rule_of_the_user() -> None:
    torch.manual_seed(0)
    assert autoshard.verify(Scaling(scaled_by_all), SQUARE, (torch.randn(12, 16),), **_options()).ok


def test_a_wrong_rule_of_the_user_that_the_plan_uses_is_named() -> None:
    torch.manual_seed(0)
    hints = {"up.weight": [Shard(0)]}  # so that every rank has a part of the columns of what is scaled
    report = autoshard.verify(Scaling(scaled_by_shard), {"x": 2}, (torch.randn(12, 16),), **_options(hints=hints))
    assert not report.ok
    assert {finding.op for finding in report.rules} == {"autoshard_tests.verify_scaled_by_shard.default"}
    (fault,) = report.operators
    assert (fault.op, fault.of_user) == ("autoshard_tests.verify_scaled_by_shard.default", True)
    wrong = {(difference.kind, difference.name) for difference in report.wrong}
    assert {("loss", "output"), ("gradient", "down.weight"), ("parameter", "down.weight")} <= wrong
    with pytest.raises(VerifyError, match="differ from one device") as raised:
        report.raise_if_wrong()
    assert "autoshard_tests.verify_scaled_by_shard.default" in str(raised.value)
    assert "down.weight" in str(raised.value)


def test_a_wrong_rule_of_the_user_that_the_plan_does_not_use_is_named_too() -> None:
    torch.manual_seed(0)
    report = autoshard.verify(Scaling(scaled_by_shard), {"x": 1}, (torch.randn(12, 16),), **_options())
    assert not report.wrong
    assert not report.operators
    assert report.rules
    assert not report.ok
    assert "a rule is wrong" in str(report)


def test_random_numbers_are_refused_until_there_are_none() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    with pytest.raises(InputError, match=r"random ones are drawn in 1 .*model\.eval\(\)"):
        autoshard.verify(module, SQUARE, (torch.randn(8, 8),), **_options())
    assert autoshard.verify(module.eval(), SQUARE, (torch.randn(8, 8),), **_options()).ok


def test_what_a_function_may_return() -> None:
    x = torch.randn(8, 8)
    options = _options(steps=1)
    for example in ((nn.Linear(8, 8), (x,), {}), (nn.Linear(8, 8), (x,)), (nn.Linear(8, 8), {"input": x})):
        assert autoshard.verify(lambda example=example: example, {"x": 2}, **options).ok
    with pytest.raises(InputError, match=r"returned \(Linear, Tensor\): return \(model, args, kwargs\)"):
        autoshard.verify(lambda: (nn.Linear(8, 8), x), {"x": 2})
    with pytest.raises(InputError, match="args and kwargs go with a model"):
        autoshard.verify(lambda: (nn.Linear(8, 8), (x,)), {"x": 2}, (x,))


def test_bad_calls_say_what_to_do() -> None:
    module, x = nn.Linear(8, 8), torch.randn(8, 8)
    with pytest.raises(InputError, match=r"for one argument, write args=\(x,\)"):
        autoshard.verify(module, SQUARE, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="steps=0"):
        autoshard.verify(module, SQUARE, (x,), steps=0)
    with pytest.raises(InputError, match=r"got int"):
        autoshard.verify(3, SQUARE, (x,))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="weight is on the meta device"):
        autoshard.verify(nn.Linear(8, 8, device="meta"), SQUARE, (x,))
    with pytest.raises(InputError, match=r"an input of shape \(8, 8\) is on the meta device"):
        autoshard.verify(module, SQUARE, (x.to("meta"),))
    with pytest.raises(PlanError, match="of a pipeline"):
        autoshard.verify(module, {"pp": 2, "dp": 2}, (x,))
    with pytest.raises(PlanError, match="must be a ShardingPlan, got str"):
        autoshard.verify(module, SQUARE, (x,), plan="plan.json")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="verify takes no keyword 'mp_policy'"):
        autoshard.verify(module, SQUARE, (x,), mp_policy=None)
    with pytest.raises(MeshError):
        autoshard.verify(module, {"x": 0}, (x,))


def test_plans_of_others_are_refused() -> None:
    x = torch.randn(8, 8)
    plan = autoshard.plan(nn.Linear(8, 8), {"x": 2}, (x,), **_options())
    with pytest.raises(PlanError, match="it was made for the mesh x=2; this mesh is x=4"):
        autoshard.verify(nn.Linear(8, 8), {"x": 4}, (x,), plan=plan)
    with pytest.raises(PlanError, match="weight"):
        autoshard.verify(nn.Linear(8, 4), {"x": 2}, (x,), plan=plan)
    with pytest.raises(PlanError):
        autoshard.verify(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), {"x": 2}, (x,), plan=plan)


def test_a_plan_that_splits_nothing_is_replaced_by_one_that_does_and_given_proves_nothing() -> None:
    """A small model on devices with slow links is best replicated: that plan would prove nothing."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    report = autoshard.verify(model, {"dp": 2}, (x,), steps=1)
    assert report.ok
    assert report.split
    assert report.collectives
    assert f"{report.split} of {report.operators_total} operators split, {report.collectives} collectives" in str(
        report
    )
    replicated = autoshard.plan(model, {"dp": 2}, (x,))
    assert not replicated.collectives
    empty = autoshard.verify(model, {"dp": 2}, (x,), plan=replicated, steps=1)
    assert not empty.ok
    assert "nothing was proved" in str(empty)


def test_one_rank_proves_nothing() -> None:
    report = autoshard.verify(nn.Linear(4, 4), {"dp": 1}, (torch.randn(2, 4),), steps=1)
    assert not report.ok
    with pytest.raises(VerifyError, match="nothing was proved"):
        report.raise_if_wrong()
