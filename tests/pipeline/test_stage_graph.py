"""Components against reachability."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.pipeline.graph.stage_graph import strongly_connected_components


@given(st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_a_component_is_what_reaches_each_other(nodes: int, data: st.DataObject) -> None:
    ends = st.integers(0, nodes - 1)
    edges = data.draw(st.lists(st.tuples(ends, ends), max_size=16))
    reach = np.eye(nodes, dtype=bool)
    for source, user in edges:
        reach[source, user] = True
    for _ in range(3):  # paths of up to eight edges
        reach = reach @ reach
    found = np.array(strongly_connected_components(nodes, edges))
    assert ((found[:, None] == found) == (reach & reach.T)).all()
