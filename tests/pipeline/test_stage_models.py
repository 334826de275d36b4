"""Stages of real models: right along the edges of the step, balanced, and cut where little crosses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from autoshard.pipeline.graph.microbatch_step import MicrobatchStep
from autoshard.pipeline.graph.operator_costs import read_stage_graph
from autoshard.pipeline.graph.stage_graph import StageGraph, coarsen
from autoshard.pipeline.graph.stage_problem import StageDevice, StageProblem
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.graph.stage_solvers import StageProgram
from autoshard.pipeline.graph.stages import Stages, assign_stages
from autoshard.solver.linear import minimise
from tests.models import ZOO, Gpt
from tests.pipeline.exporting import cost_model, export_call
from tests.pipeline.random_graphs import held_bytes, imbalance


@cache
def _model(name: str) -> tuple[MicrobatchStep, StageGraph]:
    step = export_call(*ZOO[name]())
    return step, read_stage_graph(step, cost_model())


@cache
def _deep(layers: int) -> StageGraph:
    """A GPT of the size of GPT-2, tied, without numbers."""
    with torch.device("meta"):
        module = Gpt(768, 12, layers, "chunk", tied=True, dropout=0.0)
        module.positions = torch.nn.Embedding(1024, 768)
        tokens = torch.zeros(8, 1024, dtype=torch.long)
    return read_stage_graph(export_call(module, {"input_ids": tokens, "labels": tokens}), cost_model())


def _assign(graph: StageGraph, count: int, **options: float) -> Stages:
    return assign_stages(graph, [StageDevice(25e9)] * count, list(range(count, 0, -1)), **options)


@pytest.mark.parametrize(("count", "bandwidth"), [(2, 25e9), (4, 25e9), (3, 1e7)])
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "hf_t5", "unet", "resnet18"])
def test_stages_never_go_back(name: str, count: int, bandwidth: float) -> None:
    step, graph = _model(name)
    devices = [StageDevice(bandwidth)] * count
    stages = assign_stages(graph, devices, [1] * count)
    assert set(stages.stage_of) == {each.name for each in step.operators}
    assert set(stages.stage_of.values()) == set(range(count))
    placed = [stages.stage_of[each.name] for each in step.operators]
    assert all(
        placed[owner] <= placed[place]
        for place, each in enumerate(step.operators)
        for node in each.nodes
        for source in node.all_input_nodes
        if (owner := step.owner(source)) is not None
    )
    assert imbalance(graph, devices, stages) <= max(stages.tolerance, 0.1)
    assert stages.totals.objective == pytest.approx(_least_objective(graph, devices, [1] * count, stages), rel=1e-5)
    assert list(stages.totals.forward_bytes) == _crossing(step, stages, count)


def _least_objective(
    graph: StageGraph, devices: Sequence[StageDevice], in_flight: Sequence[int], stages: Stages
) -> float:
    """A lower bound of the objective of every assignment of the merged nodes within the tolerance."""
    merged = coarsen(graph, 0.5 * min(stages.tolerance, 1.0) / len(devices))
    program = StageProgram(StageProblem(merged, tuple(devices), tuple(in_flight), stages.tolerance))
    return minimise(program.program, time_limit=60).bound / program.scale


def _crossing(step: MicrobatchStep, stages: Stages, count: int) -> list[int]:
    """Bytes over every boundary, as the step is cut."""
    parts = cut(step, stages.stage_of, count, stages.recomputed)
    return [sum(value.like.nbytes for value in part.passed) for part in parts[:-1]]


@pytest.mark.parametrize("count", [2, 4])
def test_a_deep_model_is_cut_between_its_blocks(count: int) -> None:
    graph = _deep(16)
    # Up to torch 2.13 a dropout of nothing is a node, too: two for every block.
    assert len(coarsen(graph, 0.1 / 4 / count).nodes) < 0.55 * len(graph.nodes)
    stages = _assign(graph, count, tolerance=0.2)
    residual = 8 * 1024 * 768 * 4
    assert stages.totals.forward_bytes == [residual] * (count - 1)
    assert stages.totals.backward_bytes == [residual] * (count - 1)
    devices, flights = [StageDevice(25e9)] * count, list(range(count, 0, -1))
    assert imbalance(graph, devices, stages) <= 0.2
    least = _least_objective(graph, devices, flights, stages)
    assert stages.totals.objective - least < 1e-5 * stages.totals.objective
    tied = graph.at_rest["tokens.weight"]
    assert sum(stages.totals.at_rest) == sum(graph.at_rest.values()) + tied


def test_memory_for_microbatches_in_flight_moves_work_to_later_stages() -> None:
    graph = _deep(16)
    free = _assign(graph, 2, tolerance=0.5)
    short = int(held_bytes(graph, [StageDevice(25e9)] * 2, [2, 1], free)[0] * 0.9)
    devices = [StageDevice(25e9, memory=short), StageDevice(25e9)]
    moved = assign_stages(graph, devices, [2, 1], tolerance=0.5)
    assert held_bytes(graph, devices, [2, 1], moved)[0] <= short
    assert moved.totals.seconds[0] < free.totals.seconds[0]
