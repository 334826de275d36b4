"""Stages that are alike but for names: one is captured, and its graph serves the others under their own names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import PlanError
from autoshard.pipeline.graph.forward_export import ExportedModule, export_forward
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.stage_modules import StageModule, cut
from autoshard.pipeline.plan.stage_reuse import StageCaptures, export_microbatch, structural_text
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
    return parts_of(export_forward(module, (torch.empty(4, 8),), {}))


def parts_of(graph: ExportedModule) -> list[StageModule]:
    """A layer on every stage."""
    stage_of, stage = {}, 0
    for node in graph.operators:
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        stage = next((int(path.split(".")[1]) for path in reversed(paths) if path.startswith("layers.")), stage)
        stage_of[node.name] = stage
    return cut(graph, stage_of, STAGES)


def described(graph: JointGraph) -> list[object]:
    nodes = [
        (node.name, node.op, str(node.target), graph.module_path(node), graph.phase(node)) for node in graph.graph.nodes
    ]
    inputs = [(one.kind, one.name, one.node.name) for one in graph.inputs]
    outputs = [(one.kind, one.name, one.node and one.node.name, one.tangent) for one in graph.outputs]
    return [nodes, inputs, outputs, graph.aliases, graph.call, graph.result, graph.signature, graph.fingerprint]


def test_the_graph_of_a_stage_that_is_alike_is_what_its_own_capture_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = parts(Deep())
    alone = [capture(stage.module, *stage.example) for stage in stages]
    captured: list[int] = []

    def watched(*args: object, **kwargs: object) -> JointGraph:
        captured.append(1)
        return capture(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("autoshard.pipeline.plan.stage_reuse.capture", watched)
    captures = StageCaptures()
    shared = [captures.joint_graph(stage) for stage in stages]
    assert len(captured) == 3  # the first takes the batch and the last makes the loss; those between are alike
    assert [described(graph) for graph in shared] == [described(graph) for graph in alone]
    assert captures.joint_graph(stages[2]) is shared[2]


def test_stages_that_do_something_else_are_not_alike() -> None:
    one, other = parts(Deep()), parts(Deep(dropout=True))
    assert structural_text(one[1]) == structural_text(one[2]) == structural_text(other[1])
    assert structural_text(other[2]) != structural_text(one[2])
    frozen = Deep()
    frozen.layers[2].up.weight.requires_grad_(False)
    assert structural_text(parts(frozen)[2]) != structural_text(one[2])


@pytest.mark.parametrize("marked", [True, False])
def test_regions_are_in_the_steps_of_stages_that_are_alike(marked: bool) -> None:
    """Those of the code, and those of hints, which name modules of the whole model."""
    module = Deep(mark=autoshard.recompute if marked else nullcontext)
    hints = {"layers.1": autoshard.keep(), "layers.3": autoshard.recompute()}
    if marked:
        hints = {"layers.1.up": autoshard.keep()}
    target = target_of(hints=hints)
    call = BatchCall(module, (torch.empty(8, 8),), {})
    stages = parts_of(export_microbatch(call, 2, target, dynamic=False))
    texts = [structural_text(stage) for stage in stages]
    assert texts[1] != texts[2]
    captures = StageCaptures()
    steps = [captures.joint_graph(stage) for stage in stages]
    assert [bool(step.recomputed) for step in steps] == ([True] * 4 if marked else [False, False, False, True])
    assert {step.module_path(node) for step in steps for node in step.graph.nodes if node.name in step.kept} == (
        {"layers.1.up"} if marked else {"layers.1", "layers.1.up", "layers.1.norm"}
    )
    assert captures.joint_graph(stages[2]) is steps[2]


def test_regions_by_themselves_keep_no_stages_apart() -> None:
    call = BatchCall(Deep(mark=autoshard.recompute), (torch.empty(8, 8),), {})
    stages = parts_of(export_microbatch(call, 2, target_of(), dynamic=False))
    assert structural_text(stages[1]) == structural_text(stages[2])


def test_stages_move_nothing() -> None:
    call = BatchCall(Deep(mark=autoshard.offload), (torch.empty(8, 8),), {})
    with pytest.raises(PlanError, match=r"can not have autoshard.offload\(\) around .*test_stage_reuse.py:\d+ .*: its"):
        export_microbatch(call, 2, target_of(), dynamic=False)
