"""`marked_stages`: stages as `forward` marks them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.errors import BudgetError, HintError
from autoshard.pipeline.assign.marked_stages import marked_stages
from autoshard.pipeline.assign.stages import StageDevice
from autoshard.pipeline.graph.stage_graph import StageGraph, StageValue
from tests.pipeline.random_graphs import chain, node

TWO = [StageDevice(1.0)] * 2


def test_what_has_no_mark_runs_with_what_it_reads() -> None:
    """Or, where it reads nothing, with what reads it first; balance is not asked for."""
    stages = marked_stages(chain([1.0] * 6, [9, 9, 4, 9, 9]), TWO, [2, 1], {"n1": 0, "n4": 1})
    assert stages.stage_of == {"n0": 0, "n1": 0, "n2": 0, "n3": 0, "n4": 1, "n5": 1}
    assert (stages.forward_bytes, stages.method, stages.seconds) == ((9,), "marks", (4.0, 2.0))
    assert stages.imbalance == pytest.approx(1 / 3)


def test_what_is_made_of_inputs_is_made_once_more_where_that_is_cheaper() -> None:
    values = (StageValue("n0", 0, (1, 2), 8, recompute_seconds=1.0), StageValue("n1", 1, (2,), 2))
    graph = StageGraph(tuple(node(place, 1.0) for place in range(3)), values, {})
    marks = {"n1": 0, "n2": 1}
    stages = marked_stages(graph, TWO, [1, 1], marks)
    assert stages.stage_of["n0"] == 0
    assert stages.recomputed == {"n0": (1,)}
    assert stages.forward_bytes == (2,)
    dear = replace(graph, values=(replace(values[0], recompute_seconds=9.0), values[1]))
    assert marked_stages(dear, TWO, [1, 1], marks).forward_bytes == (10,)


def test_marks_that_no_pipeline_can_have() -> None:
    graph = chain([1.0] * 3, [1] * 2)
    with pytest.raises(HintError, match="n2 is marked for pipeline stage 0 and reads n1 of stage 1"):
        marked_stages(graph, TWO, [1, 1], {"n1": 1, "n2": 0})
    with pytest.raises(HintError, match="operators n0 and n1 are marked for pipeline stages 0 and 1 and can't be part"):
        marked_stages(graph.merge_groups([0, 0, 1]), TWO, [1, 1], {"n0": 0, "n1": 1})
    small = [StageDevice(1.0, memory=2.0)] * 2
    with pytest.raises(BudgetError, match="marks as 2 pipeline stages need 0 B, 3 B, and their devices have 2 B, 2 B"):
        marked_stages(chain([1.0] * 2, [3]), small, [1, 1], {"n0": 0, "n1": 1})
