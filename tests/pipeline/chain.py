"""Stages of a cut one after the other in one process: the halves of their steps, as ranks run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.capture.joint_graph import JointGraph
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep
from autoshard.pipeline.graph.stage_slices import StageModule


class HalfByHalf(fx.Interpreter):
    """Runs the forward half of a step, then the backward half."""

    def __init__(self, step: JointGraph) -> None:
        super().__init__(step.graph_module, garbage_collect_values=False)
        self.step = step

    def run_half(self, phase: str, tensors: Mapping[fx.Node, torch.Tensor]) -> None:
        """Compute the nodes of a half; `tensors` are those of its placeholders."""
        self.env.update(tensors)
        for node in self.step.graph.nodes:
            if node.op == "call_function" and self.step.phase(node) == phase:
                self.env[node] = self.run_node(node)


class Chain:
    """One microbatch on its way through all stages.

    Args:
        whole: what was cut.
        stages: the stages.
        args, kwargs: a call of the whole module.
    """

    def __init__(
        self,
        whole: MicrobatchStep,
        stages: Sequence[StageModule],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.whole, self.stages = whole, stages
        names = [leaf for leaf in whole.joint.call.leaves if isinstance(leaf, str)]
        self.inputs = dict(zip(names, whole.joint.call.flatten(args, kwargs or {}), strict=True))
        self.runs = [HalfByHalf(stage.step) for stage in stages]
        self.returned: list[tuple[torch.Tensor, ...]] = []

    @torch.no_grad()
    def forward(self) -> Any:
        """What the module returns."""
        handed: tuple[torch.Tensor, ...] = ()
        for stage, run in zip(self.stages, self.runs, strict=True):
            given = dict(zip((value.name for value in stage.received), handed, strict=True))
            for value, tensor in zip(stage.received, handed, strict=True):
                assert (tensor.shape, tensor.dtype) == (value.like.shape, value.like.dtype)
                assert tensor.is_contiguous()
            given |= {keyword: self.inputs[name].contiguous() for name, (keyword, _) in stage.inputs.items()}
            tensors = {}
            for item in stage.step.inputs:
                if item.kind == "parameter":
                    tensors[item.node] = stage.module.get_parameter(item.name).detach()
                elif item.kind == "buffer":
                    tensors[item.node] = stage.module.get_buffer(item.name)
                elif item.kind == "constant":
                    tensors[item.node] = item.value
                elif item.kind == "input":
                    tensors[item.node] = given[item.name]
                if item.kind != "tangent":
                    assert tensors[item.node].stride() == item.node.meta["val"].stride(), item
            run.run_half("forward", tensors)
            handed = tuple(run.env[node] for node in stage.step.tensor_outputs.values())
            self.returned.append(handed)
        for stage, run in zip(self.stages, self.runs, strict=True):
            for output in stage.step.outputs:
                if output.kind == "mutation":
                    stage.module.get_buffer(output.name).copy_(run.env[output.node])
        return self.whole.joint.result.unflatten(list(handed))

    @torch.no_grad()
    def backward(self) -> None:
        """Gradients of the one scalar that the module returns, handed from stage to stage."""
        handed = {}
        for stage, run in reversed([*zip(self.stages, self.runs, strict=True)]):
            tangents = [item for item in stage.step.inputs if item.kind == "tangent"]
            if stage is self.stages[-1]:
                outputs = stage.step.tensor_outputs
                handed = {item.name: torch.ones_like(run.env[outputs[item.name]]) for item in tangents}
            assert handed.keys() == {item.name for item in tangents}
            run.run_half("backward", {item.node: handed[item.name] for item in tangents})
            places = {value.name: f"output[{place}]" for place, value in enumerate(stage.received)}
            handed = {}
            for output in stage.step.outputs:
                if output.kind != "gradient" or output.node is None:
                    continue
                gradient = run.env[output.node]
                if output.name in places:
                    handed[places[output.name]] = gradient.contiguous()
                else:
                    parameter = stage.module.get_parameter(output.name)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            wanted = {places[value.name] for value in stage.received if value.like.requires_grad}
            assert handed.keys() == wanted


class ModuleChain(Chain):
    """A chain of stages that are parallelised: their modules run, each with an autograd graph."""

    def forward(self) -> Any:
        """What the module returns."""
        handed: tuple[torch.Tensor, ...] = ()
        self.received: list[list[torch.Tensor]] = []
        for stage in self.stages:
            received = []
            for value, tensor in zip(stage.received, handed, strict=True):
                assert (tensor.shape, tensor.dtype) == (value.like.shape, value.like.dtype)
                received.append(tensor.detach().clone(memory_format=torch.contiguous_format))
                received[-1].requires_grad_(value.like.requires_grad)
            keywords = {keyword: self.inputs[name] for name, (keyword, _) in stage.inputs.items()}
            handed = tuple(result.contiguous() for result in stage.module(*received, **keywords))
            self.received.append(received)
            self.returned.append(handed)
        return self.whole.joint.result.unflatten(list(handed))

    def backward(self) -> None:
        """Gradients of the one scalar that the module returns, handed from stage to stage."""
        (loss,) = (value for value in self.returned[-1] if value.ndim == 0)
        loss.backward()
        for returned, taken in zip(reversed(self.returned[:-1]), reversed(self.received), strict=False):
            pairs = [(out, into.grad) for out, into in zip(returned, taken, strict=True) if into.grad is not None]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def settle_stages(step: MicrobatchStep, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The nearest later stages at which no value goes back and what has to stay together does."""
    stages = dict(stage_of)
    before: dict[str, int] = {}
    while before != stages:
        before = dict(stages)
        for place, each in enumerate(step.operators):
            sources = {step.owner(source) for node in each.nodes for source in node.all_input_nodes} | {place}
            stages[each.name] = max(stages[step.operators[owner].name] for owner in sources if owner is not None)
        for group in step.together:
            stages.update(dict.fromkeys(group, max(stages[name] for name in group)))
    return stages


def balance_stages(step: MicrobatchStep, stages: int) -> dict[str, int]:
    """Equally many operators for every stage, in the order of the graph."""
    count = len(step.operators)
    return settle_stages(step, {each.name: place * stages // count for place, each in enumerate(step.operators)})
