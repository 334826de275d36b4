from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck

from autoshard.capture import capture
from autoshard.operators.routed.routing import routing
from tests.capture.interpret import run_joint
from tests.models.routed import ROUTINGS, Inverse, sorted_experts

F64 = torch.float64
IDS = torch.tensor([2, 0, 2, 4, 0, 0, 2, 4])  # of five groups, two of which get nothing


def test_the_operators() -> None:
    order, places, splits, ends = route = routing.group(IDS, 5)
    assert torch.equal(IDS[order], IDS.sort().values)
    assert places.tolist() == list(range(8))
    assert splits.tolist() == [[3, 0, 3, 0, 2]] * 2
    assert ends.tolist() == [3, 3, 6, 6, 8]
    values = torch.rand(4, 3, dtype=F64)
    rows = routing.dispatch(values, *route[:3])
    assert torch.equal(rows, values[order // 2])
    assert torch.equal(routing.combine(rows, *route[:3]), values.repeat_interleave(2, 0))


def test_tables_of_groups() -> None:
    _, places, _, ends = routing.group(IDS, 5)
    table, rows = torch.rand(5, 3, dtype=F64), torch.rand(8, 3, dtype=F64)
    assert torch.equal(routing.spread(table, places, ends), table[IDS.sort().values])
    sums = torch.zeros(5, 3, dtype=F64).index_add(0, IDS.sort().values, rows)
    torch.testing.assert_close(routing.collect(rows, places, ends), sums)


def test_the_operators_keep_torchs_contract() -> None:
    *route, ends = routing.group(IDS, 5)
    opcheck(routing.spread.default, (torch.rand(5, 3, dtype=F64, requires_grad=True), route[1], ends))
    opcheck(routing.collect.default, (torch.rand(8, 3, dtype=F64, requires_grad=True), route[1], ends))
    opcheck(routing.group.default, (IDS, 5))
    opcheck(routing.dispatch.default, (torch.rand(4, 3, dtype=F64, requires_grad=True), *route))
    opcheck(routing.dispatch.default, (torch.rand(8, dtype=F64, requires_grad=True), *route))
    opcheck(routing.combine.default, (torch.rand(8, 3, dtype=F64, requires_grad=True), *route))


def _found(module: nn.Module, inputs: dict[str, torch.Tensor]) -> Counter[str]:
    """How often the captured graph routes; its numbers are the module's."""
    expected = module(**inputs)
    tangent = torch.linspace(1, 2, expected.numel(), dtype=F64).view_as(expected)
    expected.backward(tangent)
    graph = capture(module, (), inputs)
    step = run_joint(graph, module, (), inputs, tangents={"output": tangent})
    assert torch.equal(step.output, expected)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return Counter(target._schema.name for target in targets if getattr(target, "namespace", "") == "autoshard")


@pytest.mark.parametrize(("routed", "inverse"), [("random", "argsort"), *((each, "index_put") for each in ROUTINGS)])
def test_sorted_experts_are_routed(routed: str, inverse: Inverse) -> None:
    """Rows go and come back once in the forward half, and once in the backward half; no weights with them."""
    found = _found(*sorted_experts(dtype=F64, routing=routed, inverse=inverse))
    rows = {"autoshard::group": 1, "autoshard::dispatch": 2, "autoshard::combine": 2}
    assert found == rows | {"autoshard::spread": 1, "autoshard::collect": 1}


class Ranked(nn.Module):
    """Rows in the order of their groups, and what is done with the order."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], **how: Any) -> None:
        super().__init__()
        self.use = use
        self.how = how
        self.scale = nn.Parameter(torch.rand(6, dtype=F64))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ranked, order = torch.sort(ids, **self.how)
        return self.use(x * self.scale, ranked, order)


def _ends(ranked: torch.Tensor) -> torch.Tensor:
    return torch.histc(ranked.double(), 5, 0, 4).cumsum(0, dtype=torch.int32)


def _back(rows: torch.Tensor, ranked: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows[order][torch.argsort(order)] * _ends(ranked).sum()


def _ranked(rows: torch.Tensor, ranked: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows[order] * _ends(ranked).sum()


def _uncounted(rows: torch.Tensor, ranked: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows[order][torch.argsort(order)]


@pytest.mark.parametrize(("use", "how"), [(_ranked, {}), (_uncounted, {}), (_back, {"descending": True})])
def test_what_does_not_go_all_the_way_stays(use: Any, how: dict[str, bool]) -> None:
    x = torch.rand(8, 6, dtype=F64)
    assert _found(Ranked(_back), {"x": x, "ids": IDS})["autoshard::combine"]
    assert not _found(Ranked(use, **how), {"x": x, "ids": IDS})


def _told(rows: torch.Tensor, ranked: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return (rows[order] * order.unsqueeze(1))[torch.argsort(order)] * _ends(ranked).sum()


def test_other_uses_of_the_order_see_the_same() -> None:
    """Torch may sort equal numbers in another order than the operators do: all uses must agree on one."""
    ids = torch.arange(5).repeat(40)
    x = torch.rand(200, 6, dtype=F64)
    assert not torch.equal(ids.sort().indices, ids.sort(stable=True).indices)
    assert _found(Ranked(_told), {"x": x, "ids": ids})["autoshard::dispatch"]
