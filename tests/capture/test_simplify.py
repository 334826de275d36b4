from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.capture.simplify import freeze, simplify

aten = torch.ops.aten


def simplified(function: Callable[[torch.Tensor], object], phases: dict[str, str] | None = None) -> fx.GraphModule:
    """The simplified graph of a function of a (2, 3, 4) tensor; `phases` names nodes of the backward half."""
    module = make_fx(function)(torch.randn(2, 3, 4))
    for node in module.graph.nodes:
        node.meta["partitioner_tag"] = (phases or {}).get(node.name, "is_forward")
    simplify(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.mul(aten.detach(aten.neg(x)), 1.0),
        lambda x: aten.pow(aten.neg(x), 1),
        lambda x: aten.transpose(aten.transpose(aten.neg(x), 1, -1), 2, 1),
        lambda x: aten.view(aten.neg(x), [2, 3, 4]),
        lambda x: aten.slice(aten.neg(x), 1, 0, 3),
        lambda x: aten.expand(aten.neg(x), [2, 3, 4]),
        lambda x: aten.view(aten.clone(aten.neg(x)), [2, 3, 4]),
    ],
)
def test_identities_go(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = simplified(function)
    assert targets(module) == [aten.neg.default]
    x = torch.randn(2, 3, 4)
    assert torch.equal(module(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.transpose(aten.transpose(x, 0, 1), 1, 2),
        lambda x: aten.neg(aten.clone(aten.transpose(x, 0, 1), memory_format=torch.contiguous_format)),
        lambda x: aten._to_copy(x, dtype=torch.float64),
        lambda x: aten.slice(x, 1, 0, 2),
        lambda x: aten.mul(x, 2.0),
        lambda x: aten.expand(x, [5, 2, 3, 4]),
    ],
)
def test_what_is_no_identity_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = [node.target for node in make_fx(function)(torch.randn(2, 3, 4)).graph.nodes if node.op == "call_function"]
    assert targets(simplified(function)) == before


def test_common_subexpressions_are_merged() -> None:
    module = simplified(lambda x: aten.add(aten.exp(x), aten.exp(x)))
    assert targets(module) == [aten.exp.default, aten.add.Tensor]


def test_arguments_of_different_types_are_not_merged() -> None:
    module = simplified(lambda x: (aten.full([2], 1), aten.full([2], 1.0), aten.full([2], True)))
    assert len(targets(module)) == 3


def test_random_numbers_are_not_merged() -> None:
    module = simplified(lambda x: aten.add(aten.rand_like(x), aten.rand_like(x)))
    assert targets(module).count(aten.rand_like.default) == 2


def test_across_phases_only_views_are_merged() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.exp(x), aten.neg(aten.transpose(x, 0, 1)), aten.exp(x), aten.sin(aten.transpose(x, 0, 1))

    backward = {"exp_1": "is_backward", "transpose_1": "is_backward", "sin": "is_backward"}
    found = targets(simplified(function, backward))
    assert found.count(aten.exp.default) == 2
    assert found.count(aten.transpose.int) == 1


def test_dead_code_goes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        aten.rand_like(aten.exp(x))
        return aten.neg(x)

    assert targets(simplified(function)) == [aten.neg.default]


def test_freeze_tells_types_apart() -> None:
    assert freeze([1, {"a": slice(0, 1)}]) == freeze((1, {"a": slice(0, 1)}))
    assert len({freeze(value) for value in (1, 1.0, True)}) == 3


def test_operands_without_elements_leave_a_concatenation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.cat([aten.new_empty(x, [0]), x, aten.slice(x, 0, 0, 0), x], 0)

    module = simplified(function)
    assert targets(module) == [aten.cat.default]
    (cat,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert len(cat.args[0]) == 2


def test_a_concatenation_that_promotes_or_has_no_elements_at_all_stays() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = aten.new_empty(x, [0], dtype=torch.float64)
        return aten.cat([wide, x]), aten.cat([wide, wide])

    module = simplified(function)
    cats = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert [len(cat.args[0]) for cat in cats] == [2, 2]
