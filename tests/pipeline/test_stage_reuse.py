"""Stages that are alike but for names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, capture_microbatch
from autoshard.pipeline.graph.stage_slices import StageModule, cut
from autoshard.pipeline.plan.stage_reuse import captured_microbatch, structural_fingerprint, task_graph_marks
from autoshard.planner.regions import with_regions
from tests.targets import target as target_of

STAGES = 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x)).relu() * self.scale


class Deep(nn.Module):
    def __init__(self, dropout: bool = False, mark: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.mark = mark
        self.layers = nn.ModuleList(Layer(8) for _ in range(STAGES))
        if dropout:
            self.layers[2].up = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with self.mark():
                x = layer(x)
        return x.square().mean()


def parts(module: nn.Module) -> list[StageModule]:
    """A layer on every stage."""
    return parts_of(capture_microbatch(module, (torch.empty(4, 8),), {}))


def parts_of(step: MicrobatchStep) -> list[StageModule]:
    """A layer on every stage."""
    stage_of, stage = {}, 0
    for each in step.operators:
        path = step.joint.module_path(each.nodes[0])
        stage = int(path.split(".")[1]) if path.startswith("layers.") else stage
        stage_of[each.name] = stage
    return cut(step, stage_of, STAGES)


def text(stage: StageModule) -> object:
    """Equal for stages that are alike but for names."""
    return structural_fingerprint(stage.step), task_graph_marks(stage.step)


def test_equal_stages_of_two_cuts_are_one() -> None:
    step = capture_microbatch(Deep(), (torch.empty(4, 8),), {})
    assert [one.step is other.step for one, other in zip(parts_of(step), parts_of(step), strict=True)] == [True] * 4


def test_stages_that_do_something_else_are_not_alike() -> None:
    one, other = parts(Deep()), parts(Deep(dropout=True))
    assert text(one[1]) == text(one[2]) == text(other[1])
    assert text(other[2]) != text(one[2])
    frozen = Deep()
    frozen.layers[2].up.weight.requires_grad_(False)
    assert text(parts(frozen)[2]) != text(one[2])


@pytest.mark.parametrize("marked", [True, False])
def test_regions_are_in_the_steps_of_stages_that_are_alike(marked: bool) -> None:
    """Those of the code, and those of hints, which name modules of the whole model."""
    module = Deep(mark=autoshard.recompute if marked else nullcontext)
    hints = {"layers.1": autoshard.keep(), "layers.3": autoshard.recompute()}
    if marked:
        hints = {"layers.1.up": autoshard.keep()}
    target = target_of(hints=hints)
    call = BatchCall(module, (torch.empty(8, 8),), {})
    stages = parts_of(captured_microbatch(call, 2, target, dynamic=False))
    steps = [with_regions(stage.step, None, ()) for stage in stages]
    assert [bool(step.recomputed) for step in steps] == ([True] * 4 if marked else [False, False, False, True])
    assert {step.module_path(node) for step in steps for node in step.graph.nodes if node.name in step.kept} == (
        {"layers.1.up"} if marked else {"layers.1", "layers.1.up", "layers.1.norm"}
    )


def test_regions_by_themselves_keep_no_stages_apart() -> None:
    call = BatchCall(Deep(mark=autoshard.recompute), (torch.empty(8, 8),), {})
    stages = parts_of(captured_microbatch(call, 2, target_of(), dynamic=False))
    assert text(stages[1]) == text(stages[2])


def test_stages_move_nothing() -> None:
    call = BatchCall(Deep(mark=autoshard.offload), (torch.empty(8, 8),), {})
    with pytest.raises(PlanError, match=r"can not have autoshard.offload\(\) around .*test_stage_reuse.py:\d+ .*: its"):
        captured_microbatch(call, 2, target_of(), dynamic=False)
