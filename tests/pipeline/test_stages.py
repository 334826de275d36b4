"""`assign_stages` and `marked_stages`: what they return and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from autoshard.errors import BudgetError, HintError, PlanError
from autoshard.pipeline.graph.stage_graph import StageGraph, StageValue
from autoshard.pipeline.graph.stage_problem import StageDevice, StageProblem
from autoshard.pipeline.graph.stages import assign_stages, marked_stages
from tests.pipeline.random_graphs import chain, graphs, held_bytes, imbalance, node, problems, smallest_objective


def _devices(count: int, bandwidth: float = 1.0) -> list[StageDevice]:
    return [StageDevice(bandwidth)] * count


def test_a_chain_is_cut_where_least_crosses() -> None:
    stages = assign_stages(chain([1.0] * 6, [9, 9, 4, 9, 9]), _devices(2), [1, 1], in_order=True)
    assert stages.stage_of == {"n0": 0, "n1": 0, "n2": 0, "n3": 1, "n4": 1, "n5": 1}
    assert stages.totals.forward_bytes == [4]
    assert stages.totals.backward_bytes == [4]
    assert stages.totals.objective == 8.0
    assert stages.totals.seconds == pytest.approx([3.0, 3.0])


def test_of_equal_cuts_the_balanced_one_is_taken() -> None:
    graph = chain([1.0] * 40, [1] * 39)
    # A value that may be recomputed makes a graph one for the integer program.
    branched = replace(graph, values=(replace(graph.values[0], recompute_seconds=99.0), *graph.values[1:]))
    for kind in (graph, branched):
        stages = assign_stages(kind, _devices(4), [1] * 4, tolerance=0.3)
        assert imbalance(kind, _devices(4), stages) == pytest.approx(0.0)


@given(problems(graphs(6)))
@settings(max_examples=40, deadline=None)
def test_every_answer_keeps_its_limits_and_every_refusal_is_right(problem: StageProblem) -> None:
    expected = smallest_objective(problem)
    arguments = (problem.graph, problem.devices, problem.in_flight)
    try:
        stages = assign_stages(*arguments, tolerance=problem.tolerance)
    except BudgetError:
        assert smallest_objective(replace(problem, tolerance=1e9)) is None
        return
    memory = zip(problem.memory(stages.totals), problem.devices, strict=True)
    assert all(held <= device.memory for held, device in memory)
    assert problem.imbalance(stages.totals) <= stages.tolerance
    if expected is None:
        assert stages.tolerance > problem.tolerance
    else:
        assert stages.totals.objective == pytest.approx(expected, abs=1e-6)


def test_a_faster_stage_gets_more_work() -> None:
    devices = [StageDevice(1.0, speed=3.0), StageDevice(1.0, speed=1.0)]
    stages = assign_stages(chain([1.0] * 8, [1] * 7), devices, [1, 1])
    assert list(stages.stage_of.values()) == [0] * 6 + [1] * 2
    assert stages.totals.seconds == pytest.approx([2.0, 2.0])


def test_memory_moves_the_cut_and_widens_the_tolerance() -> None:
    graph = chain([1.0] * 8, [1] * 7, saved=10)
    devices = [StageDevice(1.0, memory=61.0), StageDevice(1.0, memory=100.0)]
    stages = assign_stages(graph, devices, [2, 1])
    assert list(stages.stage_of.values()) == [0] * 3 + [1] * 5
    assert held_bytes(graph, devices, [2, 1], stages) == [60, 51]
    assert stages.totals.saved == [30, 51]
    assert imbalance(graph, devices, stages) == pytest.approx(0.25)
    assert stages.tolerance == pytest.approx(0.25, abs=1e-4)


def test_what_does_not_fit_is_an_error_with_bytes() -> None:
    graph = chain([1.0] * 4, [1] * 3, saved=2**30)
    with pytest.raises(
        BudgetError, match=r"fits in 1\.0 GiB, 1\.0 GiB.*needs .* GiB.*microbatches in flight"
    ) as caught:
        assign_stages(graph, [StageDevice(1.0, memory=2**30)] * 2, [1, 1])
    assert caught.value.peak == 2 * 2**30 + 1


def test_a_model_on_one_stage() -> None:
    stages = assign_stages(chain([1.0] * 4, [1] * 3), _devices(1), [1])
    assert set(stages.stage_of.values()) == {0}
    assert stages.totals.forward_bytes == []


def test_tied_parameters_are_on_both_stages() -> None:
    nodes = tuple(node(place, 1.0, at_rest=["tied"] if place in (0, 3) else []) for place in range(4))
    values = tuple(StageValue(f"n{place}", place, (place + 1,), 1, 1) for place in range(3))
    stages = assign_stages(StageGraph(nodes, values, {"tied": 7}), _devices(2), [1, 1])
    assert stages.totals.at_rest == [7, 7]


def test_a_value_that_all_stages_read_is_passed_on_or_made_again() -> None:
    nodes = tuple(node(place, 0.001 if place == 0 else 1.0) for place in range(4))
    mask = StageValue("n0", 0, (1, 2, 3), 100, 0, recompute_seconds=0.001)
    values = (mask, *(StageValue(f"n{place}", place, (place + 1,), 1, 1) for place in (1, 2)))
    graph = StageGraph(nodes, values, {})
    again = assign_stages(graph, _devices(3, 1e3), [1] * 3)
    assert again.recomputed == {"n0": (1, 2)}
    assert again.totals.forward_bytes == [1, 1]
    passed = assign_stages(graph, _devices(3, 1e6), [1] * 3)
    assert passed.recomputed == {}
    assert passed.totals.forward_bytes == [101, 101]


def test_outputs_of_early_stages_are_handed_on() -> None:
    nodes = tuple(node(place, 1.0) for place in range(3))
    values = (StageValue("n0", 0, (1,), 5, 0, output=True), StageValue("n1", 1, (2,), 1, 1))
    assert assign_stages(StageGraph(nodes, values, {}), _devices(3), [1] * 3).totals.forward_bytes == [5, 6]


def test_fewer_operators_than_stages() -> None:
    with pytest.raises(PlanError, match=r"4 pipeline stages .* 2 operators"):
        assign_stages(chain([1.0, 1.0], [1]), _devices(4), [1] * 4)


def test_where_no_balance_is_possible_the_best_is_taken() -> None:
    graph = chain([1.0, 1.0, 4.0, 1.0], [1, 1, 1])
    stages = assign_stages(graph, _devices(2), [1, 1])
    assert list(stages.stage_of.values()) == [0, 0, 1, 1]
    assert imbalance(graph, _devices(2), stages) == pytest.approx(5 / 3.5 - 1)
    assert stages.tolerance >= 5 / 3.5 - 1


@pytest.mark.parametrize(
    ("in_flight", "tolerance", "message"),
    [([1], 0.1, "2 devices and 1 numbers"), ([0, 1], 0.1, "in_flight="), ([1, 1], -1.0, "tolerance=-1.0")],
)
def test_arguments_that_do_not_fit(in_flight: list[int], tolerance: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_stages(chain([1.0, 1.0], [1]), _devices(2), in_flight, tolerance=tolerance)


def test_a_device_has_a_speed() -> None:
    with pytest.raises(ValueError, match=r"speed=0\.0"):
        StageDevice(1.0, speed=0.0)


TWO = [StageDevice(1.0)] * 2


def test_what_has_no_mark_runs_with_what_it_reads() -> None:
    """Or, where it reads nothing, with what reads it first; balance is not asked for."""
    graph = chain([1.0] * 6, [9, 9, 4, 9, 9])
    stages = marked_stages(graph, TWO, [2, 1], {"n1": 0, "n4": 1})
    assert stages.stage_of == {"n0": 0, "n1": 0, "n2": 0, "n3": 0, "n4": 1, "n5": 1}
    assert (stages.totals.forward_bytes, stages.totals.seconds) == ([9], [4.0, 2.0])
    assert imbalance(graph, TWO, stages) == pytest.approx(1 / 3)


def test_what_is_made_of_inputs_is_made_once_more_where_that_is_cheaper() -> None:
    values = (StageValue("n0", 0, (1, 2), 8, recompute_seconds=1.0), StageValue("n1", 1, (2,), 2))
    graph = StageGraph(tuple(node(place, 1.0) for place in range(3)), values, {})
    marks = {"n1": 0, "n2": 1}
    stages = marked_stages(graph, TWO, [1, 1], marks)
    assert stages.stage_of["n0"] == 0
    assert stages.recomputed == {"n0": (1,)}
    assert stages.totals.forward_bytes == [2]
    dear = replace(graph, values=(replace(values[0], recompute_seconds=9.0), values[1]))
    assert marked_stages(dear, TWO, [1, 1], marks).totals.forward_bytes == [10]


def test_marks_that_no_pipeline_can_have() -> None:
    graph = chain([1.0] * 3, [1] * 2)
    with pytest.raises(HintError, match="n2 is marked for pipeline stage 0 and reads n1 of stage 1"):
        marked_stages(graph, TWO, [1, 1], {"n1": 1, "n2": 0})
    with pytest.raises(HintError, match="operators n0 and n1 are marked for pipeline stages 0 and 1 and can't be part"):
        marked_stages(graph.merge_groups([0, 0, 1]), TWO, [1, 1], {"n0": 0, "n1": 1})
    small = [StageDevice(1.0, memory=2.0)] * 2
    with pytest.raises(BudgetError, match="marks as 2 pipeline stages need 0 B, 3 B, and their devices have 2 B, 2 B"):
        marked_stages(chain([1.0] * 2, [3]), small, [1, 1], {"n0": 0, "n1": 1})
