from __future__ import annotations

import torch
from torch.library import opcheck

from autoshard.capture.routing_operators import routing

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
