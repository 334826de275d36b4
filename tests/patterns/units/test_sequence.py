from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.patterns import soundness
from autoshard.patterns.exchanging import shift
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep
from autoshard.patterns.padding import emit_local
from autoshard.patterns.soundness import strategies
from autoshard.patterns.strategy import describe, offered_factors, operand_spec, result_spec
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.program.graph_emitter import GraphEmitter
from autoshard.reshard.collective_schedule import delay_waits
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from autoshard.specs.tensors import unshard
from tests.kernels.cuda import cuda_attention
from tests.operators.attention.attention_calls import BACKWARD, FORWARD, backward_args, forward_args
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.patterns.units.unit_models import attention_model, plan_with, worst_error
from tests.training import TOLERANCE

MESH = MeshShape.of({"x": 4})


def tensors(heads: int = 4, groups: int = 4, keys: int = 12) -> list[Tensor]:
    return [normal(2, heads, 12, 8), normal(2, groups, keys, 8), normal(2, groups, keys, 8) + 1]


def choice_of(rule: Any, name: str) -> int:
    return [factor.name for factor in offered_factors(rule)].index(name)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_backward(heads: int, groups: int, causal: bool) -> None:
    args = tensors(heads, groups)
    _, rule = bound(FORWARD, *forward_args(args, causal))
    assert "n on x" in {describe(refined, choices, MESH) for refined, choices in strategies(rule, MESH)}
    assert_sound(FORWARD, *forward_args(args, causal))
    assert_sound(BACKWARD, *backward_args(normal(2, heads, 12, 8) - 1, args, causal))


@pytest.mark.parametrize("causal", [True, False])
def test_keys_of_cudnn_go_round(causal: bool) -> None:
    """Its logarithms have a dim more."""
    args = tensors()
    forward = aten._scaled_dot_product_cudnn_attention.default
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    with cuda_attention(any_type=True):
        _, rule = bound(forward, *args, None, True, 0.0, causal)
        assert "n on x" in {describe(refined, choices, MESH) for refined, choices in strategies(rule, MESH)}
        assert_sound(forward, *args, None, True, 0.0, causal)
        kept = forward(*args, None, True, 0.0, causal)
        state = (*kept[:2], *kept[6:8], None, *kept[2:4], 12, 12, 0.0, causal)
        assert_sound(backward, normal(2, 4, 12, 8) - 1, *args, *state)


def test_scores_far_apart_do_not_overflow() -> None:
    """Later keys, which a causal mask hides, may score so much higher that their exponential is infinite."""
    query, key, value = tensors()
    args = (query, key * torch.linspace(1, 2000, 12, dtype=torch.float64).unsqueeze(-1), value)
    assert_sound(BACKWARD, *backward_args(normal(2, 4, 12, 8) - 1, args, True))


def test_everything_lies_along_the_sequence() -> None:
    args = tensors()
    _, rule = bound(BACKWARD, *backward_args(args[0], args, True))
    choices = (choice_of(rule, "n"),)
    assert {str(operand_spec(rule, choices, MESH, operand)) for operand in range(6)} == {"S(2)"}
    assert {str(result_spec(rule, choices, MESH, result)) for result in range(3)} == {"S(2)"}


def test_the_steps_of_the_ring_are_priced() -> None:
    args = tensors()
    call, rule = bound(FORWARD, *forward_args(args, True))
    tables = StrategyTables(CostModel(Cluster.preset("h100"), MESH))
    part = 2 * call.operands[1].bytes // 4
    assert tables.exchanges(rule, (choice_of(rule, "n"),)) == [("shift", 0, part)] * 3
    _, rule = bound(BACKWARD, *backward_args(args[0], args, True))
    assert tables.exchanges(rule, (choice_of(rule, "n"),)) == [("shift", 0, part)] * (3 + 4)


class Counted(Lockstep):
    """Counts the steps of rings by the axis that they are taken along."""

    steps: ClassVar[Counter[str]] = Counter()

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is shift:
            self.steps[args[-1]] += 1
        return super().call(op, *args, **kwargs)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2)])
def test_rings_within_rings_are_priced_as_they_run(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients need a last step home along every axis that they have not been all the way round."""
    mesh, args = MeshShape.of(dict(zip("xy", sizes, strict=True))), tensors()
    passed = backward_args(normal(2, 4, 12, 8) - 1, args, True)
    operands = [*filter(torch.is_tensor, passed)]
    call, rule = bound(BACKWARD, *passed)
    choices = (choice_of(rule, "n"),) * 2
    monkeypatch.setattr(Counted, "steps", Counter())
    monkeypatch.setattr(soundness, "Lockstep", Counted)
    shards = soundness.run_all_ranks(call, rule, choices, mesh, operands)
    for index, gradient in enumerate(BACKWARD(*passed)[:3]):
        found = unshard(shards[index], result_spec(rule, choices, mesh, index), mesh, gradient.shape)
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9)
    priced = StrategyTables(CostModel(Cluster.preset("h100"), mesh)).exchanges(rule, choices)
    assert Counter(mesh.names[axis] for _, axis, _ in priced) == Counted.steps


def test_the_next_stretch_is_under_way_while_a_rank_attends() -> None:
    call, rule = bound(FORWARD, *forward_args(tensors(), True))
    emit = GraphEmitter(MESH, ["group"], FakeTensorMode(), torch.device("cpu"))
    operands = [emit.placeholder(name, (2, 4, 3, 8), torch.float64) for name in ("query", "key", "value")]
    emit.add_rank_inputs()
    emit.graph.output(emit_local(LocalCall(call, rule, (choice_of(rule, "n"),), MESH, emit, operands)))
    delay_waits(emit.graph)
    kinds = {shift: "send", FORWARD: "attend", collectives.wait_tensor.default: "await"}
    order = [kinds[node.target] for node in emit.graph.nodes if node.target in kinds]
    assert order == ["send", "attend", "await"] * 3 + ["attend"]


@pytest.mark.parametrize("mask", [True, False])
def test_no_variant_with_a_mask_or_with_another_number_of_keys(mask: bool) -> None:
    args = tensors(keys=12 if mask else 8)
    _, rule = bound(FORWARD, *forward_args(args, mask=normal(12, 12) if mask else None))
    assert rule.variants == ()


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_accelerators(causal: bool) -> None:
    """A causal kernel without a mask can have its sequence sharded only so."""
    query = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta")
    _, rule = bound(aten._scaled_dot_product_flash_attention.default, query, query, query, 0.0, causal)
    assert [factor.name for factor in offered_factors(rule) if factor.name == "n" and factor.shardable] == ["n"]


@pytest.mark.parametrize(("mesh", "axis"), [({"cp": 4}, 0), ({"dp": 2, "cp": 2}, 1), ({"cp": 2, "tp": 2}, 0)])
def test_whole_model_with_keys_passed_round(mesh: dict[str, int], axis: int) -> None:
    """Also where the ranks of a ring are no neighbours: a stretch comes from its place in the group."""
    plan = plan_with(attention_model, mesh, "attention", "n", axis=axis)
    assert worst_error(attention_model, mesh, plan=plan) < TOLERANCE
