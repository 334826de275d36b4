from __future__ import annotations

import numpy as np

from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.presolve import presolve
from tests.solver.problems import two_axes, with_memory


def test_every_edge_is_seen_from_both_ends() -> None:
    core = presolve(Core.of(with_memory(two_axes(24, labels=3), 0.3)))
    view = CoreArrays.of(core)
    assert len(view.around) == 2 * len(core.ends) > 0
    seen = set()
    for node in range(core.nodes):
        for place in range(view.nodes[node]["around"], view.nodes[node + 1]["around"]):
            half = view.around[place]
            back, other = view.around[half["reverse"]], int(half["neighbour"])
            assert back["neighbour"] == node
            shape = core.size[node], core.size[other]
            actual = view.table[half["table"] :][: shape[0] * shape[1]].reshape(shape)
            expected = view.table[back["table"] :][: actual.size].reshape(shape[::-1])
            assert (actual == expected.T).all()
            seen.add((node, other))
    for edge, (one, other) in enumerate(core.ends.tolist()):
        assert {(one, other), (other, one)} <= seen
        table = core.table[core.start[edge] : core.start[edge + 1]]
        place = next(
            half
            for half in view.around[view.nodes[one]["around"] : view.nodes[one + 1]["around"]]
            if half["neighbour"] == other
        )
        assert np.array_equal(view.table[place["table"] :][: len(table)], table)
