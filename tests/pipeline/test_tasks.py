from __future__ import annotations

import pytest

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.schedules import schedule
from autoshard.pipeline.schedule.tasks import StepTaskGraph, step_task_graph
from tests.pipeline.cases import equal_stages


def edges(graph: StepTaskGraph) -> dict[str, set[str]]:
    return {task.name: {graph.tasks[need].name for need in task.needs} for task in graph.tasks}


def test_the_graph_of_two_ranks() -> None:
    graph = step_task_graph(schedule("GPipe", 2, 1), equal_stages(2))
    assert edges(graph) == {
        "0F0": set(),
        "0SEND_F0": {"0F0"},
        "1F0": {"0SEND_F0"},
        "1B0": {"1F0"},
        "1SEND_B0": {"1B0", "0F0"},
        "reduce 1": {"1B0"},
        "0B0": {"0F0", "1SEND_B0"},
        "reduce 0": {"0B0"},
        "apply 0": {"0B0", "reduce 0"},
        "apply 1": {"1B0", "reduce 1"},
    }
    assert {task.ranks for task in graph.tasks if "SEND" in task.name} == {(0, 1), (1, 0)}


def test_stages_on_one_rank_hand_on_without_a_message() -> None:
    graph = edges(step_task_graph(schedule("ZBVZeroBubble", 1, 1, 2), equal_stages(2)))
    assert graph["1F0"] == {"0F0"}
    assert graph["1I0"] == {"1F0"}
    assert graph["1W0"] == {"1I0"}
    assert graph["0I0"] == {"0F0", "1I0"}
    assert not any("SEND" in name for name in graph)


def test_two_that_run_together_wait_for_all_that_both_need_and_send_after_both() -> None:
    made = schedule("DualPipeV", 2, 4, 2)
    graph = edges(step_task_graph(made, equal_stages(4)))
    (pair,) = [action for action in made.orders[1] if str(action) == "(1F3;2B1)OVERLAP_F_B"]
    first, second = map(str, pair.parts)
    assert graph[first] == graph[second] == {"0SEND_F3", "2F1", "3SEND_B1"}
    (after,) = [action for action in made.orders[1] if str(action) == "(2F2;1B0)OVERLAP_F_B"]
    assert str(after.parts[1]) in graph["2SEND_F2"] & graph["1SEND_B0"]


def test_a_half_of_backward_for_weights_does_not_wait_for_what_is_sent() -> None:
    graph = edges(step_task_graph(schedule("InterleavedZeroBubble", 2, 2), equal_stages(2)))
    assert graph["1W0"] == {"1I0"}


def test_as_many_costs_as_stages() -> None:
    with pytest.raises(PipelineError, match="has 2 stages, and there are costs of 1"):
        step_task_graph(schedule("GPipe", 2, 2), equal_stages(1))
